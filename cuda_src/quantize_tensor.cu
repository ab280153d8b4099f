#include "platform.cuh"

#include "common/quantize_tensor.cuh"
