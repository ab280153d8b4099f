// wgmma of sm_90a: d[64, n] (+)= w[64, 32] * a[n, 32]^T, w in shared memory or registers, a in shared memory, in rows
// of 128 swizzled bytes; named barriers; and register reallocation for warpgroups.
#pragma once
#include "../platform.cuh"

// ---- named barriers, and the registers of a warpgroup

DEVICE void threads_arrive(int barrier, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void threads_sync(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Called by a warpgroup: each of its threads has COUNT registers from here on.
template <int COUNT>
DEVICE void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
DEVICE void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// ---- products

// The matrix descriptor of a tile at a multiple of 1,024 bytes; adding 2 moves it by 32 columns.
DEVICE word64 tile_descriptor(unsigned address) {
    return (word64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the committed groups are unfinished.
template <int PENDING>
DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving accesses to these registers across this point.
template <int COUNT>
DEVICE void registers_fence(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
template <int ROWS, int COUNT>
DEVICE void registers_fence(unsigned (&registers)[ROWS][COUNT]) {
#pragma unroll
    for (int i = 0; i < ROWS * COUNT; ++i) asm volatile("" : "+r"(registers[i / COUNT][i % COUNT])::"memory");
}

// d[4 * j + 2 * half + {0, 1}] of thread t of the 128 are of row (t / 32) * 16 + (t % 32) / 4 + 8 * half and columns
// 8 * j + t % 4 * 2 + {0, 1}.
// clang-format off
#define WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_D8(i) WGMMA_D4(i), WGMMA_D4(i + 4)
#define WGMMA_D16(i) WGMMA_D8(i), WGMMA_D8(i + 8)
#define WGMMA_D32(i) WGMMA_D16(i), WGMMA_D16(i + 16)
#define WGMMA_R4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define WGMMA_R8 WGMMA_R4(0, 1, 2, 3) ", " WGMMA_R4(4, 5, 6, 7)
#define WGMMA_R16 WGMMA_R8 ", " WGMMA_R4(8, 9, 10, 11) ", " WGMMA_R4(12, 13, 14, 15)
#define WGMMA_R32                                                                                                     \
    WGMMA_R16 ", " WGMMA_R4(16, 17, 18, 19) ", " WGMMA_R4(20, 21, 22, 23) ", " WGMMA_R4(24, 25, 26, 27) ", "       \
        WGMMA_R4(28, 29, 30, 31)
#define WGMMA_R24 WGMMA_R16 ", " WGMMA_R4(16, 17, 18, 19) ", " WGMMA_R4(20, 21, 22, 23)
#define WGMMA_R36 WGMMA_R32 ", " WGMMA_R4(32, 33, 34, 35)
#define WGMMA_R40 WGMMA_R36 ", " WGMMA_R4(36, 37, 38, 39)
#define WGMMA_R44 WGMMA_R40 ", " WGMMA_R4(40, 41, 42, 43)
#define WGMMA_R48 WGMMA_R44 ", " WGMMA_R4(44, 45, 46, 47)
#define WGMMA_R52 WGMMA_R48 ", " WGMMA_R4(48, 49, 50, 51)
#define WGMMA_R56 WGMMA_R52 ", " WGMMA_R4(52, 53, 54, 55)
#define WGMMA_R60 WGMMA_R56 ", " WGMMA_R4(56, 57, 58, 59)
#define WGMMA_R64 WGMMA_R60 ", " WGMMA_R4(60, 61, 62, 63)
#define WGMMA_R72 WGMMA_R64 ", " WGMMA_R4(64, 65, 66, 67) ", " WGMMA_R4(68, 69, 70, 71)
#define WGMMA_R80 WGMMA_R72 ", " WGMMA_R4(72, 73, 74, 75) ", " WGMMA_R4(76, 77, 78, 79)
#define WGMMA_R96                                                                                                     \
    WGMMA_R80 ", " WGMMA_R4(80, 81, 82, 83) ", " WGMMA_R4(84, 85, 86, 87) ", " WGMMA_R4(88, 89, 90, 91) ", "       \
        WGMMA_R4(92, 93, 94, 95)
#define WGMMA_R128                                                                                                    \
    WGMMA_R96 ", " WGMMA_R4(96, 97, 98, 99) ", " WGMMA_R4(100, 101, 102, 103) ", " WGMMA_R4(104, 105, 106, 107)      \
        ", " WGMMA_R4(108, 109, 110, 111) ", " WGMMA_R4(112, 113, 114, 115) ", " WGMMA_R4(116, 117, 118, 119)        \
        ", " WGMMA_R4(120, 121, 122, 123) ", " WGMMA_R4(124, 125, 126, 127)
#define WGMMA(n, types, registers, w_at, a_at, keep_at, ...)                                                          \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " keep_at ", 0;\n\t"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" n "k32.f32." types " {" registers "}, " w_at ", " a_at            \
                 ", keep, 1, 1;\n\t}"                                                                                  \
                 : __VA_ARGS__                                                                                         \
                 : "l"(w), "l"(a), "r"(keep)                                                                           \
                 : "memory")
#define WGMMA_OF(types)                                                                                                \
    if constexpr (n == 8) WGMMA("8", types, WGMMA_R4(0, 1, 2, 3), "%4", "%5", "%6", WGMMA_D4(0));                      \
    else if constexpr (n == 16) WGMMA("16", types, WGMMA_R8, "%8", "%9", "%10", WGMMA_D8(0));                          \
    else if constexpr (n == 32) WGMMA("32", types, WGMMA_R16, "%16", "%17", "%18", WGMMA_D16(0));                      \
    else if constexpr (n == 48) WGMMA("48", types, WGMMA_R24, "%24", "%25", "%26", WGMMA_D16(0), WGMMA_D8(16));        \
    else if constexpr (n == 64) WGMMA("64", types, WGMMA_R32, "%32", "%33", "%34", WGMMA_D32(0));                      \
    else if constexpr (n == 72) WGMMA("72", types, WGMMA_R36, "%36", "%37", "%38", WGMMA_D32(0), WGMMA_D4(32));        \
    else if constexpr (n == 80) WGMMA("80", types, WGMMA_R40, "%40", "%41", "%42", WGMMA_D32(0), WGMMA_D8(32));        \
    else if constexpr (n == 88) WGMMA("88", types, WGMMA_R44, "%44", "%45", "%46", WGMMA_D32(0), WGMMA_D8(32),         \
                                       WGMMA_D4(40));                                                                  \
    else if constexpr (n == 96) WGMMA("96", types, WGMMA_R48, "%48", "%49", "%50", WGMMA_D32(0), WGMMA_D16(32));       \
    else if constexpr (n == 104) WGMMA("104", types, WGMMA_R52, "%52", "%53", "%54", WGMMA_D32(0), WGMMA_D16(32),      \
                                       WGMMA_D4(48));                                                                  \
    else if constexpr (n == 112) WGMMA("112", types, WGMMA_R56, "%56", "%57", "%58", WGMMA_D32(0), WGMMA_D16(32),      \
                                       WGMMA_D8(48));                                                                  \
    else if constexpr (n == 120) WGMMA("120", types, WGMMA_R60, "%60", "%61", "%62", WGMMA_D32(0), WGMMA_D16(32), WGMMA_D8(48), \
                                       WGMMA_D4(56));                                                                  \
    else if constexpr (n == 128) WGMMA("128", types, WGMMA_R64, "%64", "%65", "%66", WGMMA_D32(0), WGMMA_D32(32));     \
    else if constexpr (n == 144) WGMMA("144", types, WGMMA_R72, "%72", "%73", "%74", WGMMA_D32(0), WGMMA_D32(32),      \
                                       WGMMA_D8(64));                                                                  \
    else if constexpr (n == 160) WGMMA("160", types, WGMMA_R80, "%80", "%81", "%82", WGMMA_D32(0), WGMMA_D32(32),      \
                                       WGMMA_D16(64));                                                                 \
    else if constexpr (n == 192) WGMMA("192", types, WGMMA_R96, "%96", "%97", "%98", WGMMA_D32(0), WGMMA_D32(32),      \
                                       WGMMA_D32(64));                                                                 \
    else WGMMA("256", types, WGMMA_R128, "%128", "%129", "%130", WGMMA_D32(0), WGMMA_D32(32), WGMMA_D32(64),           \
               WGMMA_D32(96))
// clang-format on

// d = (keep ? d : 0) + w * a^T for 32 columns of k of two tiles, given by their descriptors.
template <int w_format, int a_format, int sums, int n = 2 * sums>
DEVICE void product_issue(float (&d)[sums], word64 w, word64 a, int keep) {
    static_assert(n == 8 || n == 16 || n == 32 || n == 48 || (n >= 64 && n <= 128 && n % 8 == 0) || n == 144 ||
                      n == 160 || n == 192 || n == 256,
                  "an N of wgmma that is listed above");
    if constexpr (w_format == E5M2) {
        WGMMA_OF("e5m2.e4m3");
    } else if constexpr (a_format == E5M2) {
        WGMMA_OF("e4m3.e5m2");
    } else {
        WGMMA_OF("e4m3.e4m3");
    }
}

// The same with 64 rows of w in registers: thread t has, of rows (t / 32) * 16 + (t % 32) / 4 + {0, 8}, the columns
// t % 4 * 4 + {0, ..., 3} in w[0] and w[1], and the columns 16 further in w[2] and w[3].
// clang-format off
#define WGMMA_W(n, types, registers, w0, w1, w2, w3, a_at, keep_at, ...)                                              \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " keep_at ", 0;\n\t"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" n "k32.f32." types " {" registers "}, {" WGMMA_R4(w0, w1, w2, w3) \
                 "}, " a_at ", keep, 1, 1;\n\t}"                                                                      \
                 : __VA_ARGS__                                                                                         \
                 : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "l"(a), "r"(keep)                                       \
                 : "memory")
#define WGMMA_W_OF(types)                                                                                              \
    if constexpr (n == 8) WGMMA_W("8", types, WGMMA_R4(0, 1, 2, 3), 4, 5, 6, 7, "%8", "%9", WGMMA_D4(0));              \
    else if constexpr (n == 16) WGMMA_W("16", types, WGMMA_R8, 8, 9, 10, 11, "%12", "%13", WGMMA_D8(0));               \
    else if constexpr (n == 32) WGMMA_W("32", types, WGMMA_R16, 16, 17, 18, 19, "%20", "%21", WGMMA_D16(0));           \
    else if constexpr (n == 64) WGMMA_W("64", types, WGMMA_R32, 32, 33, 34, 35, "%36", "%37", WGMMA_D32(0));           \
    else if constexpr (n == 96) WGMMA_W("96", types, WGMMA_R48, 48, 49, 50, 51, "%52", "%53", WGMMA_D32(0),            \
                                        WGMMA_D16(32));                                                                \
    else WGMMA_W("128", types, WGMMA_R64, 64, 65, 66, 67, "%68", "%69", WGMMA_D32(0), WGMMA_D32(32))
// clang-format on
template <int w_format, int a_format, int sums, int n = 2 * sums>
DEVICE void product_issue(float (&d)[sums], const unsigned (&w)[4], word64 a, int keep) {
    static_assert(n == 8 || n == 16 || n == 32 || n == 64 || n == 96 || n == 128, "an N of wgmma that is listed above");
    if constexpr (w_format == E5M2) {
        WGMMA_W_OF("e5m2.e4m3");
    } else if constexpr (a_format == E5M2) {
        WGMMA_W_OF("e4m3.e5m2");
    } else {
        WGMMA_W_OF("e4m3.e4m3");
    }
}

// The part of w that a step of 32 columns multiplies.
DEVICE word64 columns_of(word64 w, int step) { return w + 2 * step; }
DEVICE auto columns_of(const unsigned (&w)[4][4], int step) -> const unsigned (&)[4] { return w[step]; }

// d = w * a^T for the 128 columns of a k-block, as one committed group.
template <int w_format, int a_format, int sums, class Weight>
DEVICE void product_of_block(float (&d)[sums], const Weight& w, word64 a) {
    registers_fence(d);
    product_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step)
        product_issue<w_format, a_format>(d, columns_of(w, step), a + 2 * step, step > 0);
    product_commit();
}
