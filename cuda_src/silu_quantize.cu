#include "platform.cuh"
#include "common/silu_quantize.cuh"

KERNEL(FP8_THREADS)
silu_quantize(const void* x, long long x_stride, byte* data, long long data_stride, void* scale,
              long long scale_row_stride, long long scale_col_stride, const float* upper, float upper_value, float eps,
              long long rows, int cols) {
    silu_quantize_tile<FP8_X, FP8_FORMAT, FP8_ROUND, FP8_MODE, FP8_GROUP_ROWS, FP8_GROUP_COLS, FP8_SCALE_FORMAT, FP8_ALIGNED,
                       FP8_VECTORS, RowTeam<FP8_THREADS, FP8_BLOCKS>>(
        x, x_stride, rows, cols,
        {data, data_stride, scale, scale_row_stride, scale_col_stride, upper, upper_value, eps});
}
