// The platform ops that kernels are written in, for CUDA. hip_src/platform.cuh defines the same ops; each of the two
// includes its own conversions.cuh.
//
// Portable kernel bodies use these ops and plain C++17. All PTX is in these headers and in ptx/. Each op has a portable
// fallback for architectures without the instruction and for FP8CORE_EMULATION, where a shim compiles the text as C++
// and supplies CUDA's keywords, indices, barriers, shuffles and atomics (tests/support/emulation/words.h).
#pragma once

#define WARP FP8CORE_WARP
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
// A kernel for one block per multiprocessor: its threads may use all registers.
#define KERNEL_ALONE(threads) extern "C" __global__ void __launch_bounds__(threads, 1)
#define DEVICE __device__ __forceinline__
#define SHARED __shared__

#if defined(FP8CORE_EMULATION)
#define FP8CORE_PTX 0
#define DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(emulation_dynamic_shared())
#else
#define FP8CORE_PTX __CUDA_ARCH__
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#endif

// Memory of the module: zero when the module is loaded, and kept from launch to launch.
#define MODULE_MEMORY __device__

using byte = unsigned char;
using word64 = unsigned long long;

// Formats and inputs, as -D FORMAT and -D INPUT name them.
constexpr int E4M3FN = 0, E4M3FNUZ = 1, E5M2 = 2, E5M2FNUZ = 3;
constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;

// Whether instructions encode and decode a format; otherwise common/fp8.cuh does it by integer arithmetic.
template <int format>
constexpr bool HARDWARE_FORMAT = FP8CORE_PTX >= 890 && (format == E4M3FN || format == E5M2);

// ---- where a thread is -------------------------------------------------------------------------------

DEVICE unsigned thread_x() { return threadIdx.x; }
DEVICE unsigned block_x() { return blockIdx.x; }
DEVICE unsigned block_y() { return blockIdx.y; }
DEVICE unsigned block_z() { return blockIdx.z; }
DEVICE unsigned grid_x() { return gridDim.x; }
DEVICE unsigned grid_y() { return gridDim.y; }
DEVICE unsigned lane() { return threadIdx.x % WARP; }

// ---- bits and IEEE fp32 arithmetic -------------------------------------------------------------------
// The *_exact ops round to nearest even and keep subnormal numbers, whatever the compiler's options are.

#if FP8CORE_PTX
DEVICE unsigned bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(unsigned bits) { return __uint_as_float(bits); }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }  // of a number and a NaN: the number
DEVICE float minimum(float a, float b) { return fminf(a, b); }
DEVICE float magnitude(float x) { return fabsf(x); }
DEVICE float divide_exact(float x, float y) {
    float q;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(q) : "f"(x), "f"(y));
    return q;
}
DEVICE float reciprocal_exact(float x) {
    float r;
    asm("rcp.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float multiply_exact(float x, float y) {
    float p;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(p) : "f"(x), "f"(y));
    return p;
}
DEVICE float fma_exact(float x, float y, float z) {
    float s;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(s) : "f"(x), "f"(y), "f"(z));
    return s;
}
DEVICE float sqrt_exact(float x) {
    float r;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// x * y, with subnormal operands and products flushed to zeros of their sign.
DEVICE float multiply_flushing(float x, float y) {
    float p;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(p) : "f"(x), "f"(y));
    return p;
}
// x * y + z rounded once; subnormal numbers may be flushed to zero. Here negating an operand is free; in fma_exact it
// is not.
DEVICE float fma_flushing(float x, float y, float z) { return __fmaf_rn(x, y, z); }
// About 2 ulp.
DEVICE float exp2_fast(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float reciprocal_fast(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
DEVICE float rsqrt_fast(float x) {
    float r;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
// CUDA's own expf, as other kernels call it, with an error of at most 2 ulp. For |x| up to 64.
DEVICE float exponential(float x) { return expf(x); }
// RN(1 / x) for |x| from 2**-100 to 2**100: the steps of rcp.rn without its test of the range.
DEVICE float reciprocal_ordinary(float x) {
    const float r = reciprocal_fast(x);
    return __fmaf_rn(r, -__fmaf_rn(r, x, -1.0f), r);
}
#else
DEVICE unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
DEVICE float float_of(unsigned bits) { return __builtin_bit_cast(float, bits); }
DEVICE float maximum(float a, float b) { return __builtin_fmaxf(a, b); }
DEVICE float minimum(float a, float b) { return __builtin_fminf(a, b); }
DEVICE float magnitude(float x) { return __builtin_fabsf(x); }
DEVICE float divide_exact(float x, float y) { return x / y; }
DEVICE float reciprocal_exact(float x) { return 1.0f / x; }
DEVICE float multiply_exact(float x, float y) { return x * y; }
DEVICE float fma_exact(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE float sqrt_exact(float x) { return __builtin_sqrtf(x); }
DEVICE float flushed(float x) { return magnitude(x) < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
DEVICE float multiply_flushing(float x, float y) { return flushed(flushed(x) * flushed(y)); }
DEVICE float fma_flushing(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE float exp2_fast(float x) { return __builtin_exp2f(x); }
DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
DEVICE float rsqrt_fast(float x) { return 1.0f / __builtin_sqrtf(x); }
DEVICE float exponential(float x) { return __builtin_expf(x); }
DEVICE float reciprocal_ordinary(float x) { return 1.0f / x; }
#endif

#include "conversions.cuh"

// ---- memory ------------------------------------------------------------------------------------------

struct alignas(16) Vector16 {
    unsigned x, y, z, w;
};
struct alignas(8) Vector8 {
    unsigned x, y;
};

DEVICE Vector16 load16(const void* p) { return *static_cast<const Vector16*>(p); }
DEVICE Vector8 load8(const void* p) { return *static_cast<const Vector8*>(p); }
DEVICE unsigned load4(const void* p) { return *static_cast<const unsigned*>(p); }
DEVICE void store16(void* p, Vector16 v) { *static_cast<Vector16*>(p) = v; }
DEVICE void store8(void* p, Vector8 v) { *static_cast<Vector8*>(p) = v; }
DEVICE void store4(void* p, unsigned v) { *static_cast<unsigned*>(p) = v; }

// Accesses to global memory that is accessed once, and should evict nothing from the caches.
#if FP8CORE_PTX
DEVICE Vector16 load16_streaming(const void* p) {
    Vector16 v;
    asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE void store8_streaming(void* p, Vector8 v) {
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(v.x), "r"(v.y) : "memory");
}
DEVICE word64 load_relaxed(const word64* p) {
    word64 v;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
// Stores v where other blocks poll. They see an atomic exchange 0.4 us sooner than a store, on an H200.
DEVICE void post_relaxed(word64* p, word64 v) {
    asm volatile("{ .reg .b64 old; atom.relaxed.gpu.global.exch.b64 old, [%0], %1; }" ::"l"(p), "l"(v) : "memory");
}
DEVICE void pause() {}  // in loops that poll memory
#else
DEVICE Vector16 load16_streaming(const void* p) { return load16(p); }
DEVICE void store8_streaming(void* p, Vector8 v) { store8(p, v); }
DEVICE word64 load_relaxed(const word64* p) { return *static_cast<const volatile word64*>(p); }
DEVICE void post_relaxed(word64* p, word64 v) { *static_cast<volatile word64*>(p) = v; }
DEVICE void pause() { emulation_yield(); }
#endif
DEVICE unsigned atomic_max(unsigned* p, unsigned v) { return atomicMax(p, v); }
DEVICE void atomic_add_shared(int* p, int v) { atomicAdd(p, v); }
// Prefetches a line into L2, where it cannot become stale, so it is allowed before the preceding kernel has ended. It
// also makes ptxas compute the address by then, instead of only where it is needed.
DEVICE void prefetch_to_l2(const void* p) {
#if FP8CORE_PTX
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}

// ---- threads together --------------------------------------------------------------------------------

DEVICE void block_barrier() { __syncthreads(); }
DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
DEVICE unsigned shuffle_from(unsigned x, unsigned source) { return __shfl_sync(0xffffffffu, x, source); }
DEVICE float shuffle_from(float x, unsigned source) { return __shfl_sync(0xffffffffu, x, source); }
// The largest x of the warp, in every lane: by one instruction, or by shuffles.
constexpr bool WARP_MAX_IS_FAST = FP8CORE_PTX >= 800 || FP8CORE_PTX == 0;
DEVICE unsigned warp_max(unsigned x) {
#if FP8CORE_PTX >= 800
    return __reduce_max_sync(0xffffffffu, x);
#else
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const unsigned other = shuffle_xor(x, mask);
        x = x > other ? x : other;
    }
    return x;
#endif
}
// Returns x by a shuffle, whose result ptxas cannot recompute: x stays in registers from here on. Otherwise ptxas
// computes an address where it is used, after the last barrier, and reads special registers again for that. Every lane
// of the warp calls it. A pointer has to be null or point to global memory.
DEVICE unsigned pin_register(unsigned x) {
#if FP8CORE_PTX
    asm volatile("shfl.sync.idx.b32 %0, %0, %1, 31, 0xffffffff;" : "+r"(x) : "r"(lane()));
#endif
    return x;
}
template <class T>
DEVICE T* pin_register(T* p) {
#if FP8CORE_PTX
    const word64 bits = reinterpret_cast<word64>(p);
    const word64 high = pin_register(static_cast<unsigned>(bits >> 32));
    p = static_cast<T*>(__cvta_global_to_generic(high << 32 | pin_register(static_cast<unsigned>(bits))));
#endif
    return p;
}
DEVICE bool warp_all(bool x) { return __all_sync(0xffffffffu, x) != 0; }
DEVICE void warp_barrier() { __syncwarp(); }
using Lanes = unsigned;  // a bit for each lane of a warp
DEVICE Lanes lanes_where(bool x) { return __ballot_sync(0xffffffffu, x); }
DEVICE int count_lanes(Lanes lanes) { return __popc(lanes); }

// Programmatic dependent launch (PDL): let the next kernel on the stream begin; wait until the preceding one has ended
// and its writes are visible. Every thread waits before it touches memory that another kernel writes or reads.
DEVICE void grid_dependency_launch() {
#if FP8CORE_PTX >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
DEVICE void grid_dependency_wait() {
#if FP8CORE_PTX >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Loads before this call are issued before it. ptxas moves loads past a long computation that does not need them, and
// the thread then waits for the whole memory latency; but it moves no load across a griddepcontrol.wait, even one that
// returns at once.
DEVICE void issue_loads() { grid_dependency_wait(); }

#include "ptx/cluster.cuh"
#include "common/fp8.cuh"
