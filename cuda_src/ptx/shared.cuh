// Loads and stores in shared memory, at 32-bit addresses.
#pragma once
#include "../platform.cuh"

DEVICE Vector16 shared_load16(unsigned at) {
    Vector16 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}
DEVICE void shared_store16(unsigned at, Vector16 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
DEVICE float2 shared_load_floats(unsigned at) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(at) : "memory");
    return pair;
}
DEVICE void shared_store_floats(unsigned at, float first, float second) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(first), "f"(second) : "memory");
}
// An element of 1, 2 or 4 bytes, in the low bits.
template <int bytes>
DEVICE unsigned shared_load_element(unsigned at) {
    if constexpr (bytes == 4) {
        unsigned word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
        return word;
    } else {
        unsigned short half;
        if constexpr (bytes == 2) asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
        else asm volatile("ld.shared.u8 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
        return half;
    }
}
// One of 2 or 4 bytes.
template <int bytes>
DEVICE void shared_store_element(unsigned at, unsigned element) {
    static_assert(bytes == 2 || bytes == 4, "two or four bytes");
    if constexpr (bytes == 4) asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(element) : "memory");
    else asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((unsigned short)element) : "memory");
}
