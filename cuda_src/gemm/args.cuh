// The parameters of product kernels that load a and b by address: MatmulArgs of fp8core/kernels/gemm/args.py.
#pragma once

// a [m, k] and b [n, k]; strides in elements, of the scales over (m, k blocks) and (n or n blocks, k blocks), 0 where a
// scale is broadcast. row_tiles tiles cover the rows. (As a struct they make sm89_decode spill registers.)
#define MATMUL_PARAMETERS                                                                                        \
    const byte *a, long long lda, const byte *b, long long ldb, const float *scale_a, long long scale_a_row,     \
        long long scale_a_k, const float *scale_b, long long scale_b_row, long long scale_b_k, const void *bias, \
        void *out, long long ldo, int m, int n, int k, int row_tiles
