// Products of many rows of anything: a block a tile (mma_tile.cuh).
#pragma once
#include "mma_tile.cuh"

KERNEL_ALONE(THREADS)
generic_mma(MATMUL_PARAMETERS, const float* out_scale, float* amax, float beta) {
    const TileOrigin origin = dense_tile<ROWS, COLS>(row_tiles);
    grid_dependency_launch();
    grid_dependency_wait();
    make_tile(origin, a, lda, b, ldb, scale_a, scale_a_row, scale_a_k, scale_b, scale_b_row, scale_b_k, bias, out, ldo,
              m, n, k, out_scale, amax, beta);
}
