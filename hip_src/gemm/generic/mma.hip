#include "../matrix.cuh"
#include "../../../cuda_src/gemm/generic/mma.cuh"
