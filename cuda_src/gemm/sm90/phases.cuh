// TMA loads of weights whose rows begin at any address, although TMA reads from multiples of 16 bytes: the rows of each
// residue modulo `phases` are a multiple of 16 bytes apart, so all of them begin at the same offset from such a
// multiple. A tile has the rows of one residue, or half of its rows each from two consecutive residues. Boxes are 16
// columns wider than a k-block, and a thread aligns the codes that it multiplies in its registers.
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

// The same in registers, for wgmma: each row's codes after the first `offsets`, of a warp's first eight rows and of its
// last eight. A warp's loads have no bank conflicts.
struct LoadedWeight {
    static constexpr int COLUMNS = BLOCK_K + 16;
    unsigned codes[4][4];

    // The first of `rows` are those of the warpgroup, `warp_rows` each of its warps. The last eight rows of a warp lie
    // `distance` rows after its first eight.
    DEVICE void load(const char* rows, int warp_rows, int distance, const int (&offsets)[2]) {
        const int thread = (int)threadIdx.x % 128, row = thread / 32 * warp_rows + thread % 32 / 4;
        const char* const from = rows + row * COLUMNS + thread % 4 * 4;
        const char* const halves[2] = {from + (offsets[0] & ~3), from + distance * COLUMNS + (offsets[1] & ~3)};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned* const words = (const unsigned*)(halves[i % 2] + i / 4 * 32 + i % 4 / 2 * 16);
            codes[i / 4][i % 4] = __funnelshift_r(words[0], words[1], offsets[i % 2] % 4 * 8);
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

// The channels of a tile of SIZE: neighbours, or with phases every phases-th, of RESIDUES consecutive residues. The
// place of a channel is its row of wgmma's M side. With two residues the first eight places of a warp have the first
// residue and the last eight the second, so a thread has neighbouring channels. The residues of a tile are a group.
template <int PHASES, int RESIDUES, int SIZE>
struct PhasedTile {
    static_assert(RESIDUES == 1 || (RESIDUES == 2 && PHASES >= 2), "a tile has one residue, or two of several");
    static constexpr int phases = PHASES > 0 ? PHASES : 1;
    static constexpr int residues = RESIDUES, groups = phases / RESIDUES;
    static constexpr int rows = SIZE / RESIDUES;  // of a residue
    // The channels of places that are eight apart, in a warp, differ by this.
    static constexpr int unit_stride = RESIDUES > 1 ? 1 : 8 * phases;
    using Weight = typename WeightOf<(PHASES > 0)>::Type;

    // The row of a place among those of its residue in the tile.
    DEVICE static int row(int place) { return RESIDUES > 1 ? place / 16 * 8 + place % 8 : place; }
    DEVICE static int residue(int tile, int i) { return tile % groups * RESIDUES + i; }
    DEVICE static int channel(int tile, int place) {
        return (tile / groups * rows + row(place)) * phases + residue(tile, RESIDUES > 1 ? place / 8 % 2 : 0);
    }

    DEVICE static void prefetch(const TensorMap* map, int) { map_prefetch(map); }
    DEVICE static void prefetch(const PhasedMaps* maps, int tile) {
#pragma unroll
        for (int i = 0; i < RESIDUES; ++i) map_prefetch(&maps->of[residue(tile, i)]);
    }

    DEVICE static void load(unsigned to, const TensorMap* map, int column, int tile, unsigned barrier) {
        tile_load_once(to, map, column, tile * SIZE, barrier);
    }
    DEVICE static void load(unsigned to, const PhasedMaps* maps, int column, int tile, unsigned barrier) {
#pragma unroll
        for (int i = 0; i < RESIDUES; ++i)
            tile_load_once(to + i * rows * Weight::COLUMNS, &maps->of[residue(tile, i)], column, tile / groups * rows,
                           barrier);
    }

    DEVICE static void prefetch(const TensorMap* map, int column, int tile) { tile_prefetch(map, column, tile * SIZE); }

    // Loads what a warpgroup multiplies of a k-block from its stage into registers.
    DEVICE static void align(LoadedWeight& weight, const char* stage, const PhasedMaps& maps, int tile, int warpgroup) {
        const int offsets[2] = {maps.offset[residue(tile, 0)], maps.offset[residue(tile, RESIDUES - 1)]};
        weight.load(stage + warpgroup * (64 / RESIDUES) * Weight::COLUMNS, 16 / RESIDUES, RESIDUES > 1 ? rows : 8,
                    offsets);
    }
};
