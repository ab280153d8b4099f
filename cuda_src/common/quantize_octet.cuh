// Eight consecutive elements: what a thread loads, holds and encodes at a time.
#pragma once
#include "quantize_scale.cuh"

constexpr int ITEM_BYTES[] = {4, 2, 2};

// As they lie in memory.
template <int input>
struct Octet {
    static constexpr int WORDS = 2 * ITEM_BYTES[input];
    unsigned words[WORDS];

    DEVICE float operator[](int i) const {
        if constexpr (input == FLOAT32) return float_of(words[i]);
        const unsigned pair = words[i / 2];
        if constexpr (input == BFLOAT16) return float_of(i % 2 ? pair & 0xffff0000u : pair << 16);
        return half_to_float(static_cast<unsigned short>(i % 2 ? pair >> 16 : pair));
    }
};

// alignment: of the address, in bytes; the elements' own size is always kept. once: no cache should keep them.
template <int input, int alignment, bool once = false>
DEVICE Octet<input> load_octet(const byte* p) {
    Octet<input> octet;
    constexpr int WORDS = Octet<input>::WORDS;
    if constexpr (alignment >= 16) {
        for (int i = 0; i < WORDS; i += 4) {
            const Vector16 v = once ? load16_streaming(p + 4 * i) : load16(p + 4 * i);
            octet.words[i] = v.x, octet.words[i + 1] = v.y, octet.words[i + 2] = v.z, octet.words[i + 3] = v.w;
        }
    } else if constexpr (alignment == 8) {
        for (int i = 0; i < WORDS; i += 2) {
            const Vector8 v = load8(p + 4 * i);
            octet.words[i] = v.x, octet.words[i + 1] = v.y;
        }
    } else if constexpr (alignment == 4 || input == FLOAT32) {
        for (int i = 0; i < WORDS; ++i) octet.words[i] = load4(p + 4 * i);
    } else {
        const unsigned short* const halves = reinterpret_cast<const unsigned short*>(p);
        for (int i = 0; i < WORDS; ++i) octet.words[i] = halves[2 * i] | static_cast<unsigned>(halves[2 * i + 1]) << 16;
    }
    return octet;
}

template <int input>
DEVICE Octet<input> empty_octet() {
    Octet<input> octet;
    for (int i = 0; i < Octet<input>::WORDS; ++i) octet.words[i] = 0;
    return octet;
}

// The first `count` elements, zeros after them.
template <int input>
DEVICE Octet<input> load_octet_part(const byte* p, int count) {
    Octet<input> octet = empty_octet<input>();
    for (int i = 0; i < 7; ++i) {
        if (i >= count) continue;
        if constexpr (input == FLOAT32) {
            octet.words[i] = load4(p + 4 * i);
        } else {
            octet.words[i / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(p)[i]) << 16 * (i % 2);
        }
    }
    return octet;
}

// The largest size of the elements seen so far; NaN is passed over.
template <int input>
struct Largest {
    static constexpr bool PAIRS = input != FLOAT32 && HARDWARE_PAIRS;
    unsigned pair = 0;
    float single = 0.0f;

    DEVICE void see(const Octet<input>& octet) {
        if constexpr (PAIRS) {
            for (int i = 0; i < 4; ++i) pair = hardware_larger_sizes<input>(pair, octet.words[i]);
        } else {
            for (int i = 0; i < 8; ++i) single = maximum(single, magnitude(octet[i]));
        }
    }
    DEVICE unsigned bits() const {
        if constexpr (!PAIRS) return bits_of(single);
        const unsigned larger = pair >> 16 > (pair & 0xffffu) ? pair >> 16 : pair & 0xffffu;
        return bits_of(input == BFLOAT16 ? float_of(larger << 16) : half_to_float(static_cast<unsigned short>(larger)));
    }
};

template <int input, int format, int mode, bool careful>
DEVICE Vector8 encode_octet_by(const Octet<input>& octet, const Divisor& d) {
    unsigned pairs[4];
    for (int i = 0; i < 4; ++i) {
        const float lo = value_of<mode, careful>(octet[2 * i], d), hi = value_of<mode, careful>(octet[2 * i + 1], d);
        pairs[i] = encode_pair<format>(lo, hi);
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}
template <int input, int format, int mode>
DEVICE Vector8 encode_octet(const Octet<input>& octet, const Divisor& d) {
    if (d.ordinary) return encode_octet_by<input, format, mode, false>(octet, d);
    return encode_octet_by<input, format, mode, true>(octet, d);
}
template <int input, int format, int mode, int count>
DEVICE void encode_octets(const Octet<input> (&octets)[count], const Divisor& d, Vector8 (&codes)[count]) {
    if (d.ordinary) {
        for (int i = 0; i < count; ++i) codes[i] = encode_octet_by<input, format, mode, false>(octets[i], d);
    } else {
        for (int i = 0; i < count; ++i) codes[i] = encode_octet_by<input, format, mode, true>(octets[i], d);
    }
}

template <int alignment, bool once = false>
DEVICE void store_octet(byte* p, Vector8 codes) {
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

DEVICE void store_octet_part(byte* p, Vector8 codes, int count) {
    for (int i = 0; i < 7; ++i) {
        if (i < count) p[i] = static_cast<byte>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}
