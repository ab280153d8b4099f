// Weights whose rows begin at any address, by TMA, which reads from multiples of 16 bytes: the rows of each residue modulo
// `phases` lie a multiple of 16 bytes apart, and all begin equally far behind such a multiple. A tile has rows of one
// residue. Its boxes have 16 columns more than a k-block, and a thread aligns what it multiplies in its registers.
#pragma once
#include "../pipeline.cuh"

// of[i]: the rows i, i + phases, ..., each from the multiple of 16 bytes before its first code, offset[i] bytes before
// it, to its last code.
struct alignas(64) PhasedMaps {
    TensorMap of[16];
    int offset[16];
};

// 64 rows of a k-block of the weight as wgmma takes them: where they lie, in swizzled rows.
struct PlacedWeight {
    static constexpr int COLUMNS = BLOCK_K;  // of a box
    word64 codes;

    DEVICE void place(unsigned address) { codes = tile_descriptor(address); }
};

// The same in registers: of each row the codes behind the first `offset`. All words of a warp lie in different banks.
struct LoadedWeight {
    static constexpr int COLUMNS = BLOCK_K + 16;
    unsigned codes[4][4];

    DEVICE void load(const char* rows, int offset) {
        const int thread = (int)threadIdx.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
        const char* const from = rows + row * COLUMNS + thread % 4 * 4 + (offset & ~3);
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned* const words = (const unsigned*)(from + i / 4 * 32 + i % 4 / 2 * 16 + i % 2 * 8 * COLUMNS);
            codes[i / 4][i % 4] = __funnelshift_r(words[0], words[1], offset % 4 * 8);
        }
    }
};

template <bool loaded>
struct WeightOf {
    using Type = PlacedWeight;
};
template <>
struct WeightOf<true> {
    using Type = LoadedWeight;
};

// Which channels a tile of SIZE has. Without phases they are neighbours.
template <int PHASES, int SIZE>
struct PhasedTile {
    static constexpr int phases = PHASES > 0 ? PHASES : 1;
    using Weight = typename WeightOf<(PHASES > 0)>::Type;

    DEVICE static int channel(int tile, int place) { return (tile / phases * SIZE + place) * phases + tile % phases; }

    DEVICE static void prefetch(const TensorMap* map, int) { map_prefetch(map); }
    DEVICE static void prefetch(const PhasedMaps* maps, int tile) { map_prefetch(&maps->of[tile % phases]); }

    DEVICE static void load(unsigned to, const TensorMap* map, int column, int tile, unsigned barrier) {
        tile_load_once(to, map, column, tile * SIZE, barrier);
    }
    DEVICE static void load(unsigned to, const PhasedMaps* maps, int column, int tile, unsigned barrier) {
        tile_load_once(to, &maps->of[tile % phases], column, tile / phases * SIZE, barrier);
    }

    DEVICE static void prefetch(const TensorMap* map, int column, int tile) { tile_prefetch(map, column, tile * SIZE); }

    DEVICE static int offset(const PhasedMaps& maps, int tile) { return maps.offset[tile % phases]; }
};
