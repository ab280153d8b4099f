// The FP8 matrix instructions of a wave: D += W * T with W 16 channels x DEPTH of k, and T DEPTH of k x 16 tokens.
//
// A lane holds eight bytes along k, at k = 8 * (lane / 16), of channel lane % 16 of W and of token lane % 16 of T. The
// order of k does not matter, only that W and T agree on it. Of D it holds token lane % 16 and ROWS neighbouring
// channels, from ROWS * (lane / 16) on. gfx942 reads the codes as fnuz, gfx950 and gfx12 as OCP formats. Every lane of
// the wave has to take part.
#pragma once
#include "../platform.cuh"

constexpr int MATRIX_SIDE = 16;
constexpr int MATRIX_ROWS = MATRIX_SIDE * MATRIX_SIDE / WARP;

constexpr bool is_e5m2(int format) { return format == E5M2 || format == E5M2FNUZ; }

#if defined(__gfx942__) || defined(__gfx950__)
using Accumulator = float __attribute__((ext_vector_type(4)));

template <int W, int T>
DEVICE Accumulator matrix_multiply(Vector8 weight, Vector8 tokens, Accumulator sum) {
    const long w = __builtin_bit_cast(long, weight), t = __builtin_bit_cast(long, tokens);
    if constexpr (is_e5m2(W)) return __builtin_amdgcn_mfma_f32_16x16x32_bf8_fp8(w, t, sum, 0, 0, 0);
    else if constexpr (is_e5m2(T)) return __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(w, t, sum, 0, 0, 0);
    else return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(w, t, sum, 0, 0, 0);
}
#elif defined(__gfx1200__) || defined(__gfx1201__)
using Accumulator = float __attribute__((ext_vector_type(8)));

template <int W, int T>
DEVICE Accumulator matrix_multiply(Vector8 weight, Vector8 tokens, Accumulator sum) {
    using Two = int __attribute__((ext_vector_type(2)));
    const Two w = __builtin_bit_cast(Two, weight), t = __builtin_bit_cast(Two, tokens);
    if constexpr (is_e5m2(W)) return __builtin_amdgcn_wmma_f32_16x16x16_bf8_fp8_w32_gfx12(w, t, sum);
    else if constexpr (is_e5m2(T)) return __builtin_amdgcn_wmma_f32_16x16x16_fp8_bf8_w32_gfx12(w, t, sum);
    else return __builtin_amdgcn_wmma_f32_16x16x16_fp8_fp8_w32_gfx12(w, t, sum);
}
#else
#error "FP8 matrix instructions are those of gfx942, gfx950, gfx1200 and gfx1201"
#endif

// A number that is the same in every lane of a wave, in a scalar register.
DEVICE int wave_uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }

// As load16, but never split into words that are loaded twice.
DEVICE Vector16 load16_whole(const void* p) {
    using Four = unsigned __attribute__((ext_vector_type(4)));
    const Four v = *static_cast<const Four*>(p);
    return {v.x, v.y, v.z, v.w};
}

// The compiler moves nothing across this point, so that loads before it are in flight together.
DEVICE void keep_order() { __builtin_amdgcn_sched_barrier(0); }
