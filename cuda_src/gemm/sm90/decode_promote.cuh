// Promotion in sm90_decode: the products of a k-block, which the tensor cores sum with fewer bits, are added in fp32.
#pragma once
#include "decode_epilogue.cuh"

// Waits for the products `d` of the oldest k-block, releases its stages, and adds the products to `sums`, scaled by the
// k-block's blocked scales if there are any. `last`: no other products are in flight.
template <class C>
DEVICE void promote_k_block(float (&sums)[C::sums], float (&d)[C::sums], bool last, DecodeBlock<C>& block,
                            RingPositions<C>& at, const WarpUnits<C>& own, int lane) {
    float scales_b[2];
    float2 scales_a[C::width / 8];
    if constexpr (C::blockwise) {
        const float* const scales = block.stage_scales().of[at.a_oldest.stage];
#pragma unroll
        for (int half = 0; half < 2; ++half) scales_b[half] = scales[C::width + own.scale(half)];
#pragma unroll
        for (int j = 0; j < C::width / 8; ++j) {
            scales_a[j] = *(const float2*)&scales[8 * j + lane % 4 * 2];
            if (C::halves_share_scale)
                scales_a[j] = make_float2(scales_a[j].x * scales_b[0], scales_a[j].y * scales_b[0]);
        }
    }
    if (last) wgmma_wait<0>();
    else wgmma_wait<1>();
    registers_fence(d);
    at.release(block);
    if (C::phases && C::blockwise && C::scale_rows == 1) {  // in place, to save registers
#pragma unroll
        for (int i = 0; i < C::sums; ++i) d[i] *= scales_b[i >> 1 & 1];
        registers_fence(d);
    }
#pragma unroll
    for (int i = 0; i < C::sums; ++i) {
        if constexpr (C::blockwise) {
            const float scale_of_a = i & 1 ? scales_a[i / 4].y : scales_a[i / 4].x, scale_of_b = scales_b[i >> 1 & 1];
            if constexpr (C::halves_share_scale) sums[i] = fma_flushing(scale_of_a, d[i], sums[i]);
            else if constexpr (C::scale_rows > 1) sums[i] = fma_flushing(scale_of_a * scale_of_b, d[i], sums[i]);
            else sums[i] = fma_flushing(scale_of_a, C::phases ? d[i] : scale_of_b * d[i], sums[i]);
        } else {
            sums[i] += d[i];
        }
    }
    if (C::phases) registers_fence(sums);  // without it the compiler serializes wgmma (ptxas C7514)
}
