// What a block of a product of many rows does on sm_90a.
//
// Work split: persistent and warp-specialized. One producer warpgroup of a block loads k-blocks of 128 columns of k,
// and GROUPS consumer warpgroups multiply. A tile is 64 * GROUPS * M_SLICES rows x COLUMNS channels; each consumer has
// every GROUPS-th slice of 64 rows. With PINGPONG a tile is 64 * M_SLICES rows, and two consumers make whole tiles by
// turns (tiled_sequence.cuh).
//
// Pipeline: TMA fills a ring of STAGES k-blocks. Scales that change along k are applied to every k-block, in fp32: a
// consumer scales and adds (promotes) its products while its next ones, or the other consumer's, are multiplied. Unless
// k is split, sums follow its order, so equal rows get equal bits in any tile and any batch. Results are staged in
// shared memory and stored by TMA, for which the next tile's epilogue waits. A consumer with two slices stores one
// while the other, or the first of the next tile, is multiplied.
#pragma once
#include "tiled_math.cuh"
#include "tiled_split.cuh"
#include "tiled_store.cuh"

// Up to so many rows the weight is read once, so L2 evicts it first and keeps what is read again. Not if the result, of
// two bytes each, is as large as the weight: measured 3 % slower (1024x24576x1536).
constexpr int FEW_ROWS = 1024;

// Makes all tiles of a block.
template <class C>
DEVICE void make_tiles(const typename C::Tiles& tiles, const TensorMap& weight_map, const TensorMap& a_map,
                       const TensorMap& out_map, const TensorMap& scale_map, const float* __restrict__ scale_a,
                       long long scale_a_row, long long scale_a_k, const float* __restrict__ scale_b,
                       long long scale_b_row, long long scale_b_k, const void* __restrict__ bias, void* out,
                       long long ldo, int m, int n, int k_blocks, int prefetch_weight, const float* out_scale,
                       float* amax, float beta) {
    extern __shared__ char dynamic[];
    __shared__ alignas(8) word64 barriers[2 * C::stages], vector_barriers[4 + (C::accumulates ? C::groups : 0)],
        split_barrier;
    __shared__ alignas(128) float stage_scales[C::stages][C::stage_scales];
    __shared__ alignas(8) float vectors[2][C::vectors];
    __shared__ typename C::Origin origins[2];

    if (prefetch_weight) grid_dependency_launch();  // else after the wait, as in sm90_decode

    // After a shuffle the compiler knows a warp's number to be uniform, and descriptors stay in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    // With several groups of math threads, some kernels have no register left to keep an address in.
    const auto address = [](const void* p) { return C::groups == 1 ? kept_address(p) : shared_address(p); };
    const unsigned ring = (address(dynamic) + 1023) & ~1023u, a_ring = ring + C::stages * C::weight_bytes,
                   staging = a_ring + C::stages * C::a_bytes;
    const PipelineBarriers<C::stages> pipeline = {address(barriers)};
    const PipelineBarriers<2> vector_pipeline = {address(vector_barriers)};
    Epilogue<C::out_type, C::bias_type> epilogue(bias, nullptr);

    const int rank = C::split_k > 1 ? (int)block_x() % C::split_k : 0;  // among the blocks that share a tile
    const KPart part(k_blocks, rank, C::split_k);

    // Computes the divisions of the first tile before the waits, not after them, unless the tiles are in memory.
    typename C::Origin first = {};
    const auto find_first = [&] {
        first = tiles.origin();
        asm volatile("" : "+r"(first.row), "+r"(first.column));
    };
    if (lane == 0) {  // divided among warps: a single one would take the sum of the times
        if (warp == 0) {
            map_prefetch(&weight_map);
        } else if (warp == 1) {
            map_prefetch(&a_map);
            if (C::scale_tiles) map_prefetch(&scale_map);
            if (C::store_tiles) map_prefetch(&out_map);
        } else if (warp == 2) {
            pipeline.init(C::full_arrivals, C::math_warps * C::cluster);
            barrier_init_fence();
        } else if (warp == 3) {
            vector_pipeline.init(C::vector_threads, C::math_warps);
            if constexpr (C::accumulates)
                for (int i = 0; i < C::groups; ++i) barrier_init(shared_address(vector_barriers + 4 + i), 1);
            barrier_init_fence();
        }
    }
    if (C::split_k > 1 && warp == 3) tx_barrier_open(&split_barrier, SplitSums<C>::bytes);
    if constexpr (C::grouped) {
        grid_dependency_wait();
        if (warp == 3) tiles.find();
    } else if (warp < 2) {
        find_first();
    }
    if constexpr (C::cluster * C::split_k > 1) {  // until all blocks have initialized their barriers
        cluster_arrive();
        if constexpr (C::grouped) __syncthreads();  // the cluster's barrier does not order the table
        cluster_wait();
    } else {
        __syncthreads();
    }
    if (C::grouped && !tiles.more()) return;
    if (warp < 4) {
        if (C::grouped || warp > 1) find_first();
        if constexpr (C::threads > 256) setmaxnreg_dec<C::loader_registers>();
        // With `prefetch_weight`, warp 0 (weight) does not wait, nor warp 2 if it loads only scales of the weight and
        // the bias.
        if (!prefetch_weight || (warp != 0 && (warp != 2 || !C::scale_tiles))) grid_dependency_wait();
        if (warp == 0 && !prefetch_weight) grid_dependency_launch();
        if (warp == 0 && elected())
            load_tiles<C, C::weight_bytes, true>(
                &weight_map, ring, nullptr, 0, pipeline, tiles, first, part, C::columns,
                m <= FEW_ROWS && 2 * m < k_blocks * BLOCK_K ? EVICT_FIRST : EVICT_NORMAL);
        if (warp == 1 && elected())
            load_tiles<C, C::a_bytes, false>(
                &a_map, a_ring, &scale_map, shared_address(stage_scales), pipeline, tiles, first, part,
                C::grouped && C::cluster > 1 ? C::rows : min_int(C::rows, (m + 7) & ~7), EVICT_NORMAL);
        if (warp > 1) {
            const ScaleGrid of_a = {scale_a + part.first * scale_a_k, scale_a_row, scale_a_k},
                            of_b = {scale_b + part.first * scale_b_k, scale_b_row, scale_b_k};
            load_scales<C>(stage_scales, vectors, origins, pipeline, vector_pipeline, &scale_map, of_a, of_b, epilogue,
                           tiles, first, m, n, part, (int)threadIdx.x - 64);
        }
        return;
    }
    if constexpr (C::threads > 256) setmaxnreg_inc<C::math_registers>();
    grid_dependency_wait();

    const int group = warp / 4 - 1;
    TileMath<C> math = {{}, {}, {}, pipeline, stage_scales, ring, a_ring, C::pingpong ? 0 : group, warp % 4, lane};
    TileStore<C> store = {
        &out_map, {out, ldo, 0, m, n, lane}, warp / 4, warp % 4, staging + group * (C::buffers * C::buffer_bytes)};
    if constexpr (C::accumulates) store.addend_full = shared_address(vector_barriers + 4 + group);
    const Ending<C::out_type, C::activation, C::accumulates> ending = {beta};
    epilogue = {bias, out_scale};  // the preceding kernel may have written out_scale
    float largest = 0.0f;
    TileSequence<C> sequence(group, tiles.count());
    Ring<C::stages> at(0);
    Ring<2> vectors_at(C::pingpong ? group : 0);
    if (C::pingpong && group == 1) at.skip(part.count);
    const auto make_tile = [&](auto rotation) {
        TileOrigin origin = {};
        const auto await_vectors = [&] {
            vector_pipeline.wait_full(vectors_at);
            origin = {__shfl_sync(0xffffffffu, origins[vectors_at.stage].row, 0),
                      __shfl_sync(0xffffffffu, origins[vectors_at.stage].column, 0)};
        };
        constexpr bool early = C::along_k || C::accumulates || C::skips;  // else only the epilogue needs the origin
        if constexpr (early) await_vectors();
        sequence.take();
        const int slice_step = math.slice_row(1) - math.slice_row(0);
        if constexpr (C::accumulates) store.load_round(0, origin.row + math.slice_row(0), slice_step, origin.column);
        [[maybe_unused]] const float* const of_tile = vectors[vectors_at.stage];
        const auto store_slice = [&](auto of) {
            constexpr int chosen = decltype(of)::value, pieces = C::pieces;
            constexpr int from = chosen == WHOLE ? 0 : chosen, end = chosen == WHOLE ? C::m_slices : chosen + 1;
            if constexpr (!early && from == 0) await_vectors();
            if constexpr (C::grouped)  // here, as the main loop has no register for them
                store.rows.only(__shfl_sync(0xffffffffu, origins[vectors_at.stage].begin, 0),
                                __shfl_sync(0xffffffffu, origins[vectors_at.stage].end, 0));
            if constexpr (C::split_k > 1) {
                const unsigned buffer = staging + C::groups * (C::buffers * C::buffer_bytes);
                const SplitSums<C> split = {rank, group, warp % 4, lane, buffer, shared_address(&split_barrier)};
                if (!split.reduce(math.sums[0])) return;
            }
            [[maybe_unused]] float scales_a[C::m_slices][2];
            if constexpr (!C::along_k)
#pragma unroll
                for (int i = 2 * from; i < 2 * end; ++i)
                    scales_a[i / 2][i % 2] = of_tile[math.slice_row(i / 2) + math.lane_row() + i % 2 * 8];
            const auto value = [&](int slice, int i, float addend) {
                [[maybe_unused]] const int channel = i / 4 * 8 + lane % 4 * 2 + i % 2;
                float sum = math.sums[math.set_of(decltype(rotation)::value, slice)][i];
                if constexpr (!C::along_k)
                    sum = epilogue.scaled(sum, scales_a[slice][i / 2 % 2], of_tile[C::channel_scales_at + channel]);
                if constexpr (C::bias_type >= 0) sum = epilogue.biased(sum, of_tile[C::bias_at + channel]);
                sum = ending.of(sum, addend);
                if constexpr (C::amax)
                    if (origin.row + math.slice_row(slice) + math.lane_row() + i / 2 % 2 * 8 < m &&
                        origin.column + channel < n)
                        largest = maximum(largest, magnitude(sum));
                return C::out_type > BFLOAT16 ? sum * epilogue.reciprocal : sum;
            };
            const int first_row = origin.row + math.slice_row(0);
            store.template tile<from * pieces, end * pieces>(value, first_row, slice_step, origin.column);
        };
        bool skipped = false;
        if constexpr (C::skips)
            skipped = origin.row + math.slice_row(0) >= __shfl_sync(0xffffffffu, origins[vectors_at.stage].end, 0);
        if (skipped) math.skip(at, part.count);
        else math.template run<decltype(rotation)::value>(at, part.count, origin, sequence, store_slice);
        if (!sequence.any()) return false;
        __syncwarp();
        if (lane == 0) vector_pipeline.release(vectors_at);
        vectors_at.advance(sequence.step);
        return true;
    };
    math.begin_tiles(at);
    while ((!C::pingpong || sequence.any()) && make_tile(Constant<0>()) &&
           (C::rotations < 2 || make_tile(Constant<1 % C::rotations>())) &&
           (C::rotations < 3 || make_tile(Constant<2 % C::rotations>())));
    wgmma_wait<0>();  // products issued after the last tile
    if constexpr (C::amax) publish_amax(largest, amax);
    if (C::store_tiles && store.leads()) stores_read<0>();
}
