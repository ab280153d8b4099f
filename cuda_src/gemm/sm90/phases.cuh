// TMA loads of weights whose rows begin at any address, although TMA reads from multiples of 16 bytes: the rows of each
// residue modulo `phases` are a multiple of 16 bytes apart, so all of them begin at the same offset from such a
// multiple. A tile has the rows of one residue. Its boxes are 16 columns wider than a k-block, and a thread aligns the
// codes that it multiplies in its registers.
#pragma once
#include "../pipeline.cuh"

// of[i] maps the rows i, i + phases, ...: each from a multiple of 16 bytes, offset[i] bytes before its first code, to
// its last code.
struct alignas(64) PhasedMaps {
    TensorMap of[16];
    int offset[16];
};

// 64 rows of a k-block of the weight in shared memory, for wgmma: in swizzled rows, by their descriptor.
struct PlacedWeight {
    static constexpr int COLUMNS = BLOCK_K;  // of a TMA box
    word64 codes;

    DEVICE void place(unsigned address) { codes = tile_descriptor(address); }
};

// The same in registers, for wgmma: each row's codes after the first `offset`. A warp's loads have no bank conflicts.
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

// The channels of a tile of SIZE: neighbours, or with phases every phases-th.
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
