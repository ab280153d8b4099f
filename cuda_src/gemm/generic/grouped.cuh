// Grouped products of anything: a block a tile of a group (mma_tile.cuh). The grid has a block for every tile that
// there can be.
#pragma once
#include "../grouped_tiles.cuh"
#include "mma_tile.cuh"

constexpr int CAPACITY = FP8_GROUP_TABLE;  // in groups, a power of two from WARP on

KERNEL_ALONE(THREADS)
generic_grouped(MATMUL_PARAMETERS, GROUP_PARAMETERS) {
    SHARED GroupTable<CAPACITY> table;
    const GroupedTiles<ROWS, COLS, 8, CAPACITY> tiles(table, offs, groups, m, n, scale_stride, bias_stride);
    grid_dependency_launch();
    grid_dependency_wait();
    if (thread_x() < WARP) tiles.find();
    block_barrier();
    if (!tiles.more()) return;
    const GroupTile tile = tiles.origin();
    make_tile(tile, a, lda, b + tile.group * weight_stride, ldb, scale_a, scale_a_row, scale_a_k,
              scale_b + tile.group * scale_stride, scale_b_row, scale_b_k,
              bias_from<FP8_BIAS>(bias, tile.group * bias_stride), out, ldo, tile.end, n, k, nullptr, nullptr, 0.0f);
}
