#include "../matrix.cuh"
#include "../../../cuda_src/gemm/generic/grouped.cuh"
