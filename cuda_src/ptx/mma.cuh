// The FP8 tensor instruction of a warp, mma.sync m16n8k32: D += W * T with W 16 channels x 32 of k, and T 32 of k x 8
// tokens. It is native on sm_89 and from sm_120 on, and runs as HMMA on sm_90 and sm_100. Codes are in OCP formats.
//
// With g = lane / 4 and q = lane % 4, a lane holds, each word with four neighbours along k:
//   of W: rows g and g + 8 at k = 4 * q in words 0 and 1, the same rows at k = 16 + 4 * q in words 2 and 3;
//   of T: token g at k = 4 * q in word 0, at k = 16 + 4 * q in word 1;
//   of D: row g, tokens 2 * q and 2 * q + 1, in numbers 0 and 1; row g + 8, the same tokens, in numbers 2 and 3.
// The order of k does not matter, only that W and T agree on it. Every lane of the warp has to take part.
#pragma once
#include "../platform.cuh"

constexpr int MMA_CHANNELS = 16, MMA_TOKENS = 8;

struct MmaWeight {
    unsigned word[4];
};
struct MmaTokens {
    unsigned word[2];
};
struct MmaSum {
    float of[4];
};

#if FP8CORE_PTX
#define FP8CORE_MMA(types)                                                                                   \
    asm("mma.sync.aligned.m16n8k32.row.col.f32." types ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
        "{%0, %1, %2, %3};"                                                                                  \
        : "+f"(d.of[0]), "+f"(d.of[1]), "+f"(d.of[2]), "+f"(d.of[3])                                         \
        : "r"(w.word[0]), "r"(w.word[1]), "r"(w.word[2]), "r"(w.word[3]), "r"(t.word[0]), "r"(t.word[1]))
template <int W, int T>
DEVICE void mma(MmaSum& d, MmaWeight w, MmaTokens t) {
    if constexpr (W == E5M2) FP8CORE_MMA("e5m2.e4m3");
    else if constexpr (T == E5M2) FP8CORE_MMA("e4m3.e5m2");
    else FP8CORE_MMA("e4m3.e4m3");
}
#else
// Adds in the order of k, which the hardware does not guarantee.
template <int W, int T>
DEVICE void mma(MmaSum& d, MmaWeight w, MmaTokens t) {
    const unsigned g = lane() / 4, q = lane() % 4;
#pragma unroll
    for (unsigned k = 0; k < 32; k += 4) {
        const unsigned owner = k / 4 % 4;
        unsigned rows[2], columns[2];
#pragma unroll
        for (unsigned i = 0; i < 2; ++i) {
            rows[i] = __shfl_sync(0xffffffffu, w.word[i + 2 * (k / 16)], 4 * g + owner);
            columns[i] = __shfl_sync(0xffffffffu, t.word[k / 16], 4 * (2 * q + i) + owner);
        }
#pragma unroll
        for (unsigned i = 0; i < 4; ++i)
#pragma unroll
            for (unsigned j = 0; j < 4; ++j)
                d.of[i] += decode<W>(byte(rows[i / 2] >> 8 * j)) * decode<T>(byte(columns[i % 2] >> 8 * j));
    }
}
#endif
