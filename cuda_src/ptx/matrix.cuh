// The tensor instructions of a warp as tiles of 16 x 16 x 32, D += A * B: four mma.sync m16n8k16 of 16-bit floats,
// which every GPU has from sm_80 on, or, with FP8_DIRECT, two m16n8k32 of codes. Here the 16-bit float is fp16, which
// represents every number of e4m3 and e5m2 exactly. hip_src/gemm/matrix.cuh defines the same for AMD GPUs, with bf16.
//
// The 32 numbers along k of a row of A, and of a column of B, are four chunks of eight. A lane holds LANE_CHUNKS
// chunks, from lane_chunk() on, of LANE_ROWS rows, lane_row() and 8 rows after it, and SUMS numbers of D. The order of
// k does not matter, only that A and B agree on it. Every lane of the warp has to take part.
#pragma once
#include "../platform.cuh"
#include "../gemm/generic/halves.cuh"
#if FP8_DIRECT
#include "mma.cuh"
#endif

constexpr int MMA_SIDE = 16, MMA_DEPTH = 32;
constexpr int LANE_ROWS = 2, LANE_CHUNKS = 1, SUMS = 8;

DEVICE int lane_row(int i) { return int(lane()) / 4 + 8 * i; }
DEVICE int lane_chunk() { return int(lane()) % 4; }
DEVICE int sum_row(int i) { return int(lane()) / 4 + 8 * (i / 2 % 2); }
DEVICE int sum_column(int i) { return 8 * (i / 4) + 2 * (int(lane()) % 4) + i % 2; }

// A lane's fragment of 16 rows of A, or columns of B: chunks of eight 16-bit floats (Vector16) or codes (Vector8).
template <class Chunk>
struct FragmentOf {
    Chunk chunk[LANE_ROWS][LANE_CHUNKS];
};
struct Sum {
    float of[SUMS];
};

#if FP8_DIRECT
template <int A, int B>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector8>& a, const FragmentOf<Vector8>& b) {
    const Vector8 top = a.chunk[0][0], low = a.chunk[1][0];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Vector8 column = b.chunk[i][0];
        float* const d = sum.of + 4 * i;
        MmaSum part = {d[0], d[1], d[2], d[3]};
        mma<A, B>(part, {top.x, low.x, top.y, low.y}, {column.x, column.y});
#pragma unroll
        for (int j = 0; j < 4; ++j) d[j] = part.of[j];
    }
}
#elif FP8CORE_PTX >= 800
DEVICE void multiply_half(float* d, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    const Vector16 top = a.chunk[0][0], low = a.chunk[1][0];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const Vector16 column = b.chunk[i][0];
        multiply_half(sum.of + 4 * i, top.x, low.x, top.y, low.y, column.x, column.y);
        multiply_half(sum.of + 4 * i, top.z, low.z, top.w, low.w, column.z, column.w);
    }
}
#else
// The same by shuffles, for the emulation and for GPUs without the instruction. It adds in the order of k, which the
// hardware does not guarantee.
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    const unsigned g = lane() / 4, q = lane() % 4;
    for (unsigned owner = 0; owner < 4; ++owner) {
        for (unsigned word = 0; word < 4; ++word) {
            unsigned rows[2], columns[4];
            for (unsigned i = 0; i < 2; ++i)
                rows[i] = __shfl_sync(0xffffffffu, (&a.chunk[i][0].x)[word], 4 * g + owner);
            for (unsigned i = 0; i < 4; ++i)
                columns[i] = __shfl_sync(0xffffffffu, (&b.chunk[i / 2][0].x)[word], 4 * (2 * q + i % 2) + owner);
            for (int i = 0; i < SUMS; ++i)
                for (int shift = 0; shift < 32; shift += 16)
                    sum.of[i] += half_to_float(static_cast<unsigned short>(rows[i / 2 % 2] >> shift)) *
                                 half_to_float(static_cast<unsigned short>(columns[i / 4 * 2 + i % 2] >> shift));
        }
    }
}
#endif

// Conversions of codes to fp16, exactly. sm_89 and later have an instruction for two e4m3 codes.
#if FP8CORE_PTX
DEVICE unsigned bytes_of(unsigned x, unsigned y, unsigned selector) {
    unsigned r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(selector));
    return r;
}
#else
DEVICE unsigned bytes_of(unsigned x, unsigned y, unsigned selector) { return __byte_perm(x, y, selector); }
#endif
DEVICE unsigned times_256(unsigned pair) {
#if FP8CORE_PTX
    unsigned r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(pair), "r"(0x5c005c00u));
    return r;
#else
    const unsigned lo = float_to_half(256.0f * half_to_float(static_cast<unsigned short>(pair)));
    return lo | unsigned(float_to_half(256.0f * half_to_float(static_cast<unsigned short>(pair >> 16)))) << 16;
#endif
}
template <int FORMAT>
DEVICE unsigned widened_pair(unsigned codes, unsigned selector) {
    if constexpr (FORMAT == E5M2) return bytes_of(codes, 0, selector);  // a code is the upper byte of its fp16
    if constexpr (FORMAT == E4M3FN) return times_256(e4m3fn_as_halves(bytes_of(codes, 0, selector)));
    float lo, hi;
    decode_pair<FORMAT>(static_cast<unsigned short>(codes >> (selector == 0x1404 ? 0 : 16)), lo, hi);
    return float_to_half(lo) | unsigned(float_to_half(hi)) << 16;
}
template <int FORMAT>
DEVICE void widen(unsigned codes, unsigned& lo, unsigned& hi) {
#if FP8CORE_PTX >= 890
    if constexpr (FORMAT == E4M3FN) {
        asm("{ .reg .b16 x, y; mov.b32 {x, y}, %2; cvt.rn.f16x2.e4m3x2 %0, x; cvt.rn.f16x2.e4m3x2 %1, y; }"
            : "=r"(lo), "=r"(hi)
            : "r"(codes));
        return;
    }
#endif
    lo = widened_pair<FORMAT>(codes, 0x1404);
    hi = widened_pair<FORMAT>(codes, 0x3424);
}
