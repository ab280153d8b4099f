// Scales, and the division of values by them. Arithmetic is IEEE fp32; inputs below 2**-126 count as zero.
#pragma once

// How a scale is computed (-D MODE) and how it is stored (-D SCALE_FORMAT).
constexpr int STATIC = 0, TENSOR = 1, TOKEN = 2, GROUP = 3;
constexpr int SCALE_FLOAT32 = 0, SCALE_UE8M0 = 1, SCALE_UE8M0_BYTES = 2;

constexpr float SMALLEST_NORMAL = 0x1p-126f;

// Columns of k, and channels, that share a blocked scale of a product.
constexpr int BLOCK_K = 128;

// The scale of values with the largest magnitude amax (given as bits). `upper` bounds a token's amax from above, `eps`
// a group's from below.
template <int mode, int format>
DEVICE float scale_of(unsigned amax_bits, float upper, float eps) {
    constexpr float MAXIMUM = Format<format>::MAXIMUM;
    const float amax = amax_bits < bits_of(SMALLEST_NORMAL) ? 0.0f : float_of(amax_bits);
    if constexpr (mode == TENSOR) return maximum(divide_exact(amax, MAXIMUM), SMALLEST_NORMAL);
    if constexpr (mode == TOKEN) return maximum(divide_exact(minimum(amax, upper), MAXIMUM), 1.0f / (MAXIMUM * 512.0f));
    return divide_exact(maximum(amax, eps), MAXIMUM);
}

// The scale in the precision of its format: ue8m0 rounds it up to a power of two.
template <int scale_format>
DEVICE float rounded_scale(float scale) {
    if constexpr (scale_format == SCALE_FLOAT32) return scale;
    const unsigned bits = bits_of(scale);
    return float_of(((bits >> 23) + ((bits & 0x7fffffu) != 0)) << 23);
}

template <int scale_format>
constexpr int SCALE_BYTES = scale_format == SCALE_UE8M0_BYTES ? 1 : 4;

template <int scale_format>
DEVICE void store_scale(void* scales, long long index, float scale) {
    if constexpr (scale_format == SCALE_UE8M0_BYTES) {
        static_cast<byte*>(scales)[index] = static_cast<byte>(bits_of(scale) >> 23);
    } else {
        static_cast<float*>(scales)[index] = scale;
    }
}

// Loads a scale as fp32. As e8m0 bytes, 0 is 2**-127 and 255 is NaN.
template <int scale_format>
DEVICE float load_scale(const void* scales, long long index) {
    if constexpr (scale_format != SCALE_UE8M0_BYTES) return static_cast<const float*>(scales)[index];
    const unsigned exponent = static_cast<const byte*>(scales)[index];
    return float_of(exponent == 0 ? 0x400000u : exponent == 255 ? 0x7fc00000u : exponent << 23);
}

// A scale by which values are divided (TOKEN, GROUP), or whose reciprocal they are multiplied by (STATIC, TENSOR);
// prepared once per scale.
struct Divisor {
    float scale, reciprocal;
    bool ordinary;  // neither NaN, nor so small or large that the fast path overflows or underflows
};

// bounded: values may be far larger than the scale, because scale_ub has clamped amax. The scale of a whole tensor is
// always ordinary: it is at least 2**-126, and at most 2**128 / 224 or infinite, so its reciprocal is a normal number
// or 0.
template <int mode>
DEVICE Divisor prepared(float scale, bool bounded = false) {
    const float absolute = magnitude(scale);
    return {scale, reciprocal_exact(scale),
            mode == TENSOR || (absolute >= 0x1p-60f && absolute <= 0x1p60f && !bounded)};
}

// Whether amax / MAXIMUM and its reciprocal can neither overflow nor underflow.
DEVICE bool is_ordinary(float amax) { return amax >= 0x1p-40f && amax <= 0x1p60f; }

// amax / MAXIMUM for an ordinary amax: the product with the reciprocal, corrected by the remainder. For every mantissa
// this is the correctly rounded quotient.
template <int FORMAT>
DEVICE float over_maximum(float amax) {
    constexpr float MAXIMUM = Format<FORMAT>::MAXIMUM, RECIPROCAL = 1.0f / MAXIMUM;
    const float near = amax * RECIPROCAL;
    return fma_flushing(fma_flushing(near, -MAXIMUM, amax), RECIPROCAL, near);
}

// Computes the divisor of values up to amax. Returns false if the careful path has to compute and apply its scale.
template <int FORMAT, int MODE, int SCALE_FORMAT>
DEVICE bool ordinary_divisor(float amax, float eps, Divisor& divisor) {
    constexpr float LEAST = 1.0f / (Format<FORMAT>::MAXIMUM * 512.0f);
    const float bounded = MODE == TOKEN ? amax : maximum(amax, eps), quotient = over_maximum<FORMAT>(bounded);
    const float scale = rounded_scale<SCALE_FORMAT>(MODE == TOKEN ? maximum(quotient, LEAST) : quotient);
    divisor = {scale, reciprocal_ordinary(scale), true};
    return is_ordinary(bounded);
}

// The value to clamp and round to a code: x / scale, or x * RN(1 / scale), correctly rounded. careful: computed
// literally; otherwise by the fast path, which gives the same for an ordinary divisor: the product with the reciprocal,
// corrected by its remainder, which fma computes exactly. (If the remainder is subnormal and flushed, the quotient is
// far below any code but 0.)
template <int mode, bool careful>
DEVICE float value_of(float x, const Divisor& d) {
    constexpr bool MULTIPLIED = mode == STATIC || mode == TENSOR;
    if constexpr (careful) {
        const float flushed = multiply_flushing(x, 1.0f);
        return MULTIPLIED ? multiply_exact(flushed, d.reciprocal) : divide_exact(flushed, d.scale);
    } else {
        const float q = x * d.reciprocal;
        if constexpr (MULTIPLIED) return q;
        return fma_flushing(fma_flushing(q, d.scale, -x), -d.reciprocal, q);
    }
}

// The parameters of every quantizing kernel, in the order of the launch.
#define QUANTIZE_PARAMETERS                                                                                         \
    const byte *x, long long x_stride, byte *data, long long data_stride, void *scales, long long scale_row_stride, \
        long long scale_col_stride, long long rows, long long rows_padded, const float *upper_address,              \
        float upper_value, float eps, long long cols
