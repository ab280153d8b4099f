// Weights whose rows begin at any address, by TMA, which reads from multiples of 16 bytes: the rows of each residue modulo
// `phases` lie a multiple of 16 bytes apart, and all begin equally far behind such a multiple. A tile has rows of one
// residue, and is multiplied by rows of a that begin as far behind theirs (shift.cu).
#pragma once
#include "../pipeline.cuh"

// of[i]: the rows i, i + phases, ..., each from the multiple of 16 bytes before its first code, offset[i] bytes before
// it, to its last code.
struct alignas(64) PhasedMaps {
    TensorMap of[16];
    int offset[16];
};

// Which channels a tile of SIZE has. Without phases they are neighbours.
template <int PHASES, int SIZE>
struct PhasedTile {
    static constexpr int phases = PHASES > 0 ? PHASES : 1;

    DEVICE static int channel(int tile, int place) { return (tile / phases * SIZE + place) * phases + tile % phases; }

    DEVICE static void prefetch(const TensorMap* map) { map_prefetch(map); }
    DEVICE static void prefetch(const PhasedMaps* maps) { map_prefetch(&maps->of[0]); }

    DEVICE static void load(unsigned to, const TensorMap* map, int column, int tile, unsigned barrier) {
        tile_load_once(to, map, column, tile * SIZE, barrier);
    }
    DEVICE static void load(unsigned to, const PhasedMaps* maps, int column, int tile, unsigned barrier) {
        tile_load_once(to, &maps->of[tile % phases], column, tile / phases * SIZE, barrier);
    }

    // Clears what precedes the first codes of 64 rows in their first k-block, by the warpgroup that multiplies them: it
    // may be NaN, which zeros of a would not cancel.
    DEVICE static void clear_before(char*, const TensorMap&, int, int) {}
    DEVICE static void clear_before(char* rows, const PhasedMaps& maps, int tile, int barrier) {
        const int row = (int)threadIdx.x % 128, offset = maps.offset[tile % phases];
        if (row < 64) {
            unsigned* const words = (unsigned*)(rows + row * BLOCK_K + row % 8 * 16);  // swizzled
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int bytes = offset - 4 * i;
                if (bytes > 0) words[i] = bytes >= 4 ? 0 : words[i] & 0xffffffffu << 8 * bytes;
            }
        }
        writes_fence();
        threads_sync(barrier, 128);
    }
};
