#include "../platform.cuh"
#include "../../cuda_src/gemm/epilogue.cuh"

KERNEL(FP8_THREADS)
epilogue(const float* acc, const float* scale_a, long long scale_a_stride, const float* scale_b,
         long long scale_b_stride, const void* bias, void* out, long long out_stride, const float* out_scale,
         float* amax, int m, int n, int column_tiles) {
    apply_epilogue<FP8_OUT, FP8_BIAS, FP8_AMAX, FP8_THREADS>(
        acc, scale_a, scale_a_stride, scale_b, scale_b_stride, bias, out, out_stride, out_scale, amax, m, n,
        column_tiles);
}
