#include "platform.cuh"
#include "common/requantize.cuh"

KERNEL(FP8_THREADS)
requantize(const byte* weight, long long weight_stride, const float* scales, int count, Shards<FP8_SHARDS> shards,
           byte* out, long long out_stride, float* max_scale, int rows, int cols, int column_tiles) {
    requantize_shards<FP8_FORMAT, FP8_SHARDS, FP8_VECTOR, FP8_ACROSS, FP8_THREADS>(
        weight, weight_stride, scales, count, shards, out, out_stride, max_scale, rows, cols, column_tiles);
}
