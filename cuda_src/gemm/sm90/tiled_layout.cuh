// The sizes that follow from sm90_tiled's constants of compilation, and its producer warps.
#pragma once
#include "../pipeline.cuh"
#include "../grouped_tiles.cuh"
#include "../../ptx/cluster.cuh"

// How the scales of a product enter. If they do not change along k, wgmma accumulates over all of k (CHAIN), or every
// k-block is promoted (PROMOTED). If those of a are 1x128, those of the weight are 128x128 (BLOCK) or 1x128 (GROUP).
constexpr int SCALES_CHAIN = 0, SCALES_PROMOTED = 1, SCALES_BLOCK = 2, SCALES_GROUP = 3;

// A compile-time number as a function argument.
template <int n>
struct Constant {
    static constexpr int value = n;
};

// The scheduler: of one product, or of groups with a table of this capacity.
template <int capacity, class Persistent, int rows, int columns, int row_group, int multiple, int cluster>
struct SchedulerOf {
    using Tiles = GroupedTiles<rows, columns, row_group, capacity, multiple, cluster>;
    using Origin = GroupTile;
};
template <class Persistent, int rows, int columns, int row_group, int multiple, int cluster>
struct SchedulerOf<0, Persistent, rows, columns, row_group, multiple, cluster> {
    using Tiles = Persistent;
    using Origin = TileOrigin;
};

// Config of tiled_constants.cuh, and what follows from it.
template <class Config>
struct TiledLayout : Config {
    static constexpr int groups_per_tile =
        Config::pingpong ? 1 : Config::groups;                            // warpgroups that make a tile together
    static constexpr int rows = 64 * groups_per_tile * Config::m_slices;  // of a tile
    static constexpr int math_warps = 4 * groups_per_tile;                // of a tile
    static constexpr int threads = 128 + 128 * Config::groups;
    static constexpr int a_bytes = rows * BLOCK_K, weight_bytes = Config::columns * BLOCK_K;  // of a stage
    static constexpr int ahead_k_blocks = (64 << 10) / weight_bytes;  // of the weight, prefetched into L2
    static constexpr int sums = Config::columns / 2;                  // of a thread, in 64 rows of a tile
    // Whether a warpgroup has two sets of products: if registers hold them beside the sums (and 1x128 scales of the
    // weight), and if overlapping the next products gains more than it slows the promotion of the last.
    static constexpr int min_overlapped_columns = Config::scales == SCALES_GROUP ? 0 : Config::groups == 2 ? 128 : 96;
    static constexpr int max_overlapped_columns = Config::scales == SCALES_GROUP && Config::groups == 2 ? 96 : 128;
    static constexpr bool overlapped = Config::m_slices == 1 && Config::groups < 3 &&
                                       Config::columns >= min_overlapped_columns &&
                                       Config::columns <= max_overlapped_columns;
    static constexpr bool along_k = Config::scales >= SCALES_BLOCK, promoted = Config::scales != SCALES_CHAIN;
    // Whether the next tile's first products are issued before a tile is stored: if a warpgroup has two slices, it
    // stores one while the other is multiplied. Promoted products have registers apart from the sums; chains need a set
    // of sums that the tile does not use. Whether there is room depends on what else a thread holds. (With a GELU,
    // chains wait for each other: 30 % slower where it was measured.)
    static constexpr bool ahead =
        Config::m_slices == 2 && !Config::accumulates && !Config::pingpong &&
        (promoted ? Config::scales != SCALES_GROUP
                  : Config::amax == 0 && (Config::activation == 0 || Config::activation == SILU));
    // Sets of sums of a thread, each for 64 rows. Promoted sums keep their sets; chains rotate: the next tile's first
    // slice begins in the set that this tile does not use.
    static constexpr int sets = Config::m_slices + (ahead && !promoted);
    static constexpr int rotations = ahead && !promoted ? sets : 1;  // tiles after which each slice is in its set again
    // Whether a separate thread loads the scales of a: if a k-block takes hardly longer than issuing its loads.
    static constexpr bool separate_scale_thread = Config::scale_tiles && Config::groups == 1;
    static constexpr int scale_rows = Config::scales == SCALES_GROUP ? 1 : BLOCK_K;
    // Scales of a k-block: of a's rows, then of the weight; of 128x128 scales a tile can have two.
    static constexpr int stage_scales = along_k ? rows + (scale_rows == 1 ? Config::columns : 32) : 1;
    static constexpr int vector_threads = 64;
    // Arrivals at a k-block's full barrier: of the threads that load the operands, and of those that load its scales.
    static constexpr int full_arrivals = 2 + (!along_k ? 0 : Config::scale_tiles ? 1 : vector_threads);
    // The vectors of a tile: scales of its rows, scales of its channels, and the bias.
    static constexpr int channel_scales_at = rows, bias_at = along_k ? 0 : rows + Config::columns;
    static constexpr int vectors = bias_at + (Config::bias_type >= 0 ? Config::columns : along_k ? 1 : 0);
    // Registers of a thread: together as many as a multiprocessor has. Loading scales one by one, or those of a part of
    // k, takes more than 40.
    static constexpr bool loads_more = along_k && (!Config::scale_tiles || Config::split_k > 1);
    static constexpr int loader_registers = loads_more ? 56 : 40;
    static constexpr int math_registers = Config::groups == 3 ? 152 : loads_more ? 224 : 232;

    // The results of a slice are staged in pieces of piece_bytes per row, which is a swizzle width of TMA.
    static constexpr int element_bytes = Config::out_type == FLOAT32 ? 4 : Config::out_type > BFLOAT16 ? 1 : 2;
    static constexpr int row_bytes = Config::columns * element_bytes;
    static constexpr int piece_bytes = row_bytes % 128 == 0 ? 128 : row_bytes % 64 == 0 ? 64 : 32;
    static constexpr int piece_columns = piece_bytes / element_bytes, pieces = row_bytes / piece_bytes;  // of a slice
    static constexpr int buffer_bytes = 64 * piece_bytes;
    static_assert(Config::m_slices * pieces % Config::buffers == 0, "BUFFERS must divide the pieces of a tile");
    static_assert(row_bytes % 32 == 0, "whole pieces of a row");
    static constexpr int row_group = 32 / (rows / 64);
    static constexpr bool grouped = Config::group_table > 0;
    // Whether a warpgroup skips tiles of which it has no rows: most groups have such tiles.
    static constexpr bool skips = grouped && Config::groups > 1;
    using Persistent =
        PersistentTiles<rows, Config::columns, row_group, Config::accumulates, Config::cluster, Config::split_k>;
    static constexpr int multiple = Config::scale_tiles ? 4 : 1;  // TMA loads words from multiples of 16 bytes on
    using Scheduler =
        SchedulerOf<Config::group_table, Persistent, rows, Config::columns, row_group, multiple, Config::cluster>;
    using Tiles = typename Scheduler::Tiles;
    using Origin = typename Scheduler::Origin;  // of a tile
    static_assert(!grouped || (Config::split_k == 1 && Config::m_slices == 1 && !Config::pingpong &&
                               !Config::accumulates && !Config::amax && Config::out_type <= BFLOAT16),
                  "grouped: a block makes whole tiles of one slice each, of which there may be none");
    static_assert(!Config::pingpong || (Config::groups == 2 && Config::cluster == 1 && !promoted),
                  "ping-pong: two warpgroups, chains of sums, no clusters");
    static_assert(Config::split_k == 1 ||
                      (Config::m_slices == 1 && !Config::pingpong && Config::cluster == 1 && !Config::accumulates),
                  "split: one slice, no other clusters, and a result that is not added to");
};

// What a tile needs of the weight: its first row, its scales and its bias; in a grouped product, of its group.
template <class Tiles>
DEVICE int weight_row(const Tiles&, TileOrigin origin) {
    return origin.column;
}
template <class Tiles>
DEVICE ScaleGrid weight_scales_of(const Tiles&, TileOrigin, const ScaleGrid& all) {
    return all;
}
template <class Tiles, class Epilogue>
DEVICE Epilogue epilogue_of(const Tiles&, TileOrigin, const Epilogue& all) {
    return all;
}
template <class Tiles>
DEVICE int weight_row(const Tiles& tiles, GroupTile origin) {
    return origin.group * tiles.n + origin.column;
}
template <class Tiles>
DEVICE ScaleGrid weight_scales_of(const Tiles& tiles, GroupTile origin, const ScaleGrid& all) {
    return {all.scales + origin.group * tiles.scale_stride, all.row, all.col};
}
template <class Tiles, int out_type, int bias_type>
DEVICE Epilogue<out_type, bias_type> epilogue_of(const Tiles& tiles, GroupTile origin,
                                                 const Epilogue<out_type, bias_type>& all) {
    return {bias_from<bias_type>(all.bias, origin.group * tiles.bias_stride), nullptr};
}

// Called by one thread: loads the scales of a tile's rows for a k-block.
template <class C>
DEVICE void load_scale_tile(const TensorMap* map, unsigned stage_scales, const PipelineBarriers<C::stages>& pipeline,
                            const Ring<C::stages>& at, int row, int k_block) {
    tile_load(stage_scales + at.stage * (4 * C::stage_scales), map, row, k_block, pipeline.full(at));
}

// The same for all k-blocks of a tile, by a thread that does nothing else.
template <class C>
DEVICE void load_scale_tiles(const TensorMap* map, unsigned stage_scales, const PipelineBarriers<C::stages>& pipeline,
                             Ring<C::stages>& at, int row, const KPart& k) {
#pragma unroll 1
    for (int k_block = k.first; k_block < k.first + k.count; ++k_block, at.advance(1)) {
        pipeline.wait_empty(at);
        load_scale_tile<C>(map, stage_scales, pipeline, at, row, k_block);
    }
}

// Called by the producing thread when its ring is full for the first time: prefetches the next k-blocks of the weight
// into L2, unless `empty`, the barrier of the oldest stage, is complete. Memory would be idle until a has arrived.
template <class C>
DEVICE void prefetch_ahead(const TensorMap* map, int k_block, int k_blocks, int row, unsigned empty) {
    if (barrier_passed(empty, 0)) return;
    for (int end = min_int(k_blocks, k_block + C::ahead_k_blocks); k_block < end; ++k_block)
        tile_prefetch(map, k_block * BLOCK_K, row);
}

// Called by one thread: loads the tiles of one operand, `rows` rows into each stage of `bytes`. With those of a it
// also loads their scales if TMA does that, or, with separate_scale_thread, only expects their bytes. The blocks of a
// cluster each load a part of the rows that they share (of the weight; of a, if grouped), and multicast it to all of
// them. Peers release a block's stages by arriving at its barriers: the block may exit only when it has seen the last
// release of every stage. (A relaxed barrier of the cluster would not do: it may overtake the arrivals.)
template <class C, int bytes, bool of_weight>
DEVICE void load_tiles(const TensorMap* map, unsigned ring, const TensorMap* scale_map, unsigned stage_scales,
                       const PipelineBarriers<C::stages>& pipeline, typename C::Tiles tiles, typename C::Origin origin,
                       const KPart& k, int rows, word64 policy) {
    constexpr bool scales = !of_weight && C::scale_tiles, shared = C::cluster > 1 && of_weight != C::grouped;
    const int part = shared ? rows / C::cluster * tiles.rank() : 0;
    ring += part * BLOCK_K;
    [[maybe_unused]] int full_at = C::stages;  // the k-block of the first tile at which the ring is full
    Ring<C::stages> at(0);
    for (; tiles.more(); tiles.next(), origin = tiles.origin(), full_at = -1) {
        const int row = (of_weight ? weight_row(tiles, origin) : origin.row) + part;
#pragma unroll 1
        for (int i = 0; i < k.count; ++i, at.advance(1)) {
            const int k_block = k.first + i;
            if constexpr (of_weight)
                if (i == full_at) prefetch_ahead<C>(map, k_block, k.first + k.count, row, pipeline.empty(at));
            pipeline.wait_empty(at);
            const unsigned full = pipeline.full(at), to = ring + at.stage * bytes;
            barrier_expect(full, rows * BLOCK_K + (scales ? 4 * C::rows : 0));
            if constexpr (shared)
                tile_load_shared(to, map, k_block * BLOCK_K, row, full, (1 << C::cluster) - 1, policy);
            else tile_load(to, map, k_block * BLOCK_K, row, full, policy);
            if constexpr (scales && !C::separate_scale_thread)
                load_scale_tile<C>(scale_map, stage_scales, pipeline, at, origin.row, k_block);
        }
    }
    if constexpr (shared)
        for (int i = 0; i < C::stages; ++i, at.advance(1)) pipeline.wait_empty(at);
}

// For a warp, if TMA loads the scales of a: loads those of the weight, for 32 k-blocks at a time, one per lane, while
// the 32 before are used.
template <class C>
struct WeightScales {
    using Stages = float[C::stages][C::stage_scales];
    using Origin = typename C::Origin;
    const typename C::Tiles& tiles;
    ScaleGrid all;
    int n, k_blocks, lane;
    float2 next;  // the lane's scales for the next 32 k-blocks

    DEVICE WeightScales(const typename C::Tiles& tiles, const ScaleGrid& all, Origin origin, int n, int k_blocks,
                        int lane)
        : tiles(tiles), all(all), n(n), k_blocks(k_blocks), lane(lane), next() {
        load(origin, lane);
    }
    DEVICE void load(Origin origin, int k_block) {
        if (k_block >= k_blocks) return;
        const int column = origin.column;
        const ScaleGrid of_b = weight_scales_of(tiles, origin, all);
        const float* const from = of_b.scales + k_block * of_b.col;
        next =
            make_float2(from[column / BLOCK_K * of_b.row], from[min_int(column + BLOCK_K, n - 1) / BLOCK_K * of_b.row]);
    }
    // Stores the scales of a tile's k-blocks, and begins to load those of the next tile.
    DEVICE void store(Stages& stage_scales, const PipelineBarriers<C::stages>& pipeline, Ring<C::stages>& at,
                      Origin origin, Origin after) {
#pragma unroll 1
        for (int first = 0; first < k_blocks; first += 32) {
            const float2 scales = next;
            const bool ends = first + 32 >= k_blocks;
            load(ends ? after : origin, ends ? lane : first + 32 + lane);
            const int end = min_int(k_blocks - first, 32);
#pragma unroll 1
            for (int i = 0; i < end; ++i, at.advance(1)) {
                pipeline.wait_empty(at);
                __syncwarp();  // else the stage could be filled and freed again before every lane has seen it free
                if (lane == i) {
                    *(float2*)(stage_scales[at.stage] + C::rows) = scales;
                    barrier_arrive(pipeline.full(at));
                }
            }
        }
    }
};

// The elements of a vector that one of `threads` threads loads.
template <int length, int threads>
struct VectorPart {
    static constexpr int count = (length + threads - 1) / threads;
    float values[count];

    DEVICE static bool has(int place) { return length % threads == 0 || place < length; }
    template <class Get>
    DEVICE void load(int thread, const Get& get) {
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (has(i * threads + thread)) values[i] = get(i * threads + thread);
    }
    DEVICE void store(float* to, int thread) const {
#pragma unroll
        for (int i = 0; i < count; ++i)
            if (has(i * threads + thread)) to[i * threads + thread] = values[i];
    }
};

// Called by vector_threads threads: loads a tile's vectors, by ordinary loads, and stores them once those of two tiles
// before are used. All loads are in flight at a time: one after the other, they took longer than tiles of a short k.
template <class C>
DEVICE void load_vectors(float (&vectors)[2][C::vectors], typename C::Origin (&origins)[2],
                         const PipelineBarriers<2>& pipeline, const Ring<2>& at, const ScaleGrid& of_a,
                         const ScaleGrid& of_b, const Epilogue<C::out_type, C::bias_type>& epilogue,
                         typename C::Origin origin, int m, int n, int thread) {
    [[maybe_unused]] VectorPart<C::rows, C::vector_threads> of_rows;
    [[maybe_unused]] VectorPart<C::columns, C::vector_threads> of_channels, bias;
    if constexpr (!C::along_k) {
        of_rows.load(thread, [&](int i) { return of_a.scales[min(origin.row + i, m - 1) * of_a.row]; });
        of_channels.load(thread, [&](int i) { return of_b.scales[min(origin.column + i, n - 1) * of_b.row]; });
    }
    if constexpr (C::bias_type >= 0)
        bias.load(thread, [&](int i) { return epilogue.bias_of(min(origin.column + i, n - 1)); });
    pipeline.wait_empty(at);
    float* const to = vectors[at.stage];
    if (thread == 0) origins[at.stage] = origin;
    if constexpr (!C::along_k) {
        of_rows.store(to, thread);
        of_channels.store(to + C::channel_scales_at, thread);
    }
    if constexpr (C::bias_type >= 0) bias.store(to + C::bias_at, thread);
    barrier_arrive(pipeline.full(at));
}

// Called by vector_threads threads: copies the scales of a tile's k-blocks one by one (cp.async).
template <class C>
DEVICE void load_each_scale(float (&stage_scales)[C::stages][C::stage_scales],
                            const PipelineBarriers<C::stages>& pipeline, Ring<C::stages>& at, const ScaleGrid& of_a,
                            const ScaleGrid& of_b, TileOrigin origin, int m, int n, int k_blocks, int thread) {
    constexpr int words = (C::stage_scales + C::vector_threads - 1) / C::vector_threads;  // per thread
    const float* from[words];
#pragma unroll
    for (int i = 0; i < words; ++i) {
        const int place = thread + C::vector_threads * i;
        const int row = min(origin.row + place, m - 1),
                  channel = min(origin.column + (place - C::rows) * C::scale_rows, n - 1);
        from[i] = place < C::rows ? of_a.scales + row * of_a.row : of_b.scales + channel / C::scale_rows * of_b.row;
    }
#pragma unroll 1
    for (int left = k_blocks; left > 0; --left, at.advance(1)) {
        pipeline.wait_empty(at);
        const unsigned to = shared_address(stage_scales[at.stage]) + 4 * thread;
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = thread + C::vector_threads * i;
            if (place < C::stage_scales) cp_async_word(to + 4 * C::vector_threads * i, from[i]);
            from[i] += place < C::rows ? of_a.col : of_b.col;
        }
        cp_async_arrive(pipeline.full(at));
    }
}
// Called by vector_threads threads: loads the scales of each k-block and the vectors of each tile.
template <class C>
DEVICE void load_scales(float (&stage_scales)[C::stages][C::stage_scales], float (&vectors)[2][C::vectors],
                        typename C::Origin (&origins)[2], const PipelineBarriers<C::stages>& pipeline,
                        const PipelineBarriers<2>& vector_pipeline, const TensorMap* scale_map, const ScaleGrid& of_a,
                        const ScaleGrid& of_b, const Epilogue<C::out_type, C::bias_type>& epilogue,
                        typename C::Tiles tiles, typename C::Origin origin, int m, int n, const KPart& k, int thread) {
    const auto load_vectors_of_tile = [&](const Ring<2>& vectors_at) {
        load_vectors<C>(vectors, origins, vector_pipeline, vectors_at, of_a, weight_scales_of(tiles, origin, of_b),
                        epilogue_of(tiles, origin, epilogue), origin, m, n, thread);
    };
    Ring<2> vectors_at(0);
    Ring<C::stages> at(0);
    if constexpr (C::scale_tiles) {
        if (thread < 32) {
            WeightScales<C> weight_scales(tiles, of_b, origin, n, k.count, thread);
            while (tiles.more()) {
                load_vectors_of_tile(vectors_at);
                vectors_at.advance(1);
                __syncwarp();
                tiles.next();
                const auto after = tiles.more() ? tiles.origin() : origin;
                weight_scales.store(stage_scales, pipeline, at, origin, after);
                origin = after;
            }
            return;
        }
    }
    for (; tiles.more(); tiles.next(), origin = tiles.origin()) {
        load_vectors_of_tile(vectors_at);
        vectors_at.advance(1);
        __syncwarp();
        if constexpr (C::scale_tiles) {
            if (C::separate_scale_thread && elected())
                load_scale_tiles<C>(scale_map, shared_address(stage_scales), pipeline, at, origin.row, k);
        } else if constexpr (C::along_k) {
            load_each_scale<C>(stage_scales, pipeline, at, of_a, weight_scales_of(tiles, origin, of_b), origin, m, n,
                               k.count, thread);
        }
    }
    if (C::along_k && !C::scale_tiles) cp_async_wait_all();
}
