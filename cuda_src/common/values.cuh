// Vectors of codes and of high-precision values in their memory types. The end of a vector may be outside a row.
#pragma once
#include "scale.cuh"

constexpr float LARGEST_FLOAT = 0x1.fffffep127f;

template <int type>
constexpr int SIZE_OF = type == FLOAT32 ? 4 : 2;

// The value rounded to a type and converted back to fp32.
template <int type>
DEVICE float round_to(float value) {
    if constexpr (type == FLOAT32) return value;
    else if constexpr (type == FLOAT16) return half_to_float(float_to_half(value));
    else return bf16_to_float(float_to_bf16(value));
}

// `bytes` bytes in 32-bit words: loaded and stored at once if all parts are valid, else the valid parts one by one.
template <int bytes>
struct Words {
    static constexpr int WORDS = (bytes + 3) / 4;
    unsigned words[WORDS];

    DEVICE byte code(int i) const { return (byte)(words[i / 4] >> (8 * (i % 4))); }
    DEVICE unsigned short half(int i) const { return (unsigned short)(words[i / 2] >> (16 * (i % 2))); }

    template <int part>
    DEVICE void load(const void* from, int valid) {
        constexpr int parts = bytes / part;
        const char* at = (const char*)from;
        if (valid >= parts) {
            if constexpr (bytes >= 16) {
#pragma unroll
                for (int i = 0; i < bytes / 16; ++i) {
                    const Vector16 v = load16(at + 16 * i);
                    words[4 * i] = v.x, words[4 * i + 1] = v.y, words[4 * i + 2] = v.z, words[4 * i + 3] = v.w;
                }
            } else if constexpr (bytes == 8) {
                const Vector8 v = load8(from);
                words[0] = v.x, words[1] = v.y;
            } else if constexpr (bytes == 4) words[0] = load4(from);
            else if constexpr (bytes == 2) words[0] = *(const unsigned short*)from;
            else words[0] = *(const byte*)from;
            return;
        }
        load_parts<part>(from, valid);
    }

    // Loads from any address that is aligned for one part; parts that are not valid become zero.
    template <int part>
    DEVICE void load_parts(const void* from, int valid) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) words[i] = 0;
#pragma unroll
        for (int i = 0; i < bytes / part; ++i) {
            if (i >= valid) continue;
            if constexpr (part == 4) words[i] = ((const unsigned*)from)[i];
            else if constexpr (part == 2) words[i / 2] |= unsigned(((const unsigned short*)from)[i]) << (16 * (i % 2));
            else words[i / 4] |= unsigned(((const byte*)from)[i]) << (8 * (i % 4));
        }
    }

    template <int part>
    DEVICE void store(void* to, int valid) const {
        constexpr int parts = bytes / part;
        char* at = (char*)to;
        if (valid >= parts) {
            if constexpr (bytes >= 16) {
#pragma unroll
                for (int i = 0; i < bytes / 16; ++i)
                    store16(at + 16 * i, Vector16{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
            } else if constexpr (bytes == 8) {
                store8(to, Vector8{words[0], words[1]});
            } else if constexpr (bytes == 4) store4(to, words[0]);
            else if constexpr (bytes == 2) *(unsigned short*)to = (unsigned short)words[0];
            else *(byte*)to = (byte)words[0];
            return;
        }
        store_parts<part>(to, valid);
    }

    template <int part>
    DEVICE void store_parts(void* to, int valid) const {
#pragma unroll
        for (int i = 0; i < bytes / part; ++i) {
            if (i >= valid) continue;
            if constexpr (part == 4) ((unsigned*)to)[i] = words[i];
            else if constexpr (part == 2) ((unsigned short*)to)[i] = half(i);
            else ((byte*)to)[i] = code(i);
        }
    }
};

// `count` high-precision values in their memory type.
template <int type, int count>
struct Values : Words<SIZE_OF<type> * count> {
    using Base = Words<SIZE_OF<type> * count>;

    // Unless `aligned` is false, the address of a whole vector has to be divisible by its size.
    template <bool aligned = true>
    DEVICE void load_from(const void* base, long long index, int valid) {
        const char* from = (const char*)base + index * SIZE_OF<type>;
        if constexpr (aligned) Base::template load<SIZE_OF<type>>(from, valid);
        else Base::template load_parts<SIZE_OF<type>>(from, valid);
    }

    template <bool aligned = true>
    DEVICE void store_to(void* base, long long index, int valid) const {
        char* to = (char*)base + index * SIZE_OF<type>;
        if constexpr (aligned) Base::template store<SIZE_OF<type>>(to, valid);
        else Base::template store_parts<SIZE_OF<type>>(to, valid);
    }

    DEVICE float get(int i) const {
        if constexpr (type == FLOAT32) return float_of(Base::words[i]);
        else if constexpr (type == FLOAT16) return half_to_float(Base::half(i));
        else return float_of(i % 2 ? Base::words[i / 2] & 0xffff0000u : Base::words[i / 2] << 16);
    }

    DEVICE void widened(float (&values)[count]) const {
#pragma unroll
        for (int i = 0; i < count; ++i) values[i] = get(i);
    }

    DEVICE static Values rounded(const float (&values)[count]) {
        Values result;
        if constexpr (type != FLOAT32 && HARDWARE_PAIRS && count % 2 == 0) {
#pragma unroll
            for (int i = 0; i < count; i += 2)
                result.words[i / 2] = hardware_round_pair<type>(values[i], values[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < count; ++i) {
                if constexpr (type == FLOAT32) {
                    result.words[i] = bits_of(values[i]);
                } else {
                    const unsigned bits = type == FLOAT16 ? float_to_half(values[i]) : float_to_bf16(values[i]);
                    result.words[i / 2] = i % 2 ? result.words[i / 2] | bits << 16 : bits;
                }
            }
        }
        return result;
    }
};

// `count` codes of a format.
template <int format, int count>
struct Codes : Words<count> {
    using Base = Words<count>;

    template <bool aligned = true>
    DEVICE void load_from(const byte* from, int valid) {
        if constexpr (aligned) Base::template load<1>(from, valid);
        else Base::template load_parts<1>(from, valid);
    }

    template <bool aligned = true>
    DEVICE void store_to(byte* to, int valid) const {
        if constexpr (aligned) Base::template store<1>(to, valid);
        else Base::template store_parts<1>(to, valid);
    }

    DEVICE void get(float (&values)[count]) const {
        if constexpr (count == 1) {
            values[0] = decode<format>(Base::code(0));
        } else {
#pragma unroll
            for (int i = 0; i < count; i += 2) decode_pair<format>(Base::half(i / 2), values[i], values[i + 1]);
        }
    }

    DEVICE static Codes encoded(const float (&values)[count]) {
        Codes result;
        if constexpr (count == 1) {
            result.words[0] = encode<format>(values[0]);
        } else {
#pragma unroll
            for (int i = 0; i < count; i += 2) {
                const unsigned pair = encode_pair<format>(values[i], values[i + 1]);
                result.words[i / 4] = i % 4 ? result.words[i / 4] | pair << 16 : pair;
            }
        }
        return result;
    }
};
