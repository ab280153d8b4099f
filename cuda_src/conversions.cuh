// The platform ops that convert 16-bit floats and FP8, for CUDA. platform.cuh includes them after its fp32 arithmetic.
// hip_src/conversions.cuh defines the same ops.
#pragma once

// ---- 16-bit floats as bits ---------------------------------------------------------------------------

DEVICE float bf16_to_float(unsigned short x) { return float_of(static_cast<unsigned>(x) << 16); }
DEVICE unsigned short float_to_bf16(float x) {
    const unsigned bits = bits_of(x);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}
// half_to_float and float_to_half of common/fp8.cuh use these instructions, or integer arithmetic.
constexpr bool HARDWARE_HALF = FP8CORE_PTX != 0;
DEVICE float hardware_half_to_float(unsigned short x) {
    float r = 0.0f;
#if FP8CORE_PTX
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
#endif
    return r;
}
DEVICE unsigned short hardware_float_to_half(float x) {
    unsigned short r = 0;
#if FP8CORE_PTX
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(x));
#endif
    return r;
}

// The larger magnitudes of two pairs of 16-bit floats, half by half; NaN in `pair` is ignored.
constexpr bool HARDWARE_PAIRS = FP8CORE_PTX >= 800;
template <int input>
DEVICE unsigned hardware_larger_magnitudes(unsigned largest, unsigned pair) {
    unsigned r = 0;
#if FP8CORE_PTX >= 800
    if constexpr (input == BFLOAT16) {
        asm("{ .reg .b32 s; abs.bf16x2 s, %2; max.bf16x2 %0, %1, s; }" : "=r"(r) : "r"(largest), "r"(pair));
    } else {
        asm("{ .reg .b32 s; abs.f16x2 s, %2; max.f16x2 %0, %1, s; }" : "=r"(r) : "r"(largest), "r"(pair));
    }
#endif
    return r;
}

// Two numbers rounded to nearest even as a word, lo in its low half; a NaN becomes 0x7fff.
template <int output>
DEVICE unsigned hardware_round_pair(float lo, float hi) {
    unsigned r = 0;
#if FP8CORE_PTX >= 800
    if constexpr (output == BFLOAT16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    }
#endif
    return r;
}

// ---- FP8 by instructions: two values, saturated at +-448 or +-57344, rounded to nearest even, NaN to 0x7f ----

template <int format>
DEVICE unsigned short hardware_encode_pair(float lo, float hi) {
    unsigned short r = 0;
#if FP8CORE_PTX >= 890
    if constexpr (format == E4M3FN) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    }
#endif
    return r;
}

template <int format>
DEVICE void hardware_decode_pair(unsigned short codes, float& lo, float& hi) {
#if FP8CORE_PTX >= 890
    unsigned halves;
    if constexpr (format == E4M3FN) {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    } else {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
    }
    lo = hardware_half_to_float(static_cast<unsigned short>(halves));
    hi = hardware_half_to_float(static_cast<unsigned short>(halves >> 16));
#endif
}
