#include "platform.cuh"

#include "../cuda_src/common/quantize_anywhere.cuh"
