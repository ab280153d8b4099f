// FP8 conversions: by the platform's instructions if it has them (HARDWARE_FORMAT), else by integer arithmetic.
//
// encode, encode_pair  take any fp32 number, saturate it at the quantization maximum and round it to nearest even. NaN
//                      becomes the format's; a negative number that underflows gives 0x80 in fn formats, 0x00 in fnuz.
// decode, decode_pair  give the fp32 number of a code, exactly; decode_pair stores that of the low byte in lo.
#pragma once

template <int format>
struct Format {
    static constexpr bool FNUZ = format == E4M3FNUZ || format == E5M2FNUZ;
    static constexpr int MANTISSA = format == E4M3FN || format == E4M3FNUZ ? 3 : 2;
    static constexpr int EXPONENT_BIAS = format == E4M3FN ? 7 : format == E4M3FNUZ ? 8 : format == E5M2 ? 15 : 16;
    // The quantization maximum: 224 for e4m3fnuz, whose largest number is 240.
    static constexpr float MAXIMUM = format == E4M3FN ? 448.0f : format == E4M3FNUZ ? 224.0f : 57344.0f;
    static constexpr unsigned MAXIMUM_BITS = format == E4M3FN     ? 0x43e00000u
                                             : format == E4M3FNUZ ? 0x43600000u
                                                                  : 0x47600000u;
    static constexpr unsigned NOT_A_NUMBER = FNUZ ? 0x80u : 0x7fu;
    // The difference of the exponent biases of fp32 and of the format.
    static constexpr unsigned REBIAS = 127 - EXPONENT_BIAS;
    static constexpr int SHIFT = 23 - MANTISSA;
    // fp32 whose last bit is the format's smallest number: adding it rounds a subnormal result to nearest even.
    static constexpr unsigned SUBNORMAL_BITS = static_cast<unsigned>(127 + 1 - EXPONENT_BIAS - MANTISSA + 23) << 23;
};

template <int format>
DEVICE unsigned encode_by_integers(float x) {
    using F = Format<format>;
    const unsigned bits = bits_of(x), absolute = bits & 0x7fffffffu;
    const unsigned clamped = absolute < F::MAXIMUM_BITS ? absolute : F::MAXIMUM_BITS;
    const unsigned even = clamped >> F::SHIFT & 1u;
    const unsigned normal = ((clamped + (1u << (F::SHIFT - 1)) - 1u + even) >> F::SHIFT) - (F::REBIAS << F::MANTISSA);
    const unsigned subnormal = bits_of(float_of(clamped) + float_of(F::SUBNORMAL_BITS)) - F::SUBNORMAL_BITS;
    const unsigned code = clamped < (F::REBIAS + 1u) << 23 ? subnormal : normal;
    const unsigned sign = F::FNUZ && code == 0 ? 0u : bits >> 24 & 0x80u;
    return absolute > 0x7f800000u ? F::NOT_A_NUMBER : code | sign;
}

template <int format>
DEVICE float decode_by_integers(unsigned code) {
    using F = Format<format>;
    const unsigned absolute = code & 0x7fu;
    const float subnormal = float_of(F::SUBNORMAL_BITS | absolute) - float_of(F::SUBNORMAL_BITS);
    const float normal = float_of((absolute << F::SHIFT) + (F::REBIAS << 23));
    const float number = absolute < 1u << F::MANTISSA ? subnormal : normal;
    const unsigned bits = bits_of(number) | (code & 0x80u) << 24;
    if constexpr (F::FNUZ) return float_of(code == 0x80u ? 0x7fc00000u : bits);
    if constexpr (format == E4M3FN) return float_of(absolute == 0x7fu ? 0x7fc00000u : bits);
    return float_of(absolute == 0x7cu ? 0x7f800000u | (code & 0x80u) << 24 : absolute > 0x7cu ? 0x7fc00000u : bits);
}

template <int format>
DEVICE unsigned short encode_pair(float lo, float hi) {
    if constexpr (HARDWARE_FORMAT<format>) return hardware_encode_pair<format>(lo, hi);
    return static_cast<unsigned short>(encode_by_integers<format>(lo) | encode_by_integers<format>(hi) << 8);
}

template <int format>
DEVICE byte encode(float x) {
    if constexpr (HARDWARE_FORMAT<format>) return static_cast<byte>(hardware_encode_pair<format>(x, 0.0f));
    return static_cast<byte>(encode_by_integers<format>(x));
}

template <int format>
DEVICE void decode_pair(unsigned short codes, float& lo, float& hi) {
    if constexpr (HARDWARE_FORMAT<format>) {
        hardware_decode_pair<format>(codes, lo, hi);
    } else {
        lo = decode_by_integers<format>(codes & 0xffu);
        hi = decode_by_integers<format>(codes >> 8);
    }
}

template <int format>
DEVICE float decode(byte code) {
    float lo, hi;
    decode_pair<format>(code, lo, hi);
    return lo;
}

// IEEE half precision. A NaN becomes a quiet NaN of the same sign.
DEVICE float half_to_float(unsigned short half) {
    if constexpr (HARDWARE_HALF) return hardware_half_to_float(half);
    const unsigned absolute = half & 0x7fffu, magic = 126u << 23;  // 0.5, whose last bit is the smallest half
    const float subnormal = float_of(magic | absolute) - float_of(magic);
    const unsigned normal = (absolute << 13) + (absolute < 0x7c00u ? 112u << 23 : 224u << 23);
    const unsigned bits = absolute < 0x400u ? bits_of(subnormal) : absolute > 0x7c00u ? normal | 0x400000u : normal;
    return float_of(bits | (half & 0x8000u) << 16);
}
DEVICE unsigned short float_to_half(float x) {
    if constexpr (HARDWARE_HALF) return hardware_float_to_half(x);
    const unsigned bits = bits_of(x), absolute = bits & 0x7fffffffu, magic = 126u << 23;
    const unsigned subnormal = bits_of(float_of(absolute) + float_of(magic)) - magic;
    const unsigned normal = ((absolute + 0xfffu + (absolute >> 13 & 1u)) >> 13) - (112u << 10);
    const unsigned number = absolute < 113u << 23 ? subnormal : absolute < 0x47800000u ? normal : 0x7c00u;
    return static_cast<unsigned short>((absolute > 0x7f800000u ? 0x7e00u : number) | (bits >> 16 & 0x8000u));
}

// Loads an element of an input tensor as fp32.
template <int input>
DEVICE float load_element(const void* tensor, long long index) {
    if constexpr (input == FLOAT32) return static_cast<const float*>(tensor)[index];
    const unsigned short bits = static_cast<const unsigned short*>(tensor)[index];
    return input == FLOAT16 ? half_to_float(bits) : bf16_to_float(bits);
}

// Stores an element of a result tensor, rounded to nearest even.
template <int output>
DEVICE void store_element(void* tensor, long long index, float x) {
    if constexpr (output == FLOAT32) {
        static_cast<float*>(tensor)[index] = x;
    } else {
        static_cast<unsigned short*>(tensor)[index] = output == FLOAT16 ? float_to_half(x) : float_to_bf16(x);
    }
}
