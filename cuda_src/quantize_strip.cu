#include "platform.cuh"

#include "common/quantize_strip.cuh"
