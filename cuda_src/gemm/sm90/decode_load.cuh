// The producer warps of sm90_decode and sm90_decode_rows, which load the weight, a, and blocked scales. The first two
// initialize the barriers of their own rings.
//
// Every instruction before the first load adds to the latency of a launch: initialization by all lanes of a warp, or
// waits for barriers that were never used, cost 0.7 us.
#pragma once
#include "phases.cuh"
#include "../scheduler.cuh"

// The sizes that follow from a kernel's constants of compilation (its Config).
template <class Config>
struct DecodeLayout : Config {
    static_assert(Config::split_k * Config::multicast_tiles <= 8, "a portable cluster");
    static_assert(Config::multicast_tiles <= Config::width / 8, "the swizzle of a tile repeats every 8 rows");
    static_assert(Config::stages % Config::k_warpgroups == 0, "STAGES must be a multiple of K_WARPGROUPS");
    static_assert(Config::stages >= 2 * Config::k_warpgroups, "each warpgroup needs two stages");
    static_assert(Config::a_stages % Config::k_warpgroups == 0 || Config::a_vectors > 0,
                  "A_STAGES must be a multiple of K_WARPGROUPS");
    // Otherwise a block might complete no channels of a warpgroup, and nothing would keep the warpgroups that share
    // these channels in step.
    static_assert(Config::m_warpgroups == 1 || Config::k_warpgroups == 1 || Config::split_k == 1,
                  "at most two of M_WARPGROUPS, K_WARPGROUPS and SPLIT_K may exceed 1");
    static_assert(Config::scale_rows == 1 || Config::scale_rows == BLOCK_K, "scales of 1x128 or 128x128");

    static constexpr int tile = Config::warpgroup_channels * Config::m_warpgroups;
    static constexpr int warpgroups = Config::m_warpgroups * Config::k_warpgroups, consumers = warpgroups * 128;
    static constexpr int threads = consumers + 64 + 32 * Config::blockwise;
    using Tile = PhasedTile<Config::phases, Config::residues, tile>;
    static constexpr int weight_bytes = tile * Tile::Weight::COLUMNS, a_bytes = Config::width * BLOCK_K;  // of a stage
    static constexpr int ring_bytes = Config::stages * weight_bytes + Config::a_stages * a_bytes;
    static constexpr int units = tile / 8;                                         // of 8 channels, in a tile
    static constexpr int adjacent_tiles = Config::multicast_tiles * Tile::groups;  // tiles of neighbouring channels
    static constexpr int unit_bytes = 8 * Config::width * 4;
    // The accumulators of a thread.
    static constexpr int sums = Config::warpgroup_channels * Config::width / 128;
    // The weight's scales of a tile and k-block: one more if the tile can lie across their borders. The channels of a
    // tile are spread over `span` neighbours.
    static constexpr int span = Config::scale_rows > 1 ? tile * Tile::groups : tile;
    // Whether the channels of a warp's two units, unit_stride apart, share a scale of the weight.
    static constexpr bool halves_share_scale = Config::scale_rows >= 2 * Tile::unit_stride;
    static constexpr bool crosses_scales = span % Config::scale_rows && Config::scale_rows % span;
    static constexpr int weight_scales = (span + Config::scale_rows - 1) / Config::scale_rows + crosses_scales;
    // Of a k-block: the scales of a's rows, then the weight's.
    static constexpr int scales = Config::width + weight_scales;
    static constexpr int scale_lanes = scales < 32 ? scales : 32;
    // Whether codes of a, or scales, pass through the ring of a.
    static constexpr bool streams_a = Config::a_vectors == 0 || Config::blockwise;
    static constexpr int cluster = Config::split_k * Config::multicast_tiles;
    // The blocks of rank 0: every split_k-th block of the cluster.
    static constexpr int multicast_mask = ((1 << cluster) - 1) / ((1 << Config::split_k) - 1);
};

// The rows of a and of the result that a block makes, from `first` on, and how many rows it loads of a: also some past
// the last one where there are several panels, whose boxes are of equal size.
struct RowPanel {
    int first, rows, loaded;

    // All panels but the last have `most` rows.
    template <int most>
    DEVICE static RowPanel of(int m, int index, int count) {
        const int first = index * most;
        return {first, min(m - first, most), count > 1 ? most : m};
    }
};

// The scales of the k-blocks in the ring of a. Without blocked scales no kernel uses it.
template <class C>
struct alignas(8) StageScales {
    float of[C::blockwise ? C::a_stages : 1][C::blockwise ? (C::scales + 1) & ~1 : 2];
};

// Called by the producing thread when its ring is full for the first time: prefetches the next k-blocks of the weight
// into L2 until `empty`, the barrier of the oldest stage, completes. Memory would be idle until a has arrived.
template <class C>
DEVICE void prefetch_ahead(const TensorMap* map, KBlockIterator k_iter, unsigned empty) {
    for (int left = C::ahead_k_blocks; left > 0 && k_iter.more() && !barrier_passed(empty, 0); --left, k_iter.next())
        C::Tile::prefetch(map, k_iter.k_block * BLOCK_K, k_iter.tile);
}

// The warp that loads the weight; it also initializes the barrier `a_requested`. PREFETCH_K_BLOCKS limits the prefetch,
// because requests for a full ring would be queued in memory ahead of those for a, and ahead of those of the kernel
// that computes a.
template <class C, class Map>
DEVICE void load_weight(const Map* map, unsigned ring, const PipelineBarriers<C::stages>& pipeline,
                        unsigned a_requested, KBlockIterator& k_iter, int prefetch_weight, int lane) {
    Ring<C::stages> at(0);
    if (lane == 0) {
        C::Tile::prefetch(map, k_iter.tile);
        pipeline.init(1, 4 * C::m_warpgroups);
        if (C::prefetch_k_blocks) barrier_init(a_requested, 1);
        barrier_init_fence();
    }
    __syncwarp();
    threads_arrive(1, C::threads);
    if (C::cluster > 1) cluster_arrive();
    if (!prefetch_weight) {
        grid_dependency_wait();
        grid_dependency_launch();
    }
    if (C::elects ? elected() : lane == 0) {
        bool limited = C::prefetch_k_blocks > 0;
        for (int issued = 0; k_iter.more(); ++issued) {
            if constexpr (C::phases == 0 && C::ahead_k_blocks > 0)
                if (issued == C::stages && prefetch_weight) prefetch_ahead<C>(map, k_iter, pipeline.empty(at));
            pipeline.wait_empty(at);
            if (limited && issued >= C::prefetch_k_blocks) {
                limited = issued < C::stages;
                while (limited && !barrier_passed(pipeline.barriers + 8 * (issued - C::prefetch_k_blocks), 0))
                    limited = !barrier_passed(a_requested, 0);
            }
            barrier_expect(pipeline.full(at), C::weight_bytes);
            C::Tile::load(ring + at.stage * C::weight_bytes, map, k_iter.k_block * BLOCK_K, k_iter.tile,
                          pipeline.full(at));
            k_iter.next();
            at.advance(1);
        }
    }
    __syncwarp();
    if (C::cluster > 1) cluster_wait();
}

// The warp that loads a; it also initializes the reduction's barriers, reduce_full and reduce_empty (with `arrivals`),
// which a_requested follows.
//
// If the block writes the codes of a itself (a_vectors) it loads nothing; otherwise it loads the rows of its panel, or
// for multicast peers its share of all rows. It loads no more because TMA takes longer to fill a row with zeros than to
// load it; whatever the other rows of a stage contain reaches no row of the result.
template <class C>
DEVICE void load_a(const TensorMap* map, unsigned ring, const PipelineBarriers<C::a_stages>& pipeline,
                   unsigned reduce_full, int arrivals, KBlockIterator& k_iter, int rank, int multicast_rank,
                   const RowPanel& panel, int lane) {
    if (lane == 0) {
        if (!C::a_vectors) {
            map_prefetch(map);
        }
        if (C::streams_a)
            pipeline.init((C::a_vectors == 0) + C::blockwise * C::scale_lanes,
                          4 * C::m_warpgroups * C::multicast_tiles);
        barrier_init(reduce_full, 1);  // one thread arrives and sets the bytes that the other blocks send
        barrier_init(reduce_full + 8, arrivals);
        barrier_init_fence();
    }
    __syncwarp();
    C::prefetch_k_blocks ? threads_sync(1, C::threads) : threads_arrive(1, C::threads);
    if (C::cluster > 1) cluster_arrive();
    if (C::multicast_tiles > 1) cluster_wait();  // the peers have initialized their barriers
    if (!C::a_vectors) {
        grid_dependency_wait();
        if (elected()) {
            if (C::prefetch_k_blocks) barrier_arrive(reduce_full + 16);
            const int row = multicast_rank * (C::width / C::multicast_tiles);
            const int bytes = C::multicast_tiles > 1 ? C::a_bytes : panel.loaded * BLOCK_K;
            for (Ring<C::a_stages> at(0); k_iter.more(); k_iter.next(), at.advance(1)) {
                pipeline.wait_empty(at);
                barrier_expect(pipeline.full(at), bytes);
                const unsigned to = ring + at.stage * C::a_bytes + row * BLOCK_K;
                if (C::multicast_tiles > 1)
                    tile_load_shared(to, map, k_iter.k_block * BLOCK_K, row, pipeline.full(at),
                                     C::multicast_mask << rank);
                else tile_load(to, map, k_iter.k_block * BLOCK_K, panel.first, pipeline.full(at));
            }
        }
    }
    __syncwarp();
    if (C::cluster > 1 && C::multicast_tiles == 1) cluster_wait();
}

// The warp that loads blocked scales: for each k-block those of a's rows, then those of the weight.
template <class C>
DEVICE void load_scales(StageScales<C>& stage_scales, const PipelineBarriers<C::a_stages>& pipeline,
                        const ScaleGrid& of_a, const ScaleGrid& of_b, KBlockIterator& k_iter, int m, int n, int lane) {
    Ring<C::a_stages> at(0);
    for (bool waited = false; lane < C::scale_lanes && k_iter.more(); k_iter.tile += k_iter.step) {
        constexpr int words = (C::scales + 31) / 32;  // scales per lane
        const float* from[words];
        long long step[words];  // to the next k-block
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = lane + 32 * i, ordinal = place - C::width;
            const int channel =
                min(C::scale_rows > 1 ? k_iter.tile / C::Tile::groups * C::span + ordinal * C::scale_rows
                                      : C::Tile::channel(k_iter.tile, ordinal),
                    n - 1);
            from[i] = place < C::width ? of_a.scales + min(place, m - 1) * of_a.row
                                       : of_b.scales + channel / C::scale_rows * of_b.row;
            step[i] = place < C::width ? of_a.col : of_b.col;
            from[i] += k_iter.part.first * step[i];
        }
        if (!waited) grid_dependency_wait();
        waited = true;
        for (int left = k_iter.part.count; left > 0; --left, at.advance(1)) {
            pipeline.wait_empty(at);
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const int place = lane + 32 * i;
                if (place < C::scales) cp_async_word(shared_address(&stage_scales.of[at.stage][place]), from[i]);
                from[i] += step[i];
            }
            cp_async_arrive(pipeline.full(at));
        }
    }
    cp_async_wait_all();
    if (C::cluster > 1) cluster_wait();
}
