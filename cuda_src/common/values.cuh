// What kernels over codes and wide values share: special numbers, short vectors with a ragged end, scales.
#pragma once
#include "scale.cuh"

constexpr float LARGEST_FLOAT = 0x1.fffffep127f;

template <int TYPE>
constexpr int SIZE_OF = TYPE == FLOAT32 ? 4 : 2;

// value rounded to TYPE and widened again.
template <int TYPE>
DEVICE float round_to(float value) {
    if constexpr (TYPE == FLOAT32) return value;
    else if constexpr (TYPE == FLOAT16) return half_to_float(float_to_half(value));
    else return bf16_to_float(float_to_bf16(value));
}

// BYTES bytes in 32-bit words: loaded and stored as one when all are valid, else the first `valid` parts one by one.
template <int BYTES>
struct Words {
    static constexpr int COUNT = (BYTES + 3) / 4;
    unsigned word[COUNT];

    DEVICE byte code(int i) const { return (byte)(word[i / 4] >> (8 * (i % 4))); }
    DEVICE unsigned short half(int i) const { return (unsigned short)(word[i / 2] >> (16 * (i % 2))); }

    template <int PART>
    DEVICE void load(const void* from, int valid) {
        constexpr int PARTS = BYTES / PART;
        const char* bytes = (const char*)from;
        if (valid >= PARTS) {
            if constexpr (BYTES >= 16) {
#pragma unroll
                for (int i = 0; i < BYTES / 16; ++i) {
                    const Vector16 v = load16(bytes + 16 * i);
                    word[4 * i] = v.x, word[4 * i + 1] = v.y, word[4 * i + 2] = v.z, word[4 * i + 3] = v.w;
                }
            } else if constexpr (BYTES == 8) {
                const Vector8 v = load8(from);
                word[0] = v.x, word[1] = v.y;
            } else if constexpr (BYTES == 4) word[0] = load4(from);
            else if constexpr (BYTES == 2) word[0] = *(const unsigned short*)from;
            else word[0] = *(const byte*)from;
            return;
        }
        load_parts<PART>(from, valid);
    }

    // From any address that suits one part; what is not valid is zero.
    template <int PART>
    DEVICE void load_parts(const void* from, int valid) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) word[i] = 0;
#pragma unroll
        for (int i = 0; i < BYTES / PART; ++i) {
            if (i >= valid) continue;
            if constexpr (PART == 4) word[i] = ((const unsigned*)from)[i];
            else if constexpr (PART == 2) word[i / 2] |= unsigned(((const unsigned short*)from)[i]) << (16 * (i % 2));
            else word[i / 4] |= unsigned(((const byte*)from)[i]) << (8 * (i % 4));
        }
    }

    template <int PART>
    DEVICE void store(void* to, int valid) const {
        constexpr int PARTS = BYTES / PART;
        char* bytes = (char*)to;
        if (valid >= PARTS) {
            if constexpr (BYTES >= 16) {
#pragma unroll
                for (int i = 0; i < BYTES / 16; ++i)
                    store16(bytes + 16 * i, Vector16{word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]});
            } else if constexpr (BYTES == 8) {
                store8(to, Vector8{word[0], word[1]});
            } else if constexpr (BYTES == 4) store4(to, word[0]);
            else if constexpr (BYTES == 2) *(unsigned short*)to = (unsigned short)word[0];
            else *(byte*)to = (byte)word[0];
            return;
        }
        store_parts<PART>(to, valid);
    }

    template <int PART>
    DEVICE void store_parts(void* to, int valid) const {
#pragma unroll
        for (int i = 0; i < BYTES / PART; ++i) {
            if (i >= valid) continue;
            if constexpr (PART == 4) ((unsigned*)to)[i] = word[i];
            else if constexpr (PART == 2) ((unsigned short*)to)[i] = half(i);
            else ((byte*)to)[i] = code(i);
        }
    }
};

// VECTOR wide values as they are in memory.
template <int TYPE, int VECTOR>
struct Values : Words<SIZE_OF<TYPE> * VECTOR> {
    using Base = Words<SIZE_OF<TYPE> * VECTOR>;

    // A whole vector needs an address divisible by its size, unless ALIGNED is false.
    template <bool ALIGNED = true>
    DEVICE void load_from(const void* base, long long index, int valid) {
        const char* from = (const char*)base + index * SIZE_OF<TYPE>;
        if constexpr (ALIGNED) Base::template load<SIZE_OF<TYPE>>(from, valid);
        else Base::template load_parts<SIZE_OF<TYPE>>(from, valid);
    }

    template <bool ALIGNED = true>
    DEVICE void store_to(void* base, long long index, int valid) const {
        char* to = (char*)base + index * SIZE_OF<TYPE>;
        if constexpr (ALIGNED) Base::template store<SIZE_OF<TYPE>>(to, valid);
        else Base::template store_parts<SIZE_OF<TYPE>>(to, valid);
    }

    DEVICE float get(int i) const {
        if constexpr (TYPE == FLOAT32) return float_of(Base::word[i]);
        else if constexpr (TYPE == FLOAT16) return half_to_float(Base::half(i));
        else return bf16_to_float(Base::half(i));
    }

    DEVICE void widened(float (&values)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] = get(i);
    }

    DEVICE static Values rounded(const float (&values)[VECTOR]) {
        Values result;
        if constexpr (TYPE != FLOAT32 && HARDWARE_PAIRS && VECTOR % 2 == 0) {
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2)
                result.word[i / 2] = hardware_round_pair<TYPE>(values[i], values[i + 1]);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) {
                if constexpr (TYPE == FLOAT32) {
                    result.word[i] = bits_of(values[i]);
                } else {
                    const unsigned bits = TYPE == FLOAT16 ? float_to_half(values[i]) : float_to_bf16(values[i]);
                    result.word[i / 2] = i % 2 ? result.word[i / 2] | bits << 16 : bits;
                }
            }
        }
        return result;
    }
};

// VECTOR codes of FORMAT as they are in memory.
template <int FORMAT, int VECTOR>
struct Codes : Words<VECTOR> {
    using Base = Words<VECTOR>;

    template <bool ALIGNED = true>
    DEVICE void load_from(const byte* from, int valid) {
        if constexpr (ALIGNED) Base::template load<1>(from, valid);
        else Base::template load_parts<1>(from, valid);
    }

    template <bool ALIGNED = true>
    DEVICE void store_to(byte* to, int valid) const {
        if constexpr (ALIGNED) Base::template store<1>(to, valid);
        else Base::template store_parts<1>(to, valid);
    }

    DEVICE void get(float (&values)[VECTOR]) const {
        if constexpr (VECTOR == 1) {
            values[0] = decode<FORMAT>(Base::code(0));
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) decode_pair<FORMAT>(Base::half(i / 2), values[i], values[i + 1]);
        }
    }

    DEVICE static Codes encoded(const float (&values)[VECTOR]) {
        Codes result;
        if constexpr (VECTOR == 1) {
            result.word[0] = encode<FORMAT>(values[0]);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i += 2) {
                const unsigned pair = encode_pair<FORMAT>(values[i], values[i + 1]);
                result.word[i / 4] = i % 4 ? result.word[i / 4] | pair << 16 : pair;
            }
        }
        return result;
    }
};
