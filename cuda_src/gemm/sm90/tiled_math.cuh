// The sums of a tile, by a warpgroup that has m_slices slices of 64 rows of it.
#pragma once
#include "tiled_layout.cuh"

// The descriptor of a tile whose low word is given: in 32 bits it is moved by one addition.
DEVICE word64 descriptor_of(unsigned low) {
    word64 made;
    asm("mov.b64 %0, {%1, %2};" : "=l"(made) : "r"(low), "n"(1 << 30 | 64));
    return made;
}

template <class C>
struct TileMath {
    using Place = Ring<C::stages>;
    using StageScales = float[C::stages][C::stage_scales];
    float sums[C::m_slices][C::sums];

    const PipelineBarriers<C::stages> pipeline;
    const StageScales& stage_scales;
    const unsigned ring, a_ring;
    const int group, warp, lane;  // of the math warpgroups; of the warpgroup

    // The first row of a slice in a tile, and a thread's row in the slice.
    DEVICE int slice_row(int slice) const { return (C::groups * slice + group) * 64; }
    DEVICE int lane_row() const { return warp * 16 + lane / 4; }

    // Low words of descriptors: of a slice of a, and of the weight from a channel on.
    DEVICE unsigned a_at(const Place& at, int slice) const {
        return (unsigned)tile_descriptor(a_ring + group * 64 * BLOCK_K) + at.stage * (C::a_bytes / 16) +
               slice * (C::groups * 64 * BLOCK_K / 16);
    }
    DEVICE unsigned weight_at(const Place& at, int channel) const {
        return (unsigned)tile_descriptor(ring) + at.stage * (C::weight_bytes / 16) + channel * (BLOCK_K / 16);
    }
    DEVICE void issue(float (&into)[C::sums], unsigned a, unsigned w, bool keep) const {
#pragma unroll
        for (int step = 0; step < 4; ++step)
            product_issue<C::a_type, C::b_type>(into, descriptor_of(a + 2 * step), descriptor_of(w + 2 * step),
                                                keep || step > 0);
    }
    DEVICE void release(const Place& at) const {
        __syncwarp();
        if (lane == 0) pipeline.release(at);
    }

    // ---- one chain of sums over k

    // A stage is free when the products of the next are issued and its own are done.
    DEVICE void chain(Place& at, int k_blocks) {
        Place before = at;
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block) {
            pipeline.wait_full(at);
#pragma unroll
            for (int slice = 0; slice < C::m_slices; ++slice) registers_fence(sums[slice]);
            product_begin();
#pragma unroll
            for (int slice = 0; slice < C::m_slices; ++slice)
                issue(sums[slice], a_at(at, slice), weight_at(at, 0), k_block > 0);
            product_commit();
            product_wait<1>();
            if (k_block > 0) release(before);
            before = at;
            at.advance(1);
        }
        product_wait<0>();
#pragma unroll
        for (int slice = 0; slice < C::m_slices; ++slice) registers_fence(sums[slice]);
        release(before);
    }

    // ---- sums that are promoted in fp32 every 128 of k

    // What a thread needs of a k-block's scales.
    struct Scales {
        float a[C::m_slices][2], first_b, second_b;
    };
    DEVICE Scales await(const Place& at) const {
        pipeline.wait_full(at);
        Scales read = {};
        if constexpr (C::along_k) {
            const float* const stage = stage_scales[at.stage];
#pragma unroll
            for (int slice = 0; slice < C::m_slices; ++slice)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    read.a[slice][half] = stage[slice_row(slice) + lane_row() + 8 * half];
            read.first_b = stage[C::rows];
            read.second_b = stage[C::rows + (C::scale_rows > 1)];
        }
        return read;
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < C::m_slices * C::sums; ++i) sums[i / C::sums][i % C::sums] = 0.0f;
    }

    // Adds the scaled products of a k-block to the sums from the ``first`` on. ``former`` channels have the first scale
    // of the weight.
    template <int former, int count>
    DEVICE void promote(float (&into)[C::sums], int first, const float (&products)[count], const float (&a)[2],
                        const Scales& scales, const Place& here) {
        const float of_first[2] = {a[0] * scales.first_b, a[1] * scales.first_b};
        const float of_second[2] = {a[0] * scales.second_b, a[1] * scales.second_b};
#pragma unroll
        for (int i = 0; i < count; i += 4) {
            const int channel = (first + i) / 4 * 8;
            float* const to = into + first + i;
            float2 b = {};
            if constexpr (C::scales == SCALES_GROUP)
                b = *(const float2*)(stage_scales[here.stage] + C::rows + channel + lane % 4 * 2);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float product = products[i + j];
                if constexpr (C::scales == SCALES_PROMOTED) to[j] += product;
                else if constexpr (C::scales == SCALES_GROUP)
                    to[j] = fma_flushing(a[j / 2], (j % 2 ? b.y : b.x) * product, to[j]);
                else to[j] = fma_flushing(channel < former ? of_first[j / 2] : of_second[j / 2], product, to[j]);
            }
        }
        registers_fence(into);  // no product may be read when its registers are multiplied into again
    }

    DEVICE void begin(float (&products)[C::sums], unsigned a, unsigned w) const {
        registers_fence(products);
        product_begin();
        issue(products, a, w, false);
        product_commit();
    }
    DEVICE void begin(float (&products)[C::sums], const Place& at, int slice) const {
        begin(products, a_at(at, slice), weight_at(at, 0));
    }
    // Waits for products of which PENDING groups are younger, and adds them. The last ones of a k-block release it,
    // as soon as its scales are read.
    template <int former, int PENDING>
    DEVICE void finish(float (&products)[C::sums], const Place& here, const Scales& scales, int slice) {
        const bool last = slice == C::m_slices - 1;
        product_wait<PENDING>();
        registers_fence(products);
        if (last && C::scales != SCALES_GROUP) release(here);
        promote<former>(sums[slice], 0, products, scales.a[slice], scales, here);
        if (last && C::scales == SCALES_GROUP) release(here);
    }

    // With one set of products: one warpgroup adds while the other's are multiplied. The next k-block is awaited, and
    // its scales are read, while this one's last products are multiplied.
    template <int former>
    DEVICE void alternating(Place& at, int k_blocks) {
        float products[C::sums];
        Scales scales = await(at);
        unsigned a = a_at(at, 0), w = weight_at(at, 0);
#pragma unroll(C::scales == SCALES_GROUP ? 1 : 4)
        for (int left = k_blocks; left > 0; --left) {
            const Place here = at;
            Scales next = scales;
#pragma unroll
            for (int slice = 0; slice < C::m_slices; ++slice) {
                begin(products, a + slice * (C::groups * 64 * BLOCK_K / 16), w);
                if (slice == C::m_slices - 1) {
                    at.advance(1);
                    // Now, not where the next products wait for it.
                    a = a_at(at, 0), w = weight_at(at, 0);
                    if (left > 1) next = await(at);
                }
                finish<former, 0>(products, here, scales, slice);
            }
            scales = next;
        }
    }

    // With two sets, of one slice: the next products are multiplied while this warpgroup adds.
    template <int former>
    DEVICE void overlapped(Place& at, int k_blocks) {
        float even[C::sums], odd[C::sums];
        Scales scales = await(at);
        begin(even, at, 0);
        int left = k_blocks;
        const auto step = [&](float (&now)[C::sums], float (&then)[C::sums]) {
            const Place here = at;
            at.advance(1);
            const Scales next = await(at);
            begin(then, at, 0);
            finish<former, 1>(now, here, scales, 0);
            scales = next;
        };
#pragma unroll 1
        while (left > 2) {
            step(even, odd);
            --left;
            step(odd, even);
            --left;
        }
        if (left == 2) {
            step(even, odd);
            finish<former, 0>(odd, at, scales, 0);
        } else {
            finish<former, 0>(even, at, scales, 0);
        }
        at.advance(1);
    }

    // The case of where the weight's scale changes in the tile, so that no sum has to choose.
    static constexpr bool one_scale = C::scales != SCALES_BLOCK || 128 % C::columns == 0;
    static constexpr int seam_step = one_scale ? C::columns : C::columns % 64 == 0 ? 64 : 32;
    template <int former = seam_step>
    DEVICE void promoted(int seam, Place& at, int k_blocks) {
        if constexpr (former < 128 && former < C::columns) {
            if (seam == former) by_sets<former>(at, k_blocks);
            else promoted<former + seam_step>(seam, at, k_blocks);
        } else {
            by_sets<former>(at, k_blocks);
        }
    }
    template <int former>
    DEVICE void by_sets(Place& at, int k_blocks) {
        if constexpr (C::overlapped) overlapped<former>(at, k_blocks);
        else alternating<former>(at, k_blocks);
    }

    DEVICE void run(Place& at, int k_blocks, TileOrigin origin) {
        if constexpr (C::scales == SCALES_CHAIN) {
            chain(at, k_blocks);
        } else {
            clear();
            promoted(128 - origin.column % 128, at, k_blocks);
        }
    }
};
