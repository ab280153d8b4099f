// The epilogue of a product that a library has left in fp32: acc is [m, n], contiguous.
//
// A block takes THREADS * EPILOGUE_COLUMNS columns of row block_x() / column_tiles and of every
// (grid_x() / column_tiles)-th row after it.
#pragma once
#include "epilogue.cuh"

constexpr int EPILOGUE_COLUMNS = 4;

template <int OUT, int BIAS, int ACTIVATION, bool ACCUMULATES, int AMAX, int THREADS>
DEVICE void epilogue_of_rows(const float* acc, const float* scale_a, long long scale_a_stride, const float* scale_b,
                             long long scale_b_stride, const void* bias, void* out, long long out_stride,
                             const float* out_scale, float* amax, int m, int n, int column_tiles, float beta) {
    const int first = int(block_x() % column_tiles) * (THREADS * EPILOGUE_COLUMNS) + thread_x();
    const int row_step = grid_x() / column_tiles;
    grid_dependency_launch();
    grid_dependency_wait();
    const Epilogue<OUT, BIAS> finish(bias, out_scale);
    const Ending<OUT, ACTIVATION, ACCUMULATES> end = {beta};
    float largest = 0.0f;
    for (int row = block_x() / column_tiles; row < m; row += row_step) {
        const float across = scale_a[row * scale_a_stride];
#pragma unroll
        for (int i = 0; i < EPILOGUE_COLUMNS; ++i) {
            const int col = first + i * THREADS;
            if (col >= n) break;
            const float sum =
                finish.value(acc[static_cast<long long>(row) * n + col], across, scale_b[col * scale_b_stride], col);
            const float value = end.of(sum, out, row * out_stride + col);
            finish.store(out, row * out_stride + col, value);
            if (AMAX) largest = maximum(largest, magnitude(value));
        }
    }
    if (AMAX) publish_amax(largest, amax);
}

KERNEL(FP8_THREADS)
apply_epilogue(const float* acc, const float* scale_a, long long scale_a_stride, const float* scale_b,
               long long scale_b_stride, const void* bias, void* out, long long out_stride, const float* out_scale,
               float* amax, int m, int n, int column_tiles, float beta) {
    epilogue_of_rows<FP8_OUT, FP8_BIAS, FP8_ACTIVATION, FP8_ACCUMULATES, FP8_AMAX, FP8_THREADS>(
        acc, scale_a, scale_a_stride, scale_b, scale_b_stride, bias, out, out_stride, out_scale, amax, m, n,
        column_tiles, beta);
}
