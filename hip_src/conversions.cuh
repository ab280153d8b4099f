// The platform ops that convert 16-bit floats and FP8, for HIP. cuda_src/conversions.cuh documents them.
#pragma once

// ---- 16-bit floats as bits ---------------------------------------------------------------------------

DEVICE float bf16_to_float(unsigned short x) { return float_of(static_cast<unsigned>(x) << 16); }
DEVICE unsigned short float_to_bf16(float x) {
    const unsigned bits = bits_of(x);
    const unsigned rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    return static_cast<unsigned short>((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fffu : rounded);
}
#if defined(FP8CORE_EMULATION)
constexpr bool HARDWARE_HALF = false;
DEVICE float hardware_half_to_float(unsigned short) { return 0.0f; }
DEVICE unsigned short hardware_float_to_half(float) { return 0; }
#else
constexpr bool HARDWARE_HALF = true;
DEVICE float hardware_half_to_float(unsigned short x) { return static_cast<float>(__builtin_bit_cast(_Float16, x)); }
DEVICE unsigned short hardware_float_to_half(float x) {
    return __builtin_bit_cast(unsigned short, static_cast<_Float16>(x));
}
#endif

constexpr bool HARDWARE_PAIRS = false;
template <int input>
DEVICE unsigned hardware_larger_magnitudes(unsigned, unsigned) {
    return 0;
}
template <int output>
DEVICE unsigned hardware_round_pair(float, float) {
    return 0;
}

// ---- FP8 by instructions -----------------------------------------------------------------------------

// The instructions overflow to NaN or Inf and keep a NaN's sign: clamp before them, and replace NaN after them.
template <int format>
DEVICE unsigned short hardware_encode_pair(float lo, float hi) {
    unsigned codes = 0;
#if FP8CORE_FNUZ_CONVERSIONS || FP8CORE_OCP_CONVERSIONS
    constexpr bool E4M3 = format == E4M3FN || format == E4M3FNUZ;
    constexpr bool FNUZ = format == E4M3FNUZ || format == E5M2FNUZ;
    constexpr float LARGEST = format == E4M3FN ? 448.0f : format == E4M3FNUZ ? 224.0f : 57344.0f;
    constexpr unsigned NOT_A_NUMBER = FNUZ ? 0x80u : 0x7fu;
    const float low = __builtin_amdgcn_fmed3f(lo, LARGEST, -LARGEST);
    const float high = __builtin_amdgcn_fmed3f(hi, LARGEST, -LARGEST);
    if constexpr (E4M3) {
        codes = static_cast<unsigned>(__builtin_amdgcn_cvt_pk_fp8_f32(low, high, 0, false));
    } else {
        codes = static_cast<unsigned>(__builtin_amdgcn_cvt_pk_bf8_f32(low, high, 0, false));
    }
    codes = lo != lo ? (codes & 0xff00u) | NOT_A_NUMBER : codes;
    codes = hi != hi ? (codes & 0x00ffu) | NOT_A_NUMBER << 8 : codes;
#endif
    return static_cast<unsigned short>(codes);
}

template <int format>
DEVICE void hardware_decode_pair(unsigned short codes, float& lo, float& hi) {
#if FP8CORE_FNUZ_CONVERSIONS || FP8CORE_OCP_CONVERSIONS
    if constexpr (format == E4M3FN || format == E4M3FNUZ) {
        lo = __builtin_amdgcn_cvt_f32_fp8(codes, 0);
        hi = __builtin_amdgcn_cvt_f32_fp8(codes, 1);
    } else {
        lo = __builtin_amdgcn_cvt_f32_bf8(codes, 0);
        hi = __builtin_amdgcn_cvt_f32_bf8(codes, 1);
    }
#endif
}
