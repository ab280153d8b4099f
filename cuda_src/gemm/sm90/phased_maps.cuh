// Rows of codes at any address and stride by TMA, which takes addresses and strides that are multiples of 16 bytes: every
// `phases`-th row has such a stride, so the rows of each residue have a map of their own.
#pragma once
#include "../pipeline.cuh"

// of[i]: the rows i, i + phases, ..., from the multiple of 16 bytes before the first of them; each begins offset[i] bytes
// after its row of the map, which ends with it.
struct alignas(64) PhasedMaps {
    TensorMap of[16];
    int offset[16];
};

// How a tile of ROWS rows lies in shared memory: `maps` boxes of `each` rows, one for each residue. Without phases it is
// one box, of an ordinary map. (Of fewer rows than phases each is the first of its residue.)
template <int PHASES, int ROWS>
struct PhasedTile {
    static constexpr int maps = PHASES == 0 ? 1 : PHASES < ROWS ? PHASES : ROWS, each = ROWS / maps;

    // The row of the tile that lies at a place.
    DEVICE static int row(int place) { return PHASES <= 1 ? place : place % each * maps + place / each; }

    DEVICE static void prefetch(const TensorMap* map) { map_prefetch(map); }
    DEVICE static void prefetch(const PhasedMaps* phased) {
        for (int i = 0; i < maps; ++i) map_prefetch(&phased->of[i]);
    }

    // Loads the columns from `column` on of the tile that is the `tile`-th. What is read once leaves L2 first; with
    // phases its last line is read again with the next columns.
    template <bool ONCE>
    DEVICE static void load(unsigned to, const TensorMap* map, int column, int tile, unsigned barrier) {
        if (ONCE) tile_load_once(to, map, column, tile * ROWS, barrier);
        else tile_load(to, map, column, tile * ROWS, barrier);
    }
    template <bool>
    DEVICE static void load(unsigned to, const PhasedMaps* phased, int column, int tile, unsigned barrier) {
#pragma unroll
        for (int i = 0; i < maps; ++i)
            tile_load(to + i * each * BLOCK_K, &phased->of[i], phased->offset[i] + column, tile * each, barrier);
    }
};
