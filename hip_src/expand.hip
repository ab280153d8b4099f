#include "platform.cuh"
#include "../cuda_src/common/expand.cuh"

KERNEL(FP8_THREADS)
expand(const float* scales, int count, Shards<FP8_SHARDS> shards, float* out, int rows) {
    expand_scales<FP8_SHARDS, FP8_THREADS>(scales, count, shards, out, rows);
}
