// The matrix instructions of AMD GPUs as tiles of 16 x 16 x 32, D += A * B by one wave: two MFMA (gfx90a, gfx942,
// gfx950) or WMMA (gfx11, gfx12) of 16-bit floats or, with FP8_DIRECT, those of codes (gfx942, gfx950, gfx12). Here the
// 16-bit float is bf16, in which every number of an FP8 format is normal, because gfx90a flushes subnormal fp16 numbers
// to zero. cuda_src/ptx/matrix.cuh documents the definitions.
#pragma once
#include "../platform.cuh"
#if FP8_DIRECT
#include "mfma.cuh"
#endif
#include "../../cuda_src/gemm/generic/halves.cuh"

constexpr int MMA_SIDE = 16, MMA_DEPTH = 32;

#if defined(__gfx1100__) || defined(__gfx1101__) || defined(__gfx1102__) || defined(__gfx1103__) || \
    defined(__gfx1150__) || defined(__gfx1151__) || defined(__gfx1152__) || defined(__gfx1153__)
#define FP8CORE_WMMA_11 1  // both halves of the wave hold the same rows
#else
#define FP8CORE_WMMA_11 0
#endif
#if defined(__gfx90a__) || defined(__gfx942__) || defined(__gfx950__)
#define FP8CORE_MFMA 1
#else
#define FP8CORE_MFMA 0
#endif

constexpr int LANE_ROWS = 1, LANE_CHUNKS = FP8CORE_WMMA_11 ? 4 : 64 / WARP, SUMS = 256 / WARP;

DEVICE int lane_row(int) { return int(lane()) % 16; }
DEVICE int lane_chunk() { return FP8CORE_WMMA_11 ? 0 : int(lane()) / 16 * LANE_CHUNKS; }
DEVICE int sum_row(int i) { return FP8CORE_WMMA_11 ? 2 * i + int(lane()) / 16 : int(lane()) / 16 * SUMS + i; }
DEVICE int sum_column(int) { return int(lane()) % 16; }

template <class Chunk>
struct FragmentOf {
    Chunk chunk[LANE_ROWS][LANE_CHUNKS];
};
struct Sum {
    float of[SUMS];
};

template <class T, int COUNT>
struct Numbers {
    T of[COUNT];
};

#if FP8_DIRECT
template <int A, int B>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector8>& a, const FragmentOf<Vector8>& b) {
    Accumulator d = __builtin_bit_cast(Accumulator, sum);
#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; ++i) d = matrix_multiply<A, B>(a.chunk[0][i], b.chunk[0][i], d);
    sum = __builtin_bit_cast(Sum, d);
}
#elif FP8CORE_MFMA
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    using Four = short __attribute__((ext_vector_type(4)));
    using Result = float __attribute__((ext_vector_type(4)));
    const Vector16 x = a.chunk[0][0], y = b.chunk[0][0];
    Result d = __builtin_bit_cast(Result, sum);
    d = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Four, Vector8{x.x, x.y}),
                                                  __builtin_bit_cast(Four, Vector8{y.x, y.y}), d, 0, 0, 0);
    d = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(__builtin_bit_cast(Four, Vector8{x.z, x.w}),
                                                  __builtin_bit_cast(Four, Vector8{y.z, y.w}), d, 0, 0, 0);
    sum = __builtin_bit_cast(Sum, d);
}
#elif FP8CORE_WMMA_11
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    using Sixteen = short __attribute__((ext_vector_type(16)));
    using Result = float __attribute__((ext_vector_type(8)));
    using Pair = Numbers<Vector16, 2>;
    Result d = __builtin_bit_cast(Result, sum);
#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; i += 2)
        d = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(
            __builtin_bit_cast(Sixteen, Pair{a.chunk[0][i], a.chunk[0][i + 1]}),
            __builtin_bit_cast(Sixteen, Pair{b.chunk[0][i], b.chunk[0][i + 1]}), d);
    sum = __builtin_bit_cast(Sum, d);
}
#elif defined(__gfx1200__) || defined(__gfx1201__)
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    using Eight = short __attribute__((ext_vector_type(8)));
    using Result = float __attribute__((ext_vector_type(8)));
    Result d = __builtin_bit_cast(Result, sum);
#pragma unroll
    for (int i = 0; i < LANE_CHUNKS; ++i)
        d = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(__builtin_bit_cast(Eight, a.chunk[0][i]),
                                                              __builtin_bit_cast(Eight, b.chunk[0][i]), d);
    sum = __builtin_bit_cast(Sum, d);
}
#else
// Without matrix instructions, by shuffles: slow, but correct.
template <int, int>
DEVICE void multiply(Sum& sum, const FragmentOf<Vector16>& a, const FragmentOf<Vector16>& b) {
    for (int part = 0; part < WARP / 16; ++part)
        for (int chunk = 0; chunk < LANE_CHUNKS; ++chunk)
            for (int word = 0; word < 4; ++word) {
                const unsigned column = shuffle_from((&b.chunk[0][chunk].x)[word], lane() % 16 + 16 * part);
                for (int i = 0; i < SUMS; ++i) {
                    const unsigned row = shuffle_from((&a.chunk[0][chunk].x)[word], sum_row(i) + 16 * part);
                    sum.of[i] = fma_exact(float_of(row << 16), float_of(column << 16), sum.of[i]);
                    sum.of[i] = fma_exact(float_of(row & 0xffff0000u), float_of(column & 0xffff0000u), sum.of[i]);
                }
            }
}
#endif

// Two codes, each the upper byte of a half of `pair`, as bf16: the upper halves of their fp32 numbers, exactly.
template <int FORMAT>
DEVICE unsigned widened_pair(unsigned pair) {
    float lo, hi;
    if constexpr (!HARDWARE_FORMAT<FORMAT> && (FORMAT == E4M3FN || FORMAT == E5M2)) {
        const unsigned halves = FORMAT == E5M2 ? pair : e4m3fn_as_halves(pair);
        lo = half_to_float(static_cast<unsigned short>(halves)) * (FORMAT == E5M2 ? 1.0f : 256.0f);
        hi = half_to_float(static_cast<unsigned short>(halves >> 16)) * (FORMAT == E5M2 ? 1.0f : 256.0f);
    } else {
        decode_pair<FORMAT>(static_cast<unsigned short>((pair >> 8 & 0xffu) | (pair >> 16 & 0xff00u)), lo, hi);
    }
    return bits_of(lo) >> 16 | (bits_of(hi) & 0xffff0000u);
}
template <int FORMAT>
DEVICE void widen(unsigned codes, unsigned& lo, unsigned& hi) {
    lo = widened_pair<FORMAT>((codes & 0xffu) << 8 | (codes & 0xff00u) << 16);
    hi = widened_pair<FORMAT>((codes >> 8 & 0xff00u) | (codes & 0xff000000u));
}
