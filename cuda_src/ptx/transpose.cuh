// Transpositions between the threads of a warp.
#pragma once
#include "../platform.cuh"

// Transposes an 8x8 matrix of 16-bit numbers in the registers of a warp: a thread has two neighbours of a row.
DEVICE unsigned warp_transpose(unsigned pair) {
    unsigned result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Transposes the words of four neighbouring threads: thread q gives its word i to thread i, and gets word q of each.
DEVICE void quad_transpose(unsigned& a, unsigned& b, unsigned& c, unsigned& d, int lane) {
    const bool odd = lane & 1, high = lane & 2;
    unsigned x = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), y = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    (odd ? a : b) = x;
    (odd ? c : d) = y;
    x = __shfl_xor_sync(0xffffffffu, high ? a : c, 2), y = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    (high ? a : c) = x;
    (high ? b : d) = y;
}

// Loads the four matrices that `matrices_store` stores.
DEVICE void matrices_load(unsigned place, unsigned& a, unsigned& b, unsigned& c, unsigned& d) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
                 : "r"(place)
                 : "memory");
}

// Stores four 8x8 matrices of 16-bit numbers, each in registers as for `warp_transpose`: lane i gives the address of
// row i % 8 of matrix i / 8, 16 bytes.
DEVICE void matrices_store(unsigned place, unsigned a, unsigned b, unsigned c, unsigned d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(place), "r"(a), "r"(b),
                 "r"(c), "r"(d)
                 : "memory");
}
