#include "platform.cuh"

#include "../cuda_src/common/quantize_strip.cuh"
