#include "platform.cuh"
#include "common/normalize.cuh"

KERNEL(FP8_THREADS)
normalize(const byte* weight, byte* out, long long count, const float* scale, float* scale_out, long long scale_count,
          const float* input_scale, float* input_scale_out, long long input_scale_count) {
    normalize_all<FP8_TO_FNUZ, FP8_VECTOR, FP8_THREADS>(weight, out, count, scale, scale_out, scale_count, input_scale,
                                                        input_scale_out, input_scale_count);
}
