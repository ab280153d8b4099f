#include "../half_mma.cuh"
#include "../../../cuda_src/gemm/generic/decode.cuh"
