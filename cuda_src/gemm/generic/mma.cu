#include "../../ptx/half_mma.cuh"
#include "mma.cuh"
