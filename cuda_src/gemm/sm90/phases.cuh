// Weights whose rows begin at any address, by TMA, which reads from multiples of 16 bytes: the rows of each residue modulo
// `phases` lie a multiple of 16 bytes apart, and all begin equally far behind such a multiple. A tile has rows of two
// residues that follow each other, if there are several: half of wgmma's M side each, so that a thread has neighbouring
// channels. Boxes have 16 columns more than a k-block, and a thread aligns what it multiplies in its registers.
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

// How many codes precede a warp's first eight rows, and its last.
struct Offsets {
    int first, last;
};

// The same in registers: of each row the codes behind those of `offsets`. All words of a warp lie in different banks.
struct LoadedWeight {
    static constexpr int COLUMNS = BLOCK_K + 16;
    unsigned codes[4][4];

    // The first of `rows` are those of the warpgroup's; a warp's last eight lie `apart` rows behind its first eight.
    DEVICE void load(const char* rows, int warp_rows, int apart, Offsets offsets) {
        const int thread = (int)threadIdx.x % 128, row = thread / 32 * warp_rows + thread % 32 / 4;
        const char* const from = rows + row * COLUMNS + thread % 4 * 4;
        const char* const halves[2] = {from + (offsets.first & ~3), from + apart * COLUMNS + (offsets.last & ~3)};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const unsigned* const words = (const unsigned*)(halves[i % 2] + i / 4 * 32 + i % 4 / 2 * 16);
            codes[i / 4][i % 4] = __funnelshift_r(words[0], words[1], (i % 2 ? offsets.last : offsets.first) % 4 * 8);
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

// Which channels a tile of SIZE has. Without phases they are neighbours. A place is that of a row of wgmma's M side.
template <int PHASES, int SIZE>
struct PhasedTile {
    static constexpr int phases = PHASES > 0 ? PHASES : 1;
    static constexpr int residues = phases > 1 ? 2 : 1;  // that a tile has rows of: as many of each
    static constexpr int groups = phases / residues;     // of residues: neighbouring tiles have one each
    static constexpr int rows = SIZE / residues;         // of a residue
    static constexpr int apart = residues > 1 ? 1 : 8 * phases;  // channels of places that are eight apart, in a warp
    using Weight = typename WeightOf<(PHASES > 0)>::Type;

    DEVICE static int row(int place) { return residues > 1 ? place / 16 * 8 + place % 8 : place; }
    // Of a place, behind the first channel of the tile and its neighbours that have the other groups, by up to `phases`.
    DEVICE static int from_first(int place) { return row(place) * phases; }
    DEVICE static int channel(int tile, int place) {
        const int residue = tile % groups * residues + (residues > 1 ? place / 8 % 2 : 0);
        return (tile / groups * rows + row(place)) * phases + residue;
    }

    DEVICE static void prefetch(const TensorMap* map, int) { map_prefetch(map); }
    DEVICE static void prefetch(const PhasedMaps* maps, int tile) {
#pragma unroll
        for (int i = 0; i < residues; ++i) map_prefetch(&maps->of[tile % groups * residues + i]);
    }

    DEVICE static void load(unsigned to, const TensorMap* map, int column, int tile, unsigned barrier) {
        tile_load_once(to, map, column, tile * SIZE, barrier);
    }
    DEVICE static void load(unsigned to, const PhasedMaps* maps, int column, int tile, unsigned barrier) {
#pragma unroll
        for (int i = 0; i < residues; ++i)
            tile_load_once(to + i * rows * Weight::COLUMNS, &maps->of[tile % groups * residues + i], column,
                           tile / groups * rows, barrier);
    }

    DEVICE static void prefetch(const TensorMap* map, int column, int tile) { tile_prefetch(map, column, tile * SIZE); }

    // Loads what a warpgroup multiplies of a k-block into registers.
    DEVICE static void align(LoadedWeight& weight, const char* stage, const PhasedMaps& maps, int tile, int warpgroup) {
        const int* const offsets = maps.offset + tile % groups * residues;
        weight.load(stage + warpgroup * (64 / residues) * Weight::COLUMNS, 16 / residues, residues > 1 ? rows : 8,
                    {offsets[0], offsets[residues - 1]});
    }
};
