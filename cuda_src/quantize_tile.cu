#include "platform.cuh"

#include "common/quantize_tile.cuh"
