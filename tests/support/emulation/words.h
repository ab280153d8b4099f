// The vocabulary of CUDA and HIP that the platform headers use, as plain C++ on top of the engine.
#pragma once
#include "engine.h"

// C's <math.h>: the additions of C++ would be most of the text that every kernel includes.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <string.h>
#include <type_traits>
#include <utility>

// Kernels write alignas after __shared__, where GNU attributes are allowed, but standard ones are not.
#define alignas(n) __attribute__((aligned(n)))

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __constant__ static const
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __cluster_dims__(...)

#define threadIdx (emulation_thread()->thread)
#define blockIdx (emulation_thread()->block)
#define blockDim (emulation_thread()->block_size)
#define gridDim (emulation_thread()->grid_size)
#define warpSize (emulation_thread()->warp_size)

#define EMULATED inline __attribute__((always_inline))

// GCC does not instrument accesses that it can tell to be inside a static variable.
template <class T>
EMULATED T &emulated_variable(T &variable) {
    T *pointer = &variable;
    asm("" : "+r"(pointer));
    return *pointer;
}

template <class T, size_t ALIGNMENT>
EMULATED T &emulated_aligned(unsigned char *variable) {
    uintptr_t address = (reinterpret_cast<uintptr_t>(variable) + ALIGNMENT - 1) & ~(ALIGNMENT - 1);
    asm("" : "+r"(address));
    return *reinterpret_cast<T *>(address);
}

EMULATED unsigned char *emulated_shared() { return static_cast<unsigned char *>(emulation_dynamic_shared()); }

// ---- vectors

#define EMULATED_VECTORS(T, name)                                    \
    struct __align__(2 * sizeof(T)) name##2 { T x, y; };             \
    struct name##3 { T x, y, z; };                                   \
    struct __align__(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 { T x, y, z, w; }; \
    EMULATED name##2 make_##name##2(T x, T y) { return {x, y}; }     \
    EMULATED name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATED_VECTORS(int, int)
EMULATED_VECTORS(unsigned, uint)
EMULATED_VECTORS(float, float)
EMULATED_VECTORS(short, short)
EMULATED_VECTORS(unsigned short, ushort)
EMULATED_VECTORS(unsigned char, uchar)
EMULATED_VECTORS(long long, longlong)
EMULATED_VECTORS(unsigned long long, ulonglong)

// ---- bits and arithmetic

template <class To, class From>
EMULATED To emulated_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    __builtin_memcpy(&y, &x, sizeof y);
    return y;
}
EMULATED unsigned __float_as_uint(float x) { return emulated_bits<unsigned>(x); }
EMULATED int __float_as_int(float x) { return emulated_bits<int>(x); }
EMULATED float __uint_as_float(unsigned x) { return emulated_bits<float>(x); }
EMULATED float __int_as_float(int x) { return emulated_bits<float>(x); }
EMULATED float __fadd_rn(float x, float y) { return x + y; }
EMULATED float __fsub_rn(float x, float y) { return x - y; }
EMULATED float __fmul_rn(float x, float y) { return x * y; }
EMULATED float __fdiv_rn(float x, float y) { return x / y; }
EMULATED float __frcp_rn(float x) { return 1.0f / x; }
EMULATED float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
EMULATED float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
EMULATED float __frsqrt_rn(float x) { return static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(x))); }
EMULATED float rsqrtf(float x) { return __frsqrt_rn(x); }
EMULATED float __expf(float x) { return __builtin_expf(x); }
EMULATED float __fdividef(float x, float y) { return x / y; }
EMULATED float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
EMULATED int __float2int_rn(float x) { return static_cast<int>(__builtin_rintf(x)); }
EMULATED int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
EMULATED int __ffs(int x) { return __builtin_ffs(x); }
EMULATED int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATED int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
EMULATED unsigned __umulhi(unsigned x, unsigned y) { return static_cast<unsigned>(static_cast<uint64_t>(x) * y >> 32); }
EMULATED unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) << (shift & 31) >> 32);
}
EMULATED unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
EMULATED unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++) {
        unsigned s = selector >> (4 * i) & 0xF, byte = static_cast<unsigned>(bytes >> (8 * (s & 7)) & 0xFF);
        result |= (s & 8 ? (byte & 0x80 ? 0xFFu : 0u) : byte) << (8 * i);
    }
    return result;
}
template <class T>
EMULATED T min(T x, T y) {
    return y < x ? y : x;
}
template <class T>
EMULATED T max(T x, T y) {
    return x < y ? y : x;
}

// ---- memory: cache hints are ignored

// Used by instructions that the emulation lacks, in kernels that it compiles but never runs.
[[noreturn]] EMULATED uint64_t __cvta_generic_to_shared(const void *) { emulation_trap("__cvta_generic_to_shared"); }

template <class T>
EMULATED T __ldg(const T *p) { return *p; }
template <class T>
EMULATED T __ldcs(const T *p) { return *p; }
template <class T>
EMULATED T __ldcg(const T *p) { return *p; }
template <class T>
EMULATED void __stcs(T *p, T x) { *p = x; }
template <class T>
EMULATED void __stcg(T *p, T x) { *p = x; }
template <class T>
EMULATED T __builtin_nontemporal_load(const T *p) { return *p; }
template <class V, class T>
EMULATED void __builtin_nontemporal_store(V x, T *p) { *p = x; }
EMULATED void __threadfence() {}
EMULATED void __threadfence_block() {}
EMULATED void __nanosleep(unsigned) { emulation_yield(); }
[[noreturn]] EMULATED void __trap() { emulation_trap("__trap"); }

// ---- barriers and warps

EMULATED void __syncthreads() { emulation_barrier(0, EMULATED_OR); }
EMULATED int __syncthreads_or(int x) { return static_cast<int>(emulation_barrier(x, EMULATED_OR)); }
EMULATED int __syncthreads_and(int x) { return static_cast<int>(emulation_barrier(x, EMULATED_AND)); }
EMULATED int __syncthreads_count(int x) { return static_cast<int>(emulation_barrier(x, EMULATED_COUNT)); }

constexpr uint64_t EMULATED_WHOLE_WARP = ~0ull;

// A mask of CUDA has 32 bits.
template <class T>
EMULATED T emulated_exchange(uint64_t mask, T x, unsigned source) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>;
    return emulated_bits<T>(static_cast<Bits>(emulation_collective(EMULATED_EXCHANGE, mask, emulated_bits<Bits>(x), source)));
}
// Returns the lane at `offset` in this lane's part of `width` lanes; if that is outside of the part, this lane.
EMULATED unsigned emulated_lane(int offset, int width, bool inside) {
    unsigned lane = emulation_thread()->lane, part = static_cast<unsigned>(width);
    return inside ? (lane & ~(part - 1)) + static_cast<unsigned>(offset) : lane;
}
template <class T>
EMULATED T emulated_shuffle(uint64_t mask, T x, int lane, int width) {
    return emulated_exchange(mask, x, emulated_lane(lane & (width - 1), width, true));
}
template <class T>
EMULATED T emulated_shuffle_xor(uint64_t mask, T x, int flip, int width) {
    int to = static_cast<int>(emulation_thread()->lane & (width - 1)) ^ flip;
    return emulated_exchange(mask, x, emulated_lane(to, width, to < width));
}
template <class T>
EMULATED T emulated_shuffle_down(uint64_t mask, T x, int delta, int width) {
    int to = static_cast<int>(emulation_thread()->lane & (width - 1)) + delta;
    return emulated_exchange(mask, x, emulated_lane(to, width, to < width));
}
template <class T>
EMULATED T emulated_shuffle_up(uint64_t mask, T x, int delta, int width) {
    int to = static_cast<int>(emulation_thread()->lane & (width - 1)) - delta;
    return emulated_exchange(mask, x, emulated_lane(to, width, to >= 0));
}
#define EMULATED_SHUFFLE(name, body)                                                                              \
    template <class T>                                                                                            \
    EMULATED T name##_sync(unsigned mask, T x, int y, int width = 32) { return body(mask, x, y, width); }         \
    template <class T>                                                                                            \
    EMULATED T name(T x, int y, int width = static_cast<int>(warpSize)) { return body(EMULATED_WHOLE_WARP, x, y, width); }
EMULATED_SHUFFLE(__shfl, emulated_shuffle)
EMULATED_SHUFFLE(__shfl_xor, emulated_shuffle_xor)
EMULATED_SHUFFLE(__shfl_down, emulated_shuffle_down)
EMULATED_SHUFFLE(__shfl_up, emulated_shuffle_up)

EMULATED unsigned __ballot_sync(unsigned mask, int x) {
    return static_cast<unsigned>(emulation_collective(EMULATED_BALLOT, mask, x != 0, 0));
}
EMULATED uint64_t __ballot(int x) { return emulation_collective(EMULATED_BALLOT, EMULATED_WHOLE_WARP, x != 0, 0); }
EMULATED int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
EMULATED int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, !x) == 0; }
EMULATED int __any(int x) { return __ballot(x) != 0; }
EMULATED int __all(int x) { return __ballot(!x) == 0; }
EMULATED unsigned __activemask() { return 0xFFFFFFFFu; }
EMULATED void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
    emulation_collective(EMULATED_SYNC, emulation_thread()->warp_size > 32 ? EMULATED_WHOLE_WARP : mask, 0, 0);
}
#define EMULATED_REDUCE(name, T, operation)                                            \
    EMULATED T name(unsigned mask, T x) {                                              \
        for (int flip = 16; flip; flip /= 2) {                                         \
            T y = emulated_shuffle_xor(mask, x, flip, 32);                             \
            x = operation;                                                             \
        }                                                                              \
        return x;                                                                      \
    }
EMULATED_REDUCE(__reduce_max_sync, unsigned, x < y ? y : x)
EMULATED_REDUCE(__reduce_min_sync, unsigned, y < x ? y : x)
EMULATED_REDUCE(__reduce_add_sync, unsigned, x + y)
EMULATED_REDUCE(__reduce_or_sync, unsigned, x | y)

// ---- atomics: one thread runs at a time, so plain code is atomic

#define EMULATED_ATOMIC(name, operation)                                              \
    template <class T, class U>                                                       \
    __attribute__((no_sanitize_address)) T name(T *p, U value) {                      \
        emulation_atomic(p, sizeof(T));                                               \
        T old = *p, x = static_cast<T>(value);                                        \
        *p = operation;                                                               \
        return old;                                                                   \
    }
EMULATED_ATOMIC(atomicAdd, old + x)
EMULATED_ATOMIC(atomicSub, old - x)
EMULATED_ATOMIC(atomicMax, old < x ? x : old)
EMULATED_ATOMIC(atomicMin, x < old ? x : old)
EMULATED_ATOMIC(atomicOr, old | x)
EMULATED_ATOMIC(atomicAnd, old &x)
EMULATED_ATOMIC(atomicExch, x)
EMULATED_ATOMIC(atomicInc, (old >= x ? 0 : old + 1))
template <class T>
__attribute__((no_sanitize_address)) T atomicCAS(T *p, T compare, T value) {
    emulation_atomic(p, sizeof(T));
    T old = *p;
    if (old == compare) *p = value;
    return old;
}

// ---- calling a kernel with arguments by their addresses

template <class T>
constexpr char emulated_kind() {
    return std::is_pointer_v<T> ? 'P' : std::is_same_v<T, float> ? 'f' : std::is_integral_v<T> ? 'i' : 's';
}
template <class... A, size_t... I>
__attribute__((no_sanitize_address)) void emulated_call(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_cv_t<A> *>(arguments[I])...);
}
template <class... A>
__attribute__((no_sanitize_address)) void emulated_call(void (*kernel)(A...), void **arguments) {
    emulated_call(kernel, arguments, std::index_sequence_for<A...>{});
}
template <class... A>
int emulated_parameters(void (*)(A...), char *kinds, uint32_t *sizes) {
    char k[] = {emulated_kind<A>()..., 0};
    uint32_t s[] = {static_cast<uint32_t>(sizeof(A))..., 0};
    memcpy(kinds, k, sizeof k);
    memcpy(sizes, s, sizeof s);
    return static_cast<int>(sizeof...(A));
}
// Follows the source of the kernel.
#define EMULATED_ENTRY(entry)                                                                                       \
    extern "C" void emulated_entry(void **arguments) { emulated_call(&entry, arguments); }                          \
    extern "C" int emulated_signature(char *kinds, uint32_t *sizes) { return emulated_parameters(&entry, kinds, sizes); }

// ---- HIP

#include "amd.h"

// Functions that devices must inline would double the compiler's time here, without a benefit.
#define always_inline
