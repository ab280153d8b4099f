// Words of sm_90a beside those of platform.cuh: barriers in shared memory, the copy engine (TMA), clusters, wgmma.
// Addresses in shared memory are 32-bit numbers, as the instructions take them.
#pragma once
#include "../platform.cuh"

typedef unsigned int uint32;

struct alignas(64) TensorMap {
    char bytes[128];
};

// ---- barriers, beside the words of barriers.cuh

DEVICE void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Whether phase p is complete.
DEVICE bool barrier_passed(uint32 barrier, uint32 parity) {
    uint32 passed;
    asm volatile("{\n\t.reg .pred done;\n\t"
                 "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
                 "selp.u32 %0, 1, 0, done;\n\t}"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return passed;
}

// ---- the copy engine: tiles of a two-dimensional tensor, columns first

DEVICE void map_prefetch(const TensorMap *map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
DEVICE void tile_load(uint32 destination, const TensorMap *map, int column, int row, uint32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(destination), "l"(map), "r"(column), "r"(row), "r"(barrier)
                 : "memory");
}
// The same into each block of the cluster whose bit is set in `blocks`: at the same place, counted at the same barrier.
DEVICE void tile_load_shared(uint32 destination, const TensorMap *map, int column, int row, uint32 barrier, int blocks) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination), "l"(map), "r"(column), "r"(row), "r"(barrier),
                 "h"((unsigned short)blocks)
                 : "memory");
}
// The same as the first for what is read once: the L2 gives its place up first.
DEVICE void tile_load_once(uint32 destination, const TensorMap *map, int column, int row, uint32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(destination), "l"(map), "r"(column), "r"(row), "r"(barrier),
                 "l"(0x12F0000000000000ull)
                 : "memory");
}

// ---- single words: copied into shared memory; a thread's copies count once at a barrier when they are in

DEVICE void word_copy(uint32 destination, const void *source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(destination), "l"(source) : "memory");
}
DEVICE void words_arrive(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
DEVICE void words_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// What this thread has stored into shared memory is for the copy engine and the tensor cores too, past a barrier.
DEVICE void writes_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- clusters

DEVICE void remote_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Stores floats into another block's shared memory and counts their bytes at its barrier.
DEVICE void remote_store(uint32 destination, float2 v, uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                 ::"r"(destination), "f"(v.x), "f"(v.y), "r"(barrier)
                 : "memory");
}
DEVICE void remote_store(uint32 destination, float4 v, uint32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 ::"r"(destination), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
                 : "memory");
}

// ---- some threads of a block

DEVICE void threads_arrive(int barrier, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE void threads_sync(int barrier, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// A group of 128 threads: from here on each has so many registers.
template <int COUNT> DEVICE void registers_give() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT> DEVICE void registers_take() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- between threads of a warp

// Transposes an 8x8 matrix of 16-bit numbers that lies across a warp, two neighbours of a row to a thread.
DEVICE uint32 warp_transpose(uint32 pair) {
    uint32 result;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
    return result;
}

// Thread q of four neighbours gives its word i to thread i and has then word q of each.
DEVICE void quad_transpose(uint32 &a, uint32 &b, uint32 &c, uint32 &d, int lane) {
    const bool odd = lane & 1, high = lane & 2;
    uint32 x = __shfl_xor_sync(0xffffffffu, odd ? a : b, 1), y = __shfl_xor_sync(0xffffffffu, odd ? c : d, 1);
    (odd ? a : b) = x;
    (odd ? c : d) = y;
    x = __shfl_xor_sync(0xffffffffu, high ? a : c, 2), y = __shfl_xor_sync(0xffffffffu, high ? b : d, 2);
    (high ? a : c) = x;
    (high ? b : d) = y;
}

// ---- wgmma: d[64, WIDTH] (+)= w[64, 32] * a[WIDTH, 32]^T, both in shared memory, rows of 128 swizzled bytes

// The descriptor of a tile at a multiple of 1,024 bytes; + 2 moves it by 32 columns.
DEVICE word64 tile_descriptor(uint32 address) {
    return (word64)(address >> 4 & 0x3FFF) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
DEVICE void product_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEVICE void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most PENDING of the committed groups are unfinished.
template <int PENDING> DEVICE void product_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keeps the compiler from moving what it does with these registers past here.
template <int COUNT> DEVICE void registers_fence(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// Thread t of the 128 holds of row (t / 32) * 16 + (t % 32) / 4 + 8 * half the columns 8 * j + t % 4 * 2 + {0, 1}
// in d[4 * j + 2 * half + {0, 1}].
#define HOPPER_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define HOPPER_D8(i) HOPPER_D4(i), HOPPER_D4(i + 4)
#define HOPPER_D16(i) HOPPER_D8(i), HOPPER_D8(i + 8)
#define HOPPER_D32(i) HOPPER_D16(i), HOPPER_D16(i + 16)
#define HOPPER_R4(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define HOPPER_R8 HOPPER_R4(0, 1, 2, 3) ", " HOPPER_R4(4, 5, 6, 7)
#define HOPPER_R16 HOPPER_R8 ", " HOPPER_R4(8, 9, 10, 11) ", " HOPPER_R4(12, 13, 14, 15)
#define HOPPER_R32                                                                                                     \
    HOPPER_R16 ", " HOPPER_R4(16, 17, 18, 19) ", " HOPPER_R4(20, 21, 22, 23) ", " HOPPER_R4(24, 25, 26, 27) ", "       \
        HOPPER_R4(28, 29, 30, 31)
#define HOPPER_R24 HOPPER_R16 ", " HOPPER_R4(16, 17, 18, 19) ", " HOPPER_R4(20, 21, 22, 23)
#define HOPPER_R48                                                                                                     \
    HOPPER_R32 ", " HOPPER_R4(32, 33, 34, 35) ", " HOPPER_R4(36, 37, 38, 39) ", " HOPPER_R4(40, 41, 42, 43) ", "       \
        HOPPER_R4(44, 45, 46, 47)
#define HOPPER_R64                                                                                                     \
    HOPPER_R48 ", " HOPPER_R4(48, 49, 50, 51) ", " HOPPER_R4(52, 53, 54, 55) ", " HOPPER_R4(56, 57, 58, 59) ", "       \
        HOPPER_R4(60, 61, 62, 63)
#define HOPPER_STRING_OF(x) #x
#define HOPPER_STRING(x) HOPPER_STRING_OF(x)
#define HOPPER_PRODUCT(n, types, registers, w_at, a_at, keep_at, ...)                                                  \
    asm volatile("{\n\t.reg .pred keep;\n\tsetp.ne.b32 keep, " keep_at ", 0;\n\t"                                     \
                 "wgmma.mma_async.sync.aligned.m64n" n "k32.f32." types " {" registers "}, " w_at ", " a_at            \
                 ", keep, 1, 1;\n\t}"                                                                                  \
                 : __VA_ARGS__                                                                                         \
                 : "l"(w), "l"(a), "r"(keep)                                                                           \
                 : "memory")
