// Few tiles: the SPLIT_K blocks of a cluster share one, each with a part of its k-blocks. Each completes the rows of as
// many of its warps: the other blocks store their sums of these rows into its shared memory (DSMEM), and it adds them
// in pairs of ranks, (0 + 1) + (2 + 3). Whichever block adds gets the same bits, so equal rows have equal bits in any
// place of a tile: those that two tiles have, too.
#pragma once
#include "../../ptx/shared.cuh"
#include "tiled_layout.cuh"

// Adds up a warp's sums of a tile.
template <class C>
struct SplitSums {
    static constexpr int own_warps = 4 / C::split_k;  // of a warpgroup: the warps whose rows a block completes
    static constexpr int packets = C::sums / 4;       // of a thread
    static constexpr int warp_bytes = 32 * C::sums * 4;
    // What a block receives: the sums of its rows from all other blocks.
    static constexpr int bytes = (C::split_k - 1) * C::groups * own_warps * warp_bytes;
    static_assert(4 % C::split_k == 0, "a block completes the rows of whole warps");

    int rank, group, warp, lane;
    unsigned buffer, full;  // full: the barrier of what is received

    DEVICE unsigned slot(int from, int to) const {
        const int place = (from ^ to) - 1;
        return buffer + ((place * C::groups + group) * own_warps + warp % own_warps) * warp_bytes + lane * 16;
    }
    DEVICE float4 received(int from, int packet) const {
        const Vector16 sums = shared_load16(slot(from, rank) + packet * 512);
        return make_float4(float_of(sums.x), float_of(sums.y), float_of(sums.z), float_of(sums.w));
    }
    // Returns whether this block completes the warp's rows; then `sums` are those of all blocks.
    DEVICE bool reduce(float (&sums)[C::sums]) const {
        const int owner = warp / own_warps;
        if (owner != rank) {
            const unsigned to = cluster_address(slot(rank, owner), owner), barrier = cluster_address(full, owner);
#pragma unroll
            for (int i = 0; i < packets; ++i)
                remote_store(to + i * 512, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]),
                             barrier);
            return false;
        }
        barrier_wait(full, 0);
#pragma unroll 1
        for (int apart = 1; apart < C::split_k; apart *= 2) {  // of ranks; unrolled, it spills
#pragma unroll
            for (int i = 0; i < packets; ++i) {
                float4 others = received(rank ^ apart, i);
                if (apart == 2) {
                    const float4 last = received(rank ^ 3, i);
                    others = make_float4(others.x + last.x, others.y + last.y, others.z + last.z, others.w + last.w);
                }
                sums[4 * i] += others.x;
                sums[4 * i + 1] += others.y;
                sums[4 * i + 2] += others.z;
                sums[4 * i + 3] += others.w;
            }
        }
        return true;
    }
};
