// Bias and result of a product: OUT, BIAS 0 fp32, 1 fp16, 2 bf16, -1 none.
#pragma once
#include "../../ptx/transpose.cuh"

#if OUT == 0
typedef float Out;
#else
typedef unsigned short Out;
#endif
#if BIAS == 1 || BIAS == 2
typedef unsigned short Bias;
#else
typedef float Bias;
#endif

DEVICE float bias_value(const Bias *bias, int channel) {
#if BIAS == 0
    return bias[channel];
#elif BIAS == 1
    return half_to_float(bias[channel]);
#elif BIAS == 2
    return bf16_to_float(bias[channel]);
#else
    return 0.0f;
#endif
}
