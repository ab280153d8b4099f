#include "../../ptx/matrix.cuh"
#include "mma.cuh"
