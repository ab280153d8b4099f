#include "../platform.cuh"
#include "../../cuda_src/gemm/relayout.cuh"

KERNEL(256)
relayout(const float* in0, float* out0, long long row0, long long col0, int rows0, int cols0, int ld0,
         const float* in1, float* out1, long long row1, long long col1, int rows1, int cols1, int ld1,
         const float* in2, float* out2, long long row2, long long col2, int rows2, int cols2, int ld2,
         const unsigned short* halves, unsigned short* copy, int halves_count, const float* number,
         float* reciprocal) {
    relayout_all<256>({in0, out0, row0, col0, rows0, cols0, ld0}, {in1, out1, row1, col1, rows1, cols1, ld1},
                 {in2, out2, row2, col2, rows2, cols2, ld2}, halves, copy, halves_count, number, reciprocal);
}
