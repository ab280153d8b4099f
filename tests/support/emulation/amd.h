// The builtins of clang for AMD GPUs that the HIP sources use. A macro such as __gfx942__ says which GPU is meant.
#pragma once

#define __HIP_MEMORY_SCOPE_SINGLETHREAD 1
#define __HIP_MEMORY_SCOPE_WAVEFRONT 2
#define __HIP_MEMORY_SCOPE_WORKGROUP 3
#define __HIP_MEMORY_SCOPE_AGENT 4
#define __HIP_MEMORY_SCOPE_SYSTEM 5

// ---- indices of a thread; a grid's size counts threads

#define EMULATED_AXIS(axis)                                                                                         \
    EMULATED unsigned __builtin_amdgcn_workitem_id_##axis() { return emulation_thread()->thread.axis; }             \
    EMULATED unsigned __builtin_amdgcn_workgroup_id_##axis() { return emulation_thread()->block.axis; }             \
    EMULATED unsigned __builtin_amdgcn_workgroup_size_##axis() { return emulation_thread()->block_size.axis; }      \
    EMULATED unsigned __builtin_amdgcn_grid_size_##axis() {                                                         \
        return emulation_thread()->grid_size.axis * emulation_thread()->block_size.axis;                            \
    }
EMULATED_AXIS(x)
EMULATED_AXIS(y)
EMULATED_AXIS(z)

// ---- waves and barriers

EMULATED void __builtin_amdgcn_s_barrier() { __syncthreads(); }
EMULATED void __builtin_amdgcn_wave_barrier() { __syncwarp(); }
EMULATED void __builtin_amdgcn_s_sleep(int) { emulation_yield(); }
template <class... Scope>
EMULATED void __builtin_amdgcn_fence(int, Scope...) {}
EMULATED int __builtin_amdgcn_ds_bpermute(int address, int x) {
    return emulated_exchange(EMULATED_WHOLE_WARP, x, static_cast<unsigned>(address) / 4 % emulation_thread()->warp_size);
}
EMULATED uint64_t __builtin_amdgcn_ballot_w64(bool x) { return __ballot(x); }
EMULATED uint32_t __builtin_amdgcn_ballot_w32(bool x) { return static_cast<uint32_t>(__ballot(x)); }
EMULATED int __builtin_amdgcn_readfirstlane(int x) { return emulated_exchange(EMULATED_WHOLE_WARP, x, 0); }

// ---- memory

template <class T>
EMULATED T __hip_atomic_load(const T *p, int, int) {
    emulation_yield();
    return *static_cast<const volatile T *>(p);
}
template <class T, class U>
EMULATED void __hip_atomic_store(T *p, U x, int, int) { *static_cast<volatile T *>(p) = static_cast<T>(x); }
template <class T, class U>
EMULATED T __hip_atomic_fetch_add(T *p, U x, int, int) { return atomicAdd(p, x); }
template <class T, class U>
EMULATED T __hip_atomic_fetch_max(T *p, U x, int, int) { return atomicMax(p, x); }
template <class T, class U>
EMULATED T __hip_atomic_fetch_or(T *p, U x, int, int) { return atomicOr(p, x); }
template <class T, class U>
EMULATED T __hip_atomic_exchange(T *p, U x, int, int) { return atomicExch(p, x); }

// ---- arithmetic

template <class T, int COUNT>
struct __align__(COUNT * sizeof(T)) EmulatedVector {
    T of[COUNT];
    T &operator[](int i) { return of[i]; }
    const T &operator[](int i) const { return of[i]; }
};
template <class T>
struct __align__(4 * sizeof(T)) EmulatedVector<T, 4> {
    T x, y, z, w;
    T &operator[](int i) { return i < 2 ? i ? y : x : i < 3 ? z : w; }
    const T &operator[](int i) const { return i < 2 ? i ? y : x : i < 3 ? z : w; }
};

EMULATED float __builtin_amdgcn_exp2f(float x) { return __builtin_exp2f(x); }
EMULATED float __builtin_amdgcn_rcpf(float x) { return 1.0f / x; }
EMULATED float __builtin_amdgcn_rsqf(float x) { return rsqrtf(x); }
// The median of three; if one is NaN, the least of the others.
EMULATED float __builtin_amdgcn_fmed3f(float x, float y, float z) {
    if (x != x || y != y || z != z) return __builtin_fminf(__builtin_fminf(x, y), z);
    return __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z));
}

// ---- FP8: fnuz formats on gfx942, OCP formats on gfx950 and gfx12. A value above the largest number becomes NaN, or
// Inf in e5m2; a NaN keeps its sign. The code uses doubles, so that it is independent of the kernels' conversion.

#if defined(__gfx942__)
constexpr bool EMULATED_FNUZ = true;
#else
constexpr bool EMULATED_FNUZ = false;
#endif

EMULATED double emulated_fp8_value(unsigned magnitude, int mantissa, int bias) {
    int exponent = static_cast<int>(magnitude >> mantissa), fraction = static_cast<int>(magnitude & ((1u << mantissa) - 1));
    return exponent ? __builtin_ldexp((1 << mantissa) + fraction, exponent - bias - mantissa)
                    : __builtin_ldexp(fraction, 1 - bias - mantissa);
}
inline unsigned emulated_to_fp8(float x, int mantissa, int bias, unsigned largest, unsigned overflow, unsigned nan) {
    unsigned sign = emulated_bits<unsigned>(x) >> 24 & 0x80;
    if (x != x) return EMULATED_FNUZ ? 0x80 : sign | nan;
    double size = x < 0 ? -static_cast<double>(x) : x;
    unsigned code = 0;
    while (code < largest && emulated_fp8_value(code + 1, mantissa, bias) <= size) code++;
    double below = size - emulated_fp8_value(code, mantissa, bias), above = emulated_fp8_value(code + 1, mantissa, bias) - size;
    if (above < below || (above == below && code % 2)) code++;
    if (code > largest) return EMULATED_FNUZ ? 0x80 : sign | overflow;
    return EMULATED_FNUZ && code == 0 ? 0 : sign | code;
}
inline float emulated_from_fp8(unsigned code, int mantissa, int bias, unsigned largest, bool infinite) {
    if (EMULATED_FNUZ && code == 0x80) return __builtin_nanf("");
    unsigned size = code & 0x7F;
    double x = emulated_fp8_value(size, mantissa, bias);
    if (size > largest) x = infinite && size == 0x7C ? __builtin_inf() : __builtin_nan("");
    return static_cast<float>(code & 0x80 ? -x : x);
}
EMULATED unsigned emulated_half_word(int old, bool high, unsigned pair) {
    unsigned word = static_cast<unsigned>(old);
    return high ? (word & 0xFFFF) | pair << 16 : (word & 0xFFFF0000) | pair;
}
EMULATED int __builtin_amdgcn_cvt_pk_fp8_f32(float low, float high, int old, bool upper) {
    auto code = [](float x) {
        return EMULATED_FNUZ ? emulated_to_fp8(x, 3, 8, 0x7F, 0, 0x80) : emulated_to_fp8(x, 3, 7, 0x7E, 0x7F, 0x7F);
    };
    return static_cast<int>(emulated_half_word(old, upper, code(low) | code(high) << 8));
}
EMULATED int __builtin_amdgcn_cvt_pk_bf8_f32(float low, float high, int old, bool upper) {
    auto code = [](float x) {
        return EMULATED_FNUZ ? emulated_to_fp8(x, 2, 16, 0x7F, 0, 0x80) : emulated_to_fp8(x, 2, 15, 0x7B, 0x7C, 0x7F);
    };
    return static_cast<int>(emulated_half_word(old, upper, code(low) | code(high) << 8));
}
EMULATED float __builtin_amdgcn_cvt_f32_fp8(int codes, int which) {
    unsigned code = static_cast<unsigned>(codes) >> (8 * which) & 0xFF;
    return EMULATED_FNUZ ? emulated_from_fp8(code, 3, 8, 0x7F, false) : emulated_from_fp8(code, 3, 7, 0x7E, false);
}
EMULATED float __builtin_amdgcn_cvt_f32_bf8(int codes, int which) {
    unsigned code = static_cast<unsigned>(codes) >> (8 * which) & 0xFF;
    return EMULATED_FNUZ ? emulated_from_fp8(code, 2, 16, 0x7F, false) : emulated_from_fp8(code, 2, 15, 0x7B, true);
}

#include "matrix.h"
