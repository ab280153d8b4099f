#include "../platform.cuh"
#include "../../cuda_src/gemm/simt.cuh"

KERNEL(MM_THREADS)
simt(const byte* a, long long lda, const byte* b, long long ldb, const float* scale_a, long long scale_a_row,
     long long scale_a_k, const float* scale_b, long long scale_b_row, long long scale_b_k, const void* bias, void* out,
     long long ldo, const float* out_scale, float* amax, int m, int n, int k, int row_tiles) {
    multiply_tile<FP8_A, FP8_B, FP8_OUT, FP8_BIAS, FP8_BLOCKED, FP8_B_BLOCK, FP8_AMAX, FP8_DOWN, FP8_WIDE, FP8_DEPTH,
                  FP8_VECTOR>(
        a, lda, b, ldb, scale_a, scale_a_row, scale_a_k, scale_b, scale_b_row, scale_b_k, bias, out, ldo, out_scale,
        amax, m, n, k, row_tiles);
}
