// The producer warps of a block, which load the weight, a, and blocked scales. Each initializes its own ring's
// barriers.
//
// Instructions before the first load add to the latency of a launch: initialization by all lanes of a warp, or waits
// for barriers that were never used, cost 0.7 us.
#pragma once
#include "../pipeline.cuh"

#define BLOCK_K 128
#define TILE (64 * M_WARPGROUPS)
#define WARPGROUPS (M_WARPGROUPS * K_WARPGROUPS)
#define CONSUMERS (WARPGROUPS * 128)
#define THREADS (CONSUMERS + 64 + 32 * BLOCKWISE)
#define WEIGHT_BYTES (TILE * BLOCK_K)
#define A_BYTES (WIDTH * BLOCK_K)
#define RING_BYTES (STAGES * WEIGHT_BYTES + A_STAGES * A_BYTES)
#define UNITS (8 * M_WARPGROUPS) // of 8 channels, in a tile
#define SCALES (WIDTH + (SCALE_ROWS == 1 ? TILE : (TILE + 127) / 128)) // of a chunk: a's rows, then the weight's
#define SCALE_LANES (SCALES < 32 ? SCALES : 32)
#define CLUSTER (SPLIT_K * MULTICAST_TILES)
#define MULTICAST_MASK (((1 << CLUSTER) - 1) / ((1 << SPLIT_K) - 1)) // every SPLIT_K-th of a cluster: those of rank 0

// One warp, which also initializes the barrier `a_requested`. The prefetch is limited because a full ring, requested at
// once, would be ahead of a in the memory's queue, and ahead of what a is made of.
DEVICE void load_weight(const TensorMap *map, unsigned ring, const PipelineBarriers<STAGES> &pipeline,
                        unsigned a_requested, KBlockIterator &k_iter, int prefetch_weight, int lane) {
    Ring<STAGES> at(0);
    if (lane == 0) {
        map_prefetch(map);
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(pipeline.barriers + 8 * i, 1);
            barrier_init(pipeline.barriers + 8 * (STAGES + i), 4 * M_WARPGROUPS);
        }
        if (PREFETCH_CHUNKS) barrier_init(a_requested, 1);
        barrier_init_fence();
    }
    __syncwarp();
    threads_arrive(1, THREADS);
    if (CLUSTER > 1) cluster_arrive();
    if (!prefetch_weight) {
        grid_dependency_wait();
        grid_dependency_launch();
    }
    if (lane == 0) {
        bool limited = PREFETCH_CHUNKS > 0;
        for (int issued = 0; k_iter.more(); ++issued) {
            pipeline.wait_empty(at);
            if (limited && issued >= PREFETCH_CHUNKS) {
                limited = issued < STAGES;
                while (limited && !barrier_passed(pipeline.barriers + 8 * (issued - PREFETCH_CHUNKS), 0))
                    limited = !barrier_passed(a_requested, 0);
            }
            barrier_expect(pipeline.full(at), WEIGHT_BYTES);
            tile_load_once(ring + at.stage * WEIGHT_BYTES, map, k_iter.k_block * BLOCK_K, k_iter.tile * TILE,
                           pipeline.full(at));
            k_iter.next();
            at.advance(1);
        }
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
}

// One warp, which also initializes the reduction's barriers: reduce_full, reduce_empty of so many `arrivals`, and
// a_requested after them.
// Where the block quantizes a itself (A_VECTORS) it loads nothing, else some rows of each chunk for all multicast
// peers.
DEVICE void load_a(const TensorMap *map, unsigned ring, const PipelineBarriers<A_STAGES> &pipeline,
                   unsigned reduce_full, int arrivals, KBlockIterator &k_iter, int rank, int multicast_rank, int lane) {
    if (lane == 0) {
        if (!A_VECTORS) {
            map_prefetch(map);
#pragma unroll
            for (int i = 0; i < A_STAGES; ++i) {
                barrier_init(pipeline.barriers + 8 * i, 1 + BLOCKWISE * SCALE_LANES);
                barrier_init(pipeline.barriers + 8 * (A_STAGES + i), 4 * M_WARPGROUPS * MULTICAST_TILES);
            }
        }
        barrier_init(reduce_full, 1); // the others' bytes, announced
        barrier_init(reduce_full + 8, arrivals);
        barrier_init_fence();
    }
    __syncwarp();
    PREFETCH_CHUNKS ? threads_sync(1, THREADS) : threads_arrive(1, THREADS);
    if (CLUSTER > 1) cluster_arrive();
    if (MULTICAST_TILES > 1) cluster_wait(); // they have initialized their barriers
    if (!A_VECTORS) {
        grid_dependency_wait();
        if (lane == 0) {
            if (PREFETCH_CHUNKS) barrier_arrive(reduce_full + 16);
            const int row = multicast_rank * (WIDTH / MULTICAST_TILES);
            for (Ring<A_STAGES> at(0); k_iter.more(); k_iter.next(), at.advance(1)) {
                pipeline.wait_empty(at);
                barrier_expect(pipeline.full(at), A_BYTES);
                const unsigned to = ring + at.stage * A_BYTES + row * BLOCK_K;
                if (MULTICAST_TILES > 1)
                    tile_load_shared(to, map, k_iter.k_block * BLOCK_K, row, pipeline.full(at), MULTICAST_MASK << rank);
                else
                    tile_load(to, map, k_iter.k_block * BLOCK_K, 0, pipeline.full(at));
            }
        }
    }
    __syncwarp();
    if (CLUSTER > 1 && MULTICAST_TILES == 1) cluster_wait();
}

#if BLOCKWISE
// A warp: the scales of a chunk beside its part of a, a's rows first, then the weight's.
DEVICE void load_scales(float (&stage_scales)[A_STAGES][(SCALES + 1) & ~1], const PipelineBarriers<A_STAGES> &pipeline,
                         const ScaleGrid &of_a, const ScaleGrid &of_b, KBlockIterator &k_iter, int m, int n, int lane) {
    grid_dependency_wait();
    Ring<A_STAGES> at(0);
    for (; lane < SCALE_LANES && k_iter.more(); k_iter.tile += k_iter.step) {
        constexpr int words = (SCALES + 31) / 32; // of a lane
        const float *from[words];
        long long step[words]; // to the next chunk
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = lane + 32 * i, channel = min(k_iter.tile * TILE + (place - WIDTH) * SCALE_ROWS, n - 1);
            from[i] = place < WIDTH ? of_a.scales + min(place, m - 1) * of_a.row
                                    : of_b.scales + channel / SCALE_ROWS * of_b.row;
            step[i] = place < WIDTH ? of_a.col : of_b.col;
            from[i] += k_iter.first_k_block * step[i];
        }
        for (int left = k_iter.k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_empty(at);
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const int place = lane + 32 * i;
                if (place < SCALES) word_copy(shared_address(&stage_scales[at.stage][place]), from[i]);
                from[i] += step[i];
            }
            words_arrive(pipeline.full(at));
        }
    }
    words_wait();
    if (CLUSTER > 1) cluster_wait();
}
#endif
