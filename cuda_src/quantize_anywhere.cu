#include "platform.cuh"

#include "common/quantize_anywhere.cuh"
