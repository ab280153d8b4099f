// The warps of a block that fetch: the weight, a, and blocked scales. Who fetches makes his own ring's barriers.
//
// What comes before the first load is what a launch costs: initialisations by the lanes of a warp, or asking barriers
// that nobody has used yet, made it 0.7 us more.
#pragma once
#include "../pipeline.cuh"

#define BLOCK_K 128
#define TILE (64 * M_WARPGROUPS)
#define GROUPS (M_WARPGROUPS * K_WARPGROUPS)
#define CONSUMERS (GROUPS * 128)
#define THREADS (CONSUMERS + 64 + 32 * BLOCKWISE)
#define WEIGHT_BYTES (TILE * BLOCK_K)
#define A_BYTES (WIDTH * BLOCK_K)
#define RING_BYTES (STAGES * WEIGHT_BYTES + A_STAGES * A_BYTES)
#define UNITS (8 * M_WARPGROUPS) // of 8 channels, in a tile
#define SCALES (WIDTH + (SCALE_ROWS == 1 ? TILE : (TILE + 127) / 128)) // of a chunk: a's rows, then the weight's
#define SCALE_LANES (SCALES < 32 ? SCALES : 32)
#define CLUSTER (SPLIT_K * MULTICAST_TILES)
#define MULTICAST_MASK (((1 << CLUSTER) - 1) / ((1 << SPLIT_K) - 1)) // every SPLIT_K-th of a cluster: those of rank 0

// A warp, which also makes the barrier `a_asked`. Pacing: a full ring asked for at once would stand in the memory's
// queue before a, and before what a is made of.
DEVICE void fetch_weight(const TensorMap *map, unsigned ring, const PipelineBarriers<STAGES> &gate, unsigned a_asked, KBlockIterator &walk,
                         int prefetch_weight, int lane) {
    Ring<STAGES> at(0);
    if (lane == 0) {
        map_prefetch(map);
#pragma unroll
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(gate.barriers + 8 * i, 1);
            barrier_init(gate.barriers + 8 * (STAGES + i), 4 * M_WARPGROUPS);
        }
        if (PREFETCH_CHUNKS) barrier_init(a_asked, 1);
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
        bool paced = PREFETCH_CHUNKS > 0;
        for (int asked = 0; walk.more(); ++asked) {
            gate.wait_empty(at);
            if (paced && asked >= PREFETCH_CHUNKS) {
                paced = asked < STAGES;
                while (paced && !barrier_passed(gate.barriers + 8 * (asked - PREFETCH_CHUNKS), 0))
                    paced = !barrier_passed(a_asked, 0);
            }
            barrier_expect(gate.full(at), WEIGHT_BYTES);
            tile_load_once(ring + at.stage * WEIGHT_BYTES, map, walk.chunk * BLOCK_K, walk.tile * TILE, gate.full(at));
            walk.next();
            at.advance(1);
        }
    }
    __syncwarp();
    if (CLUSTER > 1) cluster_wait();
}

// A warp, which also makes the exchange's barriers: slots_full, slots_empty of so many `arrivals`, a_asked, in a row.
// Where the block quantizes a itself (A_VECTORS) it fetches nothing, else some rows of each chunk for all of its mates.
DEVICE void fetch_a(const TensorMap *map, unsigned ring, const PipelineBarriers<A_STAGES> &gate, unsigned slots_full, int arrivals,
                    KBlockIterator &walk, int rank, int mate, int lane) {
    if (lane == 0) {
        if (!A_VECTORS) {
            map_prefetch(map);
#pragma unroll
            for (int i = 0; i < A_STAGES; ++i) {
                barrier_init(gate.barriers + 8 * i, 1 + BLOCKWISE * SCALE_LANES);
                barrier_init(gate.barriers + 8 * (A_STAGES + i), 4 * M_WARPGROUPS * MULTICAST_TILES);
            }
        }
        barrier_init(slots_full, 1); // the others' bytes, announced
        barrier_init(slots_full + 8, arrivals);
        barrier_init_fence();
    }
    __syncwarp();
    PREFETCH_CHUNKS ? threads_sync(1, THREADS) : threads_arrive(1, THREADS);
    if (CLUSTER > 1) cluster_arrive();
    if (MULTICAST_TILES > 1) cluster_wait(); // they have made their barriers
    if (!A_VECTORS) {
        grid_dependency_wait();
        if (lane == 0) {
            if (PREFETCH_CHUNKS) barrier_arrive(slots_full + 16);
            const int row = mate * (WIDTH / MULTICAST_TILES);
            for (Ring<A_STAGES> at(0); walk.more(); walk.next(), at.advance(1)) {
                gate.wait_empty(at);
                barrier_expect(gate.full(at), A_BYTES);
                const unsigned to = ring + at.stage * A_BYTES + row * BLOCK_K;
                if (MULTICAST_TILES > 1)
                    tile_load_shared(to, map, walk.chunk * BLOCK_K, row, gate.full(at), MULTICAST_MASK << rank);
                else
                    tile_load(to, map, walk.chunk * BLOCK_K, 0, gate.full(at));
            }
        }
    }
    __syncwarp();
    if (CLUSTER > 1 && MULTICAST_TILES == 1) cluster_wait();
}

#if BLOCKWISE
// A warp: the scales of a chunk beside its part of a, a's rows first, then the weight's.
DEVICE void fetch_scales(float (&stage_scales)[A_STAGES][(SCALES + 1) & ~1], const PipelineBarriers<A_STAGES> &gate,
                         const ScaleGrid &of_a, const ScaleGrid &of_b, KBlockIterator &walk, int m, int n, int lane) {
    grid_dependency_wait();
    Ring<A_STAGES> at(0);
    for (; lane < SCALE_LANES && walk.more(); walk.tile += walk.step) {
        constexpr int words = (SCALES + 31) / 32; // of a lane
        const float *from[words];
        long long step[words]; // to the next chunk
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = lane + 32 * i, channel = min(walk.tile * TILE + (place - WIDTH) * SCALE_ROWS, n - 1);
            from[i] = place < WIDTH ? of_a.scales + min(place, m - 1) * of_a.row
                                    : of_b.scales + channel / SCALE_ROWS * of_b.row;
            step[i] = place < WIDTH ? of_a.col : of_b.col;
            from[i] += walk.first_chunk * step[i];
        }
        for (int left = walk.chunks; left > 0; --left, at.advance(1)) {
            gate.wait_empty(at);
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const int place = lane + 32 * i;
                if (place < SCALES) word_copy(shared_address(&stage_scales[at.stage][place]), from[i]);
                from[i] += step[i];
            }
            words_arrive(gate.full(at));
        }
    }
    words_wait();
    if (CLUSTER > 1) cluster_wait();
}
#endif
