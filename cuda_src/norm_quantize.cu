#include "platform.cuh"
#include "common/norm_quantize.cuh"

KERNEL(FP8_THREADS)
norm_quantize(const void* x, long long x_stride, void* residual, long long residual_stride, const void* weight,
              float epsilon, byte* data, long long data_stride, void* scale, long long scale_row_stride,
              long long scale_col_stride, const float* upper, float upper_value, float eps, int cols) {
    norm_quantize_row<FP8_X, FP8_W, FP8_FORMAT, FP8_RESIDUAL, FP8_ROUND, FP8_MODE, FP8_GROUP_ROWS, FP8_GROUP_COLS,
                      FP8_SCALE_FORMAT, FP8_ALIGNED, FP8_VECTORS, RowTeam<FP8_THREADS, FP8_BLOCKS>>(
        x, x_stride, residual, residual_stride, weight, epsilon, cols,
        {data, data_stride, scale, scale_row_stride, scale_col_stride, upper, upper_value, eps});
}
