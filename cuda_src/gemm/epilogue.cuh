// From an fp32 accumulator to a result: value = scale_a * (scale_b * acc) + bias, in fp32; out = round(value), or, for
// FP8, encode(value * RN(1 / out_scale)). amax takes the largest |value|, NaN aside: it has to be 0 before the launch.
#pragma once
#include "../common/values.cuh"

// What comes after the accumulator. out_type: of a high-precision result, or 3 + the format of an FP8 one; bias_type:
// -1 for none.
template <int out_type, int bias_type>
struct Epilogue {
    const void* bias;
    float reciprocal;

    DEVICE Epilogue(const void* bias, const float* out_scale) : bias(bias), reciprocal(1.0f) {
        if (out_type >= 3 && out_scale != nullptr) reciprocal = reciprocal_exact(*out_scale);
    }

    DEVICE static float scaled(float acc, float scale_a, float scale_b) { return scale_a * (scale_b * acc); }
    // 0 without a bias, which `biased` does not add: -0 would become 0.
    DEVICE float bias_of(int column) const {
        if constexpr (bias_type < 0) return 0.0f;
        else return load_element<bias_type>(bias, column);
    }
    DEVICE static float biased(float value, float bias) { return bias_type < 0 ? value : value + bias; }

    DEVICE float value(float acc, float scale_a, float scale_b, int column) const {
        return biased(scaled(acc, scale_a, scale_b), bias_of(column));
    }

    DEVICE void store(void* out, long long index, float value) const {
        if constexpr (out_type >= 3) static_cast<byte*>(out)[index] = encode<out_type - 3>(value * reciprocal);
        else store_element<out_type>(out, index, value);
    }
};

// An element of a high-precision result in memory.
template <int out_type>
struct Result {
    using Element = unsigned short;
};
template <>
struct Result<FLOAT32> {
    using Element = float;
};

// One atomic a warp. Numbers that are not negative are ordered as their bits are.
DEVICE void publish_amax(float amax, float* result) {
    const unsigned largest = warp_max(bits_of(amax));
    if (lane() == 0) atomic_max(reinterpret_cast<unsigned*>(result), largest);
}
