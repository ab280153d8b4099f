#include "platform.cuh"
#include "common/dequantize.cuh"

KERNEL(FP8_THREADS)
dequantize(const byte* q, long long q_stride, const void* scale, long long scale_row_stride, long long scale_col_stride,
           void* out, long long out_stride, long long rows, int cols, int column_tiles) {
    dequantize_rows<FP8_FORMAT, FP8_OUT, FP8_VECTOR, FP8_GROUP_ROWS, FP8_GROUP_COLS, FP8_SCALE_FORMAT, FP8_ACROSS, FP8_THREADS>(
        q, q_stride, scale, scale_row_stride, scale_col_stride, out, out_stride, rows, cols, column_tiles);
}
