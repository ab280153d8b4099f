// From an fp32 accumulator to a result: value = activation(scale_a * (scale_b * acc) + bias + beta * out), in fp32; out
// = round(value), or, for FP8, encode(value * RN(1 / out_scale)). amax becomes the largest |value|, NaN aside. The
// caller owes: 0 in amax before the launch.
#pragma once
#include "../common/values.cuh"

// Scale, bias, rounding and store. out_type: of a high-precision result, or 3 + the format of an FP8 one; bias_type: -1
// for none.
template <int out_type, int bias_type>
struct Epilogue {
    const void* bias;
    float reciprocal;

    DEVICE Epilogue(const void* bias, const float* out_scale) : bias(bias), reciprocal(1.0f) {
        if (out_type >= 3 && out_scale != nullptr) reciprocal = reciprocal_exact(*out_scale);
    }

    DEVICE static float scaled(float acc, float scale_a, float scale_b) { return scale_a * (scale_b * acc); }
    // 0 without a bias; `biased` does not add it, as that would turn -0 into 0.
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

// ACTIVATION of fp8core/kernels/encodings.py.
constexpr int GELU = 1, GELU_TANH = 2, SILU = 3;
constexpr float LOG2_E = 0x1.715476p+0f;

// x / (1 + 2**power), with a relative error below 2**-20 for powers up to 23.
DEVICE float over_one_and_exp2(float x, float power) { return x * reciprocal_fast(1.0f + exp2_fast(power)); }

// The normal distribution function at -y, y >= 0: t * p(t) * exp(-y * y / 2) with t = 1 / (1 + 0.3 * y). p is fitted to
// a relative error below 2**-22 for y up to 14; fp32 arithmetic makes it 2**-20, and 2**-17 at y = 12.
DEVICE float normal_tail(float y) {
    const float t = reciprocal_fast(fma_flushing(0.3f, y, 1.0f));
    float p = 0x1.243fa4p-5f;
    p = fma_flushing(p, t, -0x1.41f3e8p-3f);
    p = fma_flushing(p, t, 0x1.a69d08p-3f);
    p = fma_flushing(p, t, -0x1.b7c806p-5f);
    p = fma_flushing(p, t, 0x1.074b7ap-3f);
    p = fma_flushing(p, t, 0x1.993ecep-4f);
    p = fma_flushing(p, t, 0x1.ee9bb6p-4f);
    p = fma_flushing(p, t, 0x1.ea006ap-4f);
    return p * t * exp2_fast(y * y * (-0.5f * LOG2_E));
}

template <int activation>
DEVICE float activated(float x) {
    if constexpr (activation == GELU) {
        const float tail = normal_tail(magnitude(x));
        return x * (x > 0.0f ? 1.0f - tail : tail);
    } else if constexpr (activation == GELU_TANH) {
        // tanh(u) = 2 / (1 + exp(-2 * u)) - 1, where -2 * u * LOG2_E = x * (ONCE + CUBED * x * x)
        constexpr float ONCE = -0x1.26aec2p+1f, CUBED = -0x1.a5a7d0p-4f;
        return over_one_and_exp2(x, x * fma_flushing(x * x, CUBED, ONCE));
    } else if constexpr (activation == SILU) {
        return over_one_and_exp2(x, -LOG2_E * x);
    } else {
        return x;
    }
}

// The ending: beta and the activation, between bias and rounding. `accumulates`: beta is not 0, and out is read.
template <int out_type, int activation, bool accumulates>
struct Ending {
    float beta;

    DEVICE float of(float value, float addend) const {
        return activated<activation>(accumulates ? value + beta * addend : value);
    }
    DEVICE float of(float value, const void* out, long long index) const {
        if constexpr (accumulates) return of(value, load_element<out_type>(out, index));
        else return of(value, 0.0f);
    }
};

// The memory type of an element of a high-precision result.
template <int out_type>
struct Result {
    using Element = unsigned short;
};
template <>
struct Result<FLOAT32> {
    using Element = float;
};

// Elements of a result that beta scales, loaded before they are needed and kept in their memory type until then.
template <int out_type, int count, bool accumulates>
struct Addends {
    typename Result<out_type>::Element kept[count];

    // `there`: whether out has an element of this index.
    DEVICE void load(int i, const void* out, long long index, bool there) {
        kept[i] = 0;
        if (there) kept[i] = static_cast<const typename Result<out_type>::Element*>(out)[index];
    }
    DEVICE float number(int i) const { return load_element<out_type>(kept, i); }
};
template <int out_type, int count>
struct Addends<out_type, count, false> {
    DEVICE static void load(int, const void*, long long, bool) {}
    DEVICE static float number(int) { return 0.0f; }
};

// Raises amax by one atomic per warp, unless the warp's is 0. Non-negative floats are ordered as their bits are.
DEVICE void publish_amax(float amax, float* result) {
    const unsigned largest = warp_max(bits_of(amax));
    if (lane() == 0 && largest != 0) atomic_max(reinterpret_cast<unsigned*>(result), largest);
}
