#include "../half_mma.cuh"
#include "../../../cuda_src/gemm/generic/mma.cuh"
