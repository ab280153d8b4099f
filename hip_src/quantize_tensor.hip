#include "platform.cuh"

#include "../cuda_src/common/quantize_tensor.cuh"
