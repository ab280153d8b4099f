// The main loop: a consumer warpgroup's sums of its m_slices slices of 64 rows of a tile.
#pragma once
#include "tiled_sequence.cuh"

// The descriptor with a given low word, so that one 32-bit addition moves it.
DEVICE word64 descriptor_of(unsigned low) {
    word64 made;
    asm("mov.b64 %0, {%1, %2};" : "=l"(made) : "r"(low), "n"(1 << 30 | 64));
    return made;
}

constexpr int WHOLE = -1;  // instead of a slice: all of them

template <class C>
struct TileMath {
    using Place = Ring<C::stages>;
    using StageScales = float[C::stages][C::stage_scales];
    // The scales of a k-block that a thread needs.
    struct Scales {
        float a[C::m_slices][2], first_b, second_b;
    };
    float sums[C::sets][C::sums];
    // The products to promote, and the scales, of the k-block that was begun last.
    float products[C::promoted ? C::sums : 1];
    Scales scales;

    const PipelineBarriers<C::stages> pipeline;
    const StageScales& stage_scales;
    const unsigned ring, a_ring;
    const int group, warp, lane;  // group: among the warpgroups of a tile; warp: in the warpgroup

    // The first row of a slice in a tile, and a thread's row in the slice.
    DEVICE int slice_row(int slice) const { return (C::groups_per_tile * slice + group) * 64; }
    DEVICE int lane_row() const { return warp * 16 + lane / 4; }

    // The low words of descriptors: of a slice of a, and of the weight.
    DEVICE unsigned a_at(const Place& at, int slice) const {
        return (unsigned)tile_descriptor(a_ring + group * 64 * BLOCK_K) + at.stage * (C::a_bytes / 16) +
               slice * (C::groups_per_tile * 64 * BLOCK_K / 16);
    }
    DEVICE unsigned weight_at(const Place& at) const {
        return (unsigned)tile_descriptor(ring) + at.stage * (C::weight_bytes / 16);
    }
    DEVICE void issue(float (&into)[C::sums], unsigned a, unsigned w, bool keep) const {
#pragma unroll
        for (int step = 0; step < 4; ++step)
            wgmma_issue<C::a_type, C::b_type>(into, descriptor_of(a + 2 * step), descriptor_of(w + 2 * step),
                                              keep || step > 0);
    }
    // Releases a stage to all blocks that load into it.
    DEVICE void release(const Place& at) const {
        __syncwarp();
        if constexpr (C::cluster > 1) {
            if (lane < C::cluster) remote_arrive(cluster_address(pipeline.empty(at), lane));
        } else if (lane == 0) {
            pipeline.release(at);
        }
    }

    // Issues the products of a k-block and a slice as one committed group.
    DEVICE void begin(float (&into)[C::sums], unsigned a, unsigned w, bool keep) const {
        registers_fence(into);
        wgmma_fence();
        issue(into, a, w, keep);
        wgmma_commit();
    }
    DEVICE void begin(float (&into)[C::sums], const Place& at, int slice, bool keep) const {
        begin(into, a_at(at, slice), weight_at(at), keep);
    }
    // Waits for all groups but the last PENDING: among them the one that multiplied into these registers.
    template <int PENDING, int count>
    DEVICE static void end(float (&registers)[count]) {
        wgmma_wait<PENDING>();
        registers_fence(registers);
    }

    // ---- one chain of sums over k

    // The set of a slice's sums by the tile's place in the rotation; slice -1: the free set.
    DEVICE static constexpr int set_of(int rotation, int slice) {
        return C::promoted ? slice : (rotation * (C::sets - 1) + slice + C::sets) % C::sets;
    }
    template <int rotation>
    DEVICE void begin_chains(const Place& at, bool keep) {
#pragma unroll
        for (int slice = 0; slice < C::m_slices; ++slice) begin(sums[set_of(rotation, slice)], at, slice, keep);
    }
    // A stage is released when the next stage's products are issued and its own are complete.
    template <int rotation, class Store>
    DEVICE void chain(Place& at, int k_blocks, const TileSequence<C>& sequence, const Store& store) {
        if constexpr (!C::ahead) {
            if constexpr (C::pingpong) sequence.await();
            pipeline.wait_full(at);
            begin_chains<rotation>(at, false);
        }
        Place before = at;
#pragma unroll 1
        for (int left = k_blocks; left > 1; --left) {
            at.advance(1);
            pipeline.wait_full(at);
            begin_chains<rotation>(at, true);
            wgmma_wait<C::m_slices>();
            release(before);
            before = at;
        }
        if (C::pingpong && sequence.followed()) sequence.pass();
        // Wait for all products: while any is in flight, ptxas lets no sums be read.
        wgmma_wait<0>();
#pragma unroll
        for (int slice = 0; slice < C::m_slices; ++slice) registers_fence(sums[set_of(rotation, slice)]);
        release(before);
        at.advance(1);
        if constexpr (C::ahead) {
            constexpr int next = (rotation + 1) % C::rotations;
            if (sequence.followed()) pipeline.wait_full(at);
            begin(sums[set_of(next, 0)], at, 0, false);
            store(Constant<0>());
            begin(sums[set_of(next, 1)], at, 1, false);
            store(Constant<1>());
        } else {
            if constexpr (C::pingpong) at.skip(k_blocks);
            store(Constant<WHOLE>());
        }
    }

    // ---- sums that are promoted in fp32 every 128 of k

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
        for (int i = 0; i < C::sets * C::sums; ++i) sums[i / C::sums][i % C::sums] = 0.0f;
    }

    DEVICE void begin_promoted(const Place& at) {
        scales = await(at);
        begin(products, at, 0, false);
    }

    // Adds the scaled products of a k-block to a slice's sums. The `first_channels` have the weight's first scale.
    template <int first_channels>
    DEVICE void promote(float (&into)[C::sums], const float (&of_block)[C::sums], const float (&a)[2],
                        const Scales& scales, const Place& here) {
        const float of_first[2] = {a[0] * scales.first_b, a[1] * scales.first_b};
        const float of_second[2] = {a[0] * scales.second_b, a[1] * scales.second_b};
#pragma unroll
        for (int i = 0; i < C::sums; i += 4) {
            const int channel = i / 4 * 8;
            float2 b = {};
            if constexpr (C::scales == SCALES_GROUP)
                b = *(const float2*)(stage_scales[here.stage] + C::rows + channel + lane % 4 * 2);
#pragma unroll
            for (int j = i; j < i + 4; ++j) {
                const int half = j % 4 / 2;
                if constexpr (C::scales == SCALES_PROMOTED) into[j] += of_block[j];
                else if constexpr (C::scales == SCALES_GROUP)
                    into[j] = fma_flushing(a[half], (j % 2 ? b.y : b.x) * of_block[j], into[j]);
                else
                    into[j] =
                        fma_flushing(channel < first_channels ? of_first[half] : of_second[half], of_block[j], into[j]);
            }
        }
        registers_fence(into);  // all products are read before wgmma writes to their registers again
    }
    // Promotes complete products. Those of the last slice release the k-block, as soon as its scales are read.
    template <int first_channels, int slice>
    DEVICE void add(const float (&of_block)[C::sums], const Place& here, const Scales& of_here) {
        constexpr bool last = slice == C::m_slices - 1;
        if (last && C::scales != SCALES_GROUP) release(here);
        promote<first_channels>(sums[slice], of_block, of_here.a[slice], of_here, here);
        if (last && C::scales == SCALES_GROUP) release(here);
    }
    // The same for products after which PENDING groups were issued: waits for them first.
    template <int first_channels, int PENDING, int slice>
    DEVICE void finish(float (&of_block)[C::sums], const Place& here, const Scales& of_here) {
        end<PENDING>(of_block);
        add<first_channels, slice>(of_block, here, of_here);
    }

    // With one set of products: one warpgroup promotes while the other's products are multiplied. It waits for the next
    // k-block, and reads its scales, while the last products of this one are multiplied.
    template <int first_channels, bool last, class Store>
    DEVICE void alternate(Place& at, bool more, const Store& store) {
        const Place here = at;
        if constexpr (C::m_slices == 2) {
            finish<first_channels, 0, 0>(products, here, scales);
            begin(products, here, 1, false);
            if constexpr (last && C::ahead) store(Constant<0>());
        }
        at.advance(1);
        if constexpr (last && !C::ahead) {
            finish<first_channels, 0, C::m_slices - 1>(products, here, scales);
            store(Constant<WHOLE>());
        } else {
            Scales next = scales;
            const unsigned a = a_at(at, 0), w = weight_at(at);  // here, not where the next products would wait for them
            if (!last || more) next = await(at);
            finish<first_channels, 0, C::m_slices - 1>(products, here, scales);
            scales = next;
            begin(products, a, w, false);
            if constexpr (last) store(Constant<1>());
        }
    }
    template <int first_channels, class Store>
    DEVICE void alternating(Place& at, int k_blocks, bool more, const Store& store) {
        if constexpr (!C::ahead) begin_promoted(at);
#pragma unroll(C::scales == SCALES_GROUP ? 1 : seam_step == 16 ? 2 : 4)
        for (int left = k_blocks; left > 1; --left) alternate<first_channels, false>(at, true, store);
        alternate<first_channels, true>(at, more, store);
    }

    // With two sets of products, for one slice: the next products are multiplied while this warpgroup promotes, and the
    // other warpgroup's while it stores.
    template <int first_channels, class Store>
    DEVICE void overlapped(Place& at, int k_blocks, const Store& store) {
        float other[C::sums];
        const auto step = [&](float (&now)[C::sums], float (&then)[C::sums]) {
            const Place here = at;
            at.advance(1);
            const Scales next = await(at);
            begin(then, at, 0, false);
            finish<first_channels, 1, 0>(now, here, scales);
            scales = next;
        };
        begin_promoted(at);
        int left = k_blocks;
#pragma unroll 1
        for (; left > 2; left -= 2) {
            step(products, other);
            step(other, products);
        }
        if (left == 2) {
            step(products, other);
            finish<first_channels, 0, 0>(other, at, scales);
        } else {
            finish<first_channels, 0, 0>(products, at, scales);
        }
        at.advance(1);
        store(Constant<WHOLE>());
    }

    // Makes the channel at which the weight's scale changes a compile-time constant, so no sum has to choose.
    static constexpr bool one_scale = C::scales != SCALES_BLOCK || 128 % C::columns == 0;
    static constexpr int seam_step = one_scale              ? C::columns
                                     : C::columns % 64 == 0 ? 64
                                     : C::columns % 32 == 0 ? 32
                                                            : 16;
    template <int first_channels = seam_step, class Store>
    DEVICE void by_seam(int seam, Place& at, int k_blocks, bool more, const Store& store) {
        if constexpr (first_channels < 128 && first_channels < C::columns) {
            if (seam == first_channels) by_sets<first_channels>(at, k_blocks, more, store);
            else by_seam<first_channels + seam_step>(seam, at, k_blocks, more, store);
        } else {
            by_sets<first_channels>(at, k_blocks, more, store);
        }
    }
    template <int first_channels, class Store>
    DEVICE void by_sets(Place& at, int k_blocks, bool more, const Store& store) {
        if constexpr (C::overlapped) overlapped<first_channels>(at, k_blocks, store);
        else alternating<first_channels>(at, k_blocks, more, store);
    }

    // ---- a block's tiles

    // Issues the first products of the first tile, unless each tile issues its own.
    DEVICE void begin_tiles(const Place& at) {
        if constexpr (C::ahead && C::promoted) {
            begin_promoted(at);
        } else if constexpr (C::ahead) {
            pipeline.wait_full(at);
            begin_chains<0>(at, false);
        }
    }
    // Releases the k-blocks of a tile of which this warpgroup has no rows: its tensor core is the other's.
    DEVICE void skip(Place& at, int k_blocks) const {
#pragma unroll 1
        for (int left = k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_full(at);
            release(at);
        }
    }
    // Multiplies a tile, and calls store(Constant<slice>()) when a slice's sums are complete, or once for the WHOLE
    // tile. With C::ahead its first products are issued already, and those of the next tile are issued before it is
    // stored. After the last tile, whatever the ring holds is multiplied and not used: under a condition, ptxas would
    // wait for products where the branches join.
    template <int rotation, class Store>
    DEVICE void run(Place& at, int k_blocks, TileOrigin origin, const TileSequence<C>& sequence, const Store& store) {
        if constexpr (C::promoted) {
            clear();
            by_seam(128 - origin.column % 128, at, k_blocks, sequence.followed(), store);
        } else {
            chain<rotation>(at, k_blocks, sequence, store);
        }
    }
};
