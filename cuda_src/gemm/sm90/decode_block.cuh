// The setup of a block of sm90_decode or sm90_decode_rows, and the positions of its consumer warpgroups in the rings.
#pragma once
#include "decode_load.cuh"

// A block: its rank in the cluster, its rings, their barriers, its reduction buffer, and its k-blocks.
template <class C>
struct DecodeBlock {
    static constexpr int channels = C::tile * C::adjacent_tiles;

    int warp, lane;
    int rank, first;  // rank: among the blocks of its tile; first: the cluster rank of the tile's rank 0
    unsigned ring, a_ring;
    PipelineBarriers<C::stages> pipeline;
    PipelineBarriers<C::a_stages> a_pipeline;
    unsigned reduce_full, reduce_empty, a_requested;
    char* reduce_buf;
    KBlockIterator k_iter;

    // After a shuffle the compiler knows that `warp` is uniform, as blockIdx is, and computes descriptors once per
    // warp. Blocks that share loads of a make equally many iterations, the last of some on a tile past the end.
    DEVICE DecodeBlock(char* dynamic, int n, int k_blocks)
        : warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)),
          lane(threadIdx.x % 32),
          rank((int)blockIdx.x % C::split_k),
          first((int)blockIdx.x % C::cluster - rank),
          ring((kept_address(dynamic) + 1023) & ~1023u),
          a_ring(ring + C::stages * C::weight_bytes),
          pipeline{barriers()},
          a_pipeline{barriers() + 16 * C::stages},
          reduce_full(barriers() + 16 * (C::stages + C::a_stages)),
          reduce_empty(reduce_full + 8),
          a_requested(reduce_empty + 8),
          reduce_buf(dynamic + (ring - shared_address(dynamic)) + C::ring_bytes),
          k_iter((n + channels - 1) / channels * C::adjacent_tiles, k_blocks, rank, C::split_k) {}

    // The full and empty barriers of both rings, then reduce_full, reduce_empty, a_requested.
    DEVICE static unsigned barriers() {
        __shared__ alignas(8) word64 at[2 * C::stages + 2 * C::a_stages + 3];
        return kept_address(at);
    }
    DEVICE static StageScales<C>& stage_scales() {
        __shared__ StageScales<C> scales;
        return scales;
    }

    // Runs the producer warps and returns true in their threads, which are then done; returns false in the consumers.
    // `storing_warps` warps of each block of a tile release every reduction buffer.
    template <class Map>
    DEVICE bool loads(const Map* weight_map, const TensorMap* a_map, const ScaleGrid& of_a, const ScaleGrid& of_b,
                      const RowPanel& panel, int n, int storing_warps, int prefetch_weight) {
        if (warp == C::consumers / 32) {
            load_weight<C>(weight_map, ring, pipeline, a_requested, k_iter, prefetch_weight, lane);
            return true;
        }
        if (warp == C::consumers / 32 + 1) {
            load_a<C>(a_map, a_ring, a_pipeline, reduce_full, storing_warps * C::split_k, k_iter, rank,
                      first / C::split_k, panel, lane);
            return true;
        }
        threads_sync(1, C::threads);
        if (C::cluster > 1) cluster_arrive();
        if (!prefetch_weight) grid_dependency_wait();
        if (C::blockwise && warp == C::consumers / 32 + 2) {
            load_scales<C>(stage_scales(), a_pipeline, of_a, of_b, k_iter, panel.rows, n, lane);
            return true;
        }
        return false;
    }
};

// A consumer warpgroup's positions in both rings: of the k-block that it multiplies next, and of the oldest one whose
// products it has not promoted. Warpgroups of the same channels alternate over the k-blocks.
template <class C>
struct RingPositions {
    Ring<C::stages> next, oldest;
    Ring<C::a_stages> a_next, a_oldest;
    // As a_next, but starts again with each tile: for a ring that holds all k-blocks of a that the block multiplies.
    Ring<C::a_stages> a_resident;
    // k-blocks of a whose stages are loaded again. Others are not released: a multicast peer may have exited by then.
    int a_releases;

    DEVICE RingPositions(const KBlockIterator& k_iter, int k_warpgroup)
        : next(k_warpgroup), oldest(k_warpgroup), a_next(k_warpgroup), a_oldest(k_warpgroup), a_resident(k_warpgroup) {
        const int iterations = (k_iter.tiles - k_iter.tile + k_iter.step - 1) / k_iter.step;
        a_releases = iterations * k_iter.part.count - C::a_stages - k_warpgroup;
    }

    // Called by a warp when the products of the oldest k-block are complete: releases its stages, except those of rows
    // that the block itself quantized or aligned. A weight in registers keeps its stage until then, too: an arrival
    // right after its loads may overtake them, and TMA would overwrite data that they have yet to read. Once the
    // product is complete, its registers have been loaded.
    DEVICE void release(const DecodeBlock<C>& block) {
        __syncwarp();
        if (block.lane == 0) block.pipeline.release(oldest);
        if (C::streams_a && C::multicast_tiles == 1 && block.lane == 0) block.a_pipeline.release(a_oldest);
        if (!C::a_vectors && C::multicast_tiles > 1 && block.lane < C::multicast_tiles && a_releases > 0)
            remote_arrive(cluster_address(block.a_pipeline.empty(a_oldest), block.lane * C::split_k + block.rank));
        a_releases -= C::k_warpgroups;
        oldest.advance(C::k_warpgroups);
        a_oldest.advance(C::k_warpgroups);
    }
};
