#include "../../ptx/half_mma.cuh"
#include "decode.cuh"
