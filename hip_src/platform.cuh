// The platform ops that kernels are written in, for HIP. cuda_src/platform.cuh documents them.
//
// They use only clang's builtins: neither the HIP headers nor the device libraries are needed. Kernels are compiled
// with -fgpu-flush-denormals-to-zero, so here even the *_exact ops flush subnormal numbers.
#pragma once

#define WARP FP8CORE_WARP

#ifndef __global__
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __constant__ __attribute__((constant))
#endif
#define KERNEL(threads) extern "C" __global__ void __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define KERNEL_ALONE(threads) KERNEL(threads)
#define DEVICE __device__ inline __attribute__((always_inline))
#define SHARED __shared__
#if defined(FP8CORE_EMULATION)
#define DYNAMIC_SHARED(name) unsigned char* const name = static_cast<unsigned char*>(emulation_dynamic_shared())
#else
#define DYNAMIC_SHARED(name) extern __shared__ __attribute__((aligned(16))) unsigned char name[]
#endif
#define MODULE_MEMORY __device__

using byte = unsigned char;
using word64 = unsigned long long;

constexpr int E4M3FN = 0, E4M3FNUZ = 1, E5M2 = 2, E5M2FNUZ = 3;
constexpr int FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2;

// MI300 (gfx942) has instructions for the fnuz formats, MI350 (gfx950) and gfx12 for the OCP ones.
#if defined(__gfx942__)
#define FP8CORE_FNUZ_CONVERSIONS 1
#define FP8CORE_OCP_CONVERSIONS 0
#elif defined(__gfx950__) || defined(__gfx1200__) || defined(__gfx1201__)
#define FP8CORE_FNUZ_CONVERSIONS 0
#define FP8CORE_OCP_CONVERSIONS 1
#else
#define FP8CORE_FNUZ_CONVERSIONS 0
#define FP8CORE_OCP_CONVERSIONS 0
#endif

template <int format>
constexpr bool HARDWARE_FORMAT =
    format == E4M3FNUZ || format == E5M2FNUZ ? FP8CORE_FNUZ_CONVERSIONS : FP8CORE_OCP_CONVERSIONS;

// ---- where a thread is -------------------------------------------------------------------------------

DEVICE unsigned thread_x() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE unsigned block_x() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE unsigned block_y() { return __builtin_amdgcn_workgroup_id_y(); }
DEVICE unsigned block_z() { return __builtin_amdgcn_workgroup_id_z(); }
DEVICE unsigned grid_x() { return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x(); }
DEVICE unsigned grid_y() { return __builtin_amdgcn_grid_size_y() / __builtin_amdgcn_workgroup_size_y(); }
DEVICE unsigned lane() { return thread_x() % WARP; }

// ---- bits and IEEE fp32 arithmetic -------------------------------------------------------------------

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
DEVICE float multiply_flushing(float x, float y) { return x * y; }
DEVICE float fma_flushing(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
DEVICE float exp2_fast(float x) { return __builtin_amdgcn_exp2f(x); }
DEVICE float exponential(float x) {
    const float power = x * 0x1.715476p+0f;  // log2(e); `rest` adds what fp32 cuts off
    const float rest = fma_exact(x, 0x1.4ae0cp-26f, fma_exact(x, 0x1.715476p+0f, -power));
    return exp2_fast(power) * fma_exact(rest, 0x1.62e43p-1f, 1.0f);
}
DEVICE float reciprocal_ordinary(float x) { return 1.0f / x; }
DEVICE float reciprocal_fast(float x) { return __builtin_amdgcn_rcpf(x); }
DEVICE float rsqrt_fast(float x) { return __builtin_amdgcn_rsqf(x); }

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
DEVICE Vector16 load16_streaming(const void* p) {
    using Four = unsigned __attribute__((ext_vector_type(4)));
    const Four v = __builtin_nontemporal_load(static_cast<const Four*>(p));
    return {v.x, v.y, v.z, v.w};
}
DEVICE void store8_streaming(void* p, Vector8 v) {
    using Two = unsigned __attribute__((ext_vector_type(2)));
    __builtin_nontemporal_store(Two{v.x, v.y}, static_cast<Two*>(p));
}
DEVICE word64 load_relaxed(const word64* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void post_relaxed(word64* p, word64 v) { __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }
DEVICE unsigned atomic_max(unsigned* p, unsigned v) {
    return __hip_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE void atomic_add_shared(int* p, int v) {
    __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

// ---- threads together --------------------------------------------------------------------------------

DEVICE void block_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE unsigned from_lane(unsigned x, unsigned source) {
    return static_cast<unsigned>(__builtin_amdgcn_ds_bpermute(static_cast<int>(source * 4), static_cast<int>(x)));
}
DEVICE unsigned shuffle_xor(unsigned x, int mask) { return from_lane(x, lane() ^ static_cast<unsigned>(mask)); }
DEVICE float shuffle_xor(float x, int mask) { return float_of(shuffle_xor(bits_of(x), mask)); }
DEVICE unsigned shuffle_from(unsigned x, unsigned source) { return from_lane(x, source); }
DEVICE float shuffle_from(float x, unsigned source) { return float_of(from_lane(bits_of(x), source)); }
constexpr bool WARP_MAX_IS_FAST = false;
DEVICE unsigned warp_max(unsigned x) {
    for (int mask = WARP / 2; mask > 0; mask /= 2) {
        const unsigned other = shuffle_xor(x, mask);
        x = x > other ? x : other;
    }
    return x;
}
DEVICE bool warp_all(bool x) { return warp_max(x ? 0u : 1u) == 0u; }
DEVICE void warp_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
#if WARP == 64
using Lanes = word64;  // a bit for each lane of a wavefront
DEVICE Lanes lanes_where(bool x) { return __builtin_amdgcn_ballot_w64(x); }
#else
using Lanes = unsigned;
DEVICE Lanes lanes_where(bool x) { return __builtin_amdgcn_ballot_w32(x); }
#endif
DEVICE int count_lanes(Lanes lanes) { return __builtin_popcountll(lanes); }

// AMD GPUs have no programmatic dependent launch, and no clusters.
DEVICE void grid_dependency_launch() {}
DEVICE void grid_dependency_wait() {}
DEVICE void issue_loads() {}
DEVICE void prefetch_to_l2(const void*) {}
DEVICE unsigned pin_register(unsigned x) { return x; }
template <class T>
DEVICE T* pin_register(T* p) {
    return p;
}
DEVICE void tx_barrier_open(word64*, int) {}
DEVICE void cluster_arrive() {}
DEVICE void cluster_wait() {}
DEVICE void dsmem_store(unsigned*, unsigned, word64*, unsigned) {}
DEVICE void tx_barrier_wait(word64*) {}
struct RemotePlace {
    RemotePlace() = default;
    DEVICE RemotePlace(unsigned*, word64*, unsigned) {}
    DEVICE void store(unsigned, int, int) const {}
};

#include "../cuda_src/common/fp8.cuh"
