// Vectors of eight consecutive elements, which a thread loads, holds and encodes at a time.
#pragma once
#include "values.cuh"

template <int input>
using Vec8 = Values<input, 8>;

// alignment: of the address in bytes, at least the size of an element. once: caches need not keep the elements.
template <int input, int alignment, bool once = false>
DEVICE Vec8<input> load_vec8(const byte* p) {
    Vec8<input> vec;
    constexpr int WORDS = Vec8<input>::WORDS;
    if constexpr (alignment >= 16) {
        for (int i = 0; i < WORDS; i += 4) {
            const Vector16 v = once ? load16_streaming(p + 4 * i) : load16(p + 4 * i);
            vec.words[i] = v.x, vec.words[i + 1] = v.y, vec.words[i + 2] = v.z, vec.words[i + 3] = v.w;
        }
    } else if constexpr (alignment == 8) {
        for (int i = 0; i < WORDS; i += 2) {
            const Vector8 v = load8(p + 4 * i);
            vec.words[i] = v.x, vec.words[i + 1] = v.y;
        }
    } else if constexpr (alignment == 4 || input == FLOAT32) {
        for (int i = 0; i < WORDS; ++i) vec.words[i] = load4(p + 4 * i);
    } else {
        const unsigned short* const halves = reinterpret_cast<const unsigned short*>(p);
        for (int i = 0; i < WORDS; ++i) vec.words[i] = halves[2 * i] | static_cast<unsigned>(halves[2 * i + 1]) << 16;
    }
    return vec;
}

template <int input>
DEVICE Vec8<input> empty_vec8() {
    Vec8<input> vec;
    for (int i = 0; i < Vec8<input>::WORDS; ++i) vec.words[i] = 0;
    return vec;
}

// Loads the first `count` elements (1 to 7), followed by zeros. Every load has a valid address and no condition, so
// that none waits for another.
template <int input>
DEVICE Vec8<input> load_vec8_head(const byte* p, int count) {
    Vec8<input> vec = empty_vec8<input>();
    unsigned parts[7];
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const int at = i < count ? i : count - 1;
        parts[i] = input == FLOAT32 ? load4(p + 4 * at) : reinterpret_cast<const unsigned short*>(p)[at];
    }
#pragma unroll
    for (int i = 0; i < 7; ++i) {
        const unsigned part = i < count ? parts[i] : 0u;
        if constexpr (input == FLOAT32) vec.words[i] = part;
        else vec.words[i / 2] |= part << 16 * (i % 2);
    }
    return vec;
}

// The largest magnitude of the elements seen so far; NaN is passed over.
template <int input>
struct AbsMax {
    static constexpr bool PAIRS = input != FLOAT32 && HARDWARE_PAIRS;
    unsigned pair = 0;
    float single = 0.0f;

    DEVICE void update(const Vec8<input>& vec) {
        if constexpr (PAIRS) {
            for (int i = 0; i < 4; ++i) pair = hardware_larger_magnitudes<input>(pair, vec.words[i]);
        } else {
            for (int i = 0; i < 8; ++i) single = maximum(single, magnitude(vec.get(i)));
        }
    }
    DEVICE unsigned bits() const {
        if constexpr (!PAIRS) return bits_of(single);
        const unsigned larger = pair >> 16 > (pair & 0xffffu) ? pair >> 16 : pair & 0xffffu;
        return bits_of(input == BFLOAT16 ? float_of(larger << 16) : half_to_float(static_cast<unsigned short>(larger)));
    }
};

template <int input, int format, int mode, bool careful>
DEVICE Vector8 encode_vec8_by(const Vec8<input>& vec, const Divisor& d) {
    unsigned pairs[4];
    for (int i = 0; i < 4; ++i) {
        const float lo = value_of<mode, careful>(vec.get(2 * i), d),
                    hi = value_of<mode, careful>(vec.get(2 * i + 1), d);
        pairs[i] = encode_pair<format>(lo, hi);
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
template <int input, int format, int mode>
DEVICE Vector8 encode_vec8(const Vec8<input>& vec, const Divisor& d) {
    if (d.ordinary) return encode_vec8_by<input, format, mode, false>(vec, d);
    return encode_vec8_by<input, format, mode, true>(vec, d);
}
template <int input, int format, int mode, int count>
DEVICE void encode_vec8s(const Vec8<input> (&vecs)[count], const Divisor& d, Vector8 (&codes)[count]) {
    if (d.ordinary) {
        for (int i = 0; i < count; ++i) codes[i] = encode_vec8_by<input, format, mode, false>(vecs[i], d);
    } else {
        for (int i = 0; i < count; ++i) codes[i] = encode_vec8_by<input, format, mode, true>(vecs[i], d);
    }
}

template <int alignment, bool once = false>
DEVICE void store_vec8(byte* p, Vector8 codes) {
    if constexpr (alignment >= 8) {
        once ? store8_streaming(p, codes) : store8(p, codes);
    } else if constexpr (alignment == 4) {
        store4(p, codes.x);
        store4(p + 4, codes.y);
    } else {
        for (int i = 0; i < 8; i += 2) {
            const unsigned pair = (i < 4 ? codes.x : codes.y) >> 8 * (i % 4) & 0xffffu;
            if constexpr (alignment == 2) {
                *reinterpret_cast<unsigned short*>(p + i) = static_cast<unsigned short>(pair);
            } else {
                p[i] = static_cast<byte>(pair);
                p[i + 1] = static_cast<byte>(pair >> 8);
            }
        }
    }
}

DEVICE void store_vec8_head(byte* p, Vector8 codes, int count) {
    for (int i = 0; i < 7; ++i) {
        if (i < count) p[i] = static_cast<byte>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}
