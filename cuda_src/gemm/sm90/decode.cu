// Products of few rows on sm_90a: out[m, n] = round(scale_a * (scale_b * (a[m, k] @ weight[n, k]^T)) + bias).
//
// The operands are swapped: wgmma's M side of 64 holds output channels, its N side of WIDTH >= m the rows of a, so
// the kernel streams the weight at the memory's speed and does hardly anything else. A tile is 64 * M_WARPGROUPS
// channels. k is split over the SPLIT_K blocks of a cluster that share a tile: each takes its part, in k-blocks of
// 128, through two rings that TMA fills: a deep one for the weight, because it is far away, a shallow one for a,
// which is in L2, with its blocked scales beside it. Blocks that have the same part of k for the MULTICAST_TILES
// tiles of a cluster share what they load of a. M_WARPGROUPS * K_WARPGROUPS consumer warpgroups multiply; those of
// the same 64 channels alternate over the k-blocks; one warp loads the weight, one a, one blocked scales. Every block
// completes an equal part of the tile's channels: the partial sums are stored into its reduction buffer (DSMEM) and
// added in the order of their numbers, so equal inputs give equal bits, in an order that depends on n and k alone.
//
// Before the kernel that it follows has ended it reads only the weight, its scales and the bias, and those only if
// `prefetch_weight` (a PDL prologue). If not, it lets its own dependents start only after its wait.
// With PHASES the weight's rows begin at any address, a tile has every PHASES-th channel, and wgmma takes the weight from
// registers (phases.cuh). Results may be FP8 then, OUT 3 + the format; with AMAX amax has to be 0 before the launch.
// The rows of a can come in 16 bits instead, and then every block quantizes them for itself (quantize_rows.cuh), or as
// codes at any address, which every block aligns (loose_rows.cuh).
//
// Constants, -DFP8_<name>: WIDTH 8, 16, 32, 64, with PHASES 96 and 128, too; SPLIT_K 1, 2, 4, 8; MULTICAST_TILES of a
// cluster, up to WIDTH / 8; M_WARPGROUPS, K_WARPGROUPS; STAGES and A_STAGES multiples of K_WARPGROUPS; CTAS_PER_SM;
// A_TYPE, B_TYPE the formats; BLOCKWISE 1: a's scales are 1x128 and the weight's cover SCALE_ROWS (128 or 1) x 128; 0:
// one a tensor or row; OUT, BIAS: 0 fp32, 1 fp16, 2 bf16, -1 none. PREFETCH_CHUNKS: k-blocks of the weight in flight until a has been requested, 0: as many
// as fit. AHEAD_CHUNKS: those that a block asks for into L2 beyond its ring. KEEPS_RESULT: whether the result is to stay
// in L2. A_VECTORS: vectors of 8 elements of x that a thread quantizes, 0 where TMA loads codes; else A_ROWS, A_INPUT,
// A_MODE of quantize_rows, or A_INPUT -1 and the BATCH of align_rows as A_ROWS, and A_STAGES k-blocks are all of a block.
// The tensor cores sum a k-block with fewer bits than fp32 has, so every one is added (promoted) in fp32.
//
// PHASES: of how many residues of channels there are maps, 0 where one map has them all.
//
// The caller owes: maps of uint8, boxes of 64 * M_WARPGROUPS (weight) and m, or WIDTH / MULTICAST_TILES of several (a),
// rows x 128 columns, 128-byte swizzle, but with PHASES 144 columns of the weight without swizzle; zeros out of bounds;
// scale strides in elements, 0 where broadcast; at least SPLIT_K
// k-blocks, a first tile for every cluster; of dynamic shared memory ring_bytes, 1,024 and (SPLIT_K * K_WARPGROUPS -
// 1) * units / SPLIT_K * unit_bytes for the reduction.
#include "decode_block.cuh"
#include "decode_epilogue.cuh"
#include "loose_rows.cuh"

// How the kernel is compiled: all -D names of this source, which are read here and for the parameters that A_VECTORS
// decides about.
struct Config {
    static constexpr int width = FP8_WIDTH, split_k = FP8_SPLIT_K, multicast_tiles = FP8_MULTICAST_TILES;
    static constexpr int warpgroup_channels = 64, m_warpgroups = FP8_M_WARPGROUPS, k_warpgroups = FP8_K_WARPGROUPS,
                         ctas_per_sm = FP8_CTAS_PER_SM;
    static constexpr int stages = FP8_STAGES, a_stages = FP8_A_STAGES, prefetch_chunks = FP8_PREFETCH_CHUNKS,
                         ahead_chunks = FP8_AHEAD_CHUNKS;
    static constexpr int a_type = FP8_A_TYPE, b_type = FP8_B_TYPE, out_type = FP8_OUT, bias_type = FP8_BIAS;
    static constexpr int activation = FP8_ACTIVATION, accumulates = FP8_ACCUMULATES;
    static constexpr bool keeps_result = FP8_KEEPS_RESULT;
    static constexpr int blockwise = FP8_BLOCKWISE, scale_rows = FP8_SCALE_ROWS;
    static constexpr int phases = FP8_PHASES, amax = FP8_AMAX;
    static constexpr bool elects = true;
    static constexpr int a_vectors = FP8_A_VECTORS, a_rows = FP8_A_ROWS, a_input = FP8_A_INPUT, a_mode = FP8_A_MODE;
};
using C = DecodeLayout<Config>;

// Whether what is added to results, and where they are, is loaded and computed behind the products, as the weight has the
// registers before: but for few rows, whose numbers arrive while a tile is multiplied, as they do without PHASES.
constexpr bool RESULT_ANEW = C::phases > 0 && C::accumulates;
constexpr bool ADDENDS_EARLY = !RESULT_ANEW || (C::ctas_per_sm < 3 && C::width <= (C::blockwise ? 8 : 16));

// Whether each block aligns what it multiplies of a.
constexpr bool ALIGNS_A = C::a_vectors > 0 && C::a_input < 0;

extern "C" __global__ void __launch_bounds__(C::threads, C::ctas_per_sm) sm90_decode(
#if FP8_PHASES
    const __grid_constant__ PhasedMaps weight_map,
#else
    const __grid_constant__ TensorMap weight_map,
#endif
#if FP8_A_VECTORS
    const byte* x, long long x_stride, int x_vecs, float upper,
#else
    const __grid_constant__ TensorMap a_map,
#endif
    const float* scale_a, long long scale_a_row, long long scale_a_k, const float* __restrict__ scale_b,
    long long scale_b_row, long long scale_b_k, const void* __restrict__ bias, void* out, long long ldo, int m, int n,
    int k_blocks, int prefetch_weight,
#if FP8_PHASES
    const float* out_scale, float* amax,
#endif
    float beta) {
    extern __shared__ char dynamic[];
    __shared__ float row_scales[C::width];
#if FP8_A_VECTORS
    const TensorMap* const codes = nullptr;
    const WideRows rows_of_x = {x, x_stride, m, x_vecs};
#else
    const TensorMap* const codes = &a_map;
    const WideRows rows_of_x = {};
    constexpr float upper = 0.0f;
#endif

    // A launch that may not prefetch the weight is what later ones, which may, rely on: once it lets them start, all
    // that precedes it on the stream has ended. So it does that after its wait (in load_weight).
    if (prefetch_weight) grid_dependency_launch();

    DecodeBlock<C> block(dynamic, n, k_blocks);
    const ScaleGrid of_a = {scale_a, scale_a_row, scale_a_k}, of_b = {scale_b, scale_b_row, scale_b_k};
#if !FP8_PHASES
    constexpr float *out_scale = nullptr, *amax = nullptr;
#endif
    if (block.loads(&weight_map, codes, of_a, of_b, m, n, WarpUnits<C>::storing_warps, prefetch_weight)) return;
    const int lane = block.lane;
    KBlockIterator& k_iter = block.k_iter;
    const WarpUnits<C> own(block);
    Places<C> at(k_iter, own.k_warpgroup);
    Epilogue<C::out_type, C::bias_type> epilogue(bias, nullptr);  // the scale of the result: below
    const Ending<C::out_type, C::activation, C::accumulates> ending = {beta};
    float row_scale = 0.0f, largest = 0.0f;
    int next_k_block = own.k_warpgroup;  // k-blocks to pass over before this warpgroup's next

    for (int iteration = 0; k_iter.tile < k_iter.tiles; ++iteration, k_iter.tile += k_iter.step) {
        float channel_scales[2] = {1.0f, 1.0f}, channel_biases[2] = {0.0f, 0.0f};
        if (own.completes()) {
            for (int half = 0; half < 2; ++half) {
                const int bounded = min(own.channel(k_iter.tile, half), n - 1);
                if (!C::blockwise) channel_scales[half] = scale_b[bounded * scale_b_row];
                if (ADDENDS_EARLY) channel_biases[half] = epilogue.bias_of(bounded);
            }
            own.expect_others();
        }
#if FP8_PHASES
        typename C::Tile::Weight w[2];
        const auto load = [&](auto& w) {
            const unsigned stage = at.next.stage * C::weight_bytes + own.m_warpgroup * 64 * C::Tile::Weight::COLUMNS;
            block.pipeline.wait_full(at.next);
            w.load(dynamic + (block.ring - shared_address(dynamic)) + stage, C::Tile::offset(weight_map, k_iter.tile));
            registers_fence(w.codes);
            at.next.advance(C::k_warpgroups);
        };
#endif
        LooseRows<C::consumers, C::width, ALIGNS_A ? C::a_rows : 1> loose(rows_of_x, k_iter.first_k_block, k_iter.k_blocks);
        if (iteration == 0) {
            if constexpr (ALIGNS_A) loose.begin();
            grid_dependency_wait();
            if constexpr (C::out_type > BFLOAT16)  // which the launch before may write
                if (out_scale != nullptr) epilogue.reciprocal = *out_scale;
            if constexpr (C::a_vectors > 0) {
                char* const a_tiles = dynamic + (block.a_ring - shared_address(dynamic));
                if constexpr (ALIGNS_A)
                    loose.request(C::blockwise ? nullptr : scale_a, scale_a_row);
                else
                    quantize_rows<C::consumers, C::a_rows, C::a_vectors, C::width, C::a_input, C::a_type, C::a_mode>(
                        a_tiles, row_scales, rows_of_x, k_iter.first_k_block * (BLOCK_K / 8),
                        k_iter.k_blocks * (BLOCK_K / 8), scale_a, scale_a_row, upper);
                if (C::prefetch_chunks && threadIdx.x == 0) barrier_arrive(block.a_requested);
            } else if (!C::blockwise && threadIdx.x < C::width) {
                row_scale = scale_a[min((int)threadIdx.x, m - 1) * scale_a_row];
            }
        }
#if FP8_PHASES
        // The first k-block of the weight comes while codes of a are on their way, where registers hold both.
        constexpr bool weight_first = !ALIGNS_A || C::ctas_per_sm < 3;
        if (weight_first && next_k_block < k_iter.k_blocks) load(w[0]);
        if constexpr (ALIGNS_A)
            if (iteration == 0) loose.store(dynamic + (block.a_ring - shared_address(dynamic)), row_scales);
        if (!weight_first && next_k_block < k_iter.k_blocks) load(w[0]);
#endif
        Addends<C::out_type, C::sums, C::accumulates> addends;
        const auto load_addends = [&] {
            const int first = own.channel(k_iter.tile, 0, RESULT_ANEW ? computed_anew(lane) : lane);
            if (!ADDENDS_EARLY)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    channel_biases[half] = epilogue.bias_of(min(first + 8 * half * C::Tile::phases, n - 1));
            const bool completed[2] = {own.completes(0), own.completes(1)};
            each_element<C>(completed, RESULT_ANEW ? computed_anew(ldo) : ldo, first, m, n, lane,
                            [&](int i, long long index, bool there) { addends.load(i, out, index, there); });
        };
        if (ADDENDS_EARLY) load_addends();
        if (C::a_vectors) at.codes = Ring<C::a_stages>(next_k_block);

        // Two sets of products alternate: while the tensor cores are busy with one, the other is scaled and added.
        float sums[C::sums], products[2][C::sums];
#pragma unroll
        for (int i = 0; i < C::sums; ++i) sums[i] = products[0][i] = products[1][i] = 0.0f;
        const auto issue_mma = [&](float (&d)[C::sums], auto& w) {
            if (C::phases == 0) block.pipeline.wait_full(at.next);
            if (C::streams_a) block.a_pipeline.wait_full(at.a_next);
            if constexpr (C::phases == 0)
                w.place(block.ring + at.next.stage * C::weight_bytes + own.m_warpgroup * 64 * BLOCK_K);
            const word64 a = tile_descriptor(block.a_ring + (C::a_vectors ? at.codes : at.a_next).stage * C::a_bytes);
            if (C::phases == 0) at.next.advance(C::k_warpgroups);
            at.a_next.advance(C::k_warpgroups);
            at.codes.advance(C::k_warpgroups);
            product_of_block<C::b_type, C::a_type>(d, w.codes, a);
        };
        // Adds the products of the oldest k-block; the last has none behind it.
        const auto promote = [&](float (&d)[C::sums], bool last) {
            float scales_b[2];
            float2 scales_a[C::width / 8];
            if constexpr (C::blockwise) {
                const float* const scales = block.stage_scales().of[at.a_oldest.stage];
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    scales_b[half] =
                        scales[C::width + ((own.unit + half) * 8 + lane / 4) * (C::span / C::tile) / C::scale_rows];
#pragma unroll
                for (int j = 0; j < C::width / 8; ++j) {
                    scales_a[j] = *(const float2*)&scales[8 * j + lane % 4 * 2];
                    if (C::halves_alike)
                        scales_a[j] = make_float2(scales_a[j].x * scales_b[0], scales_a[j].y * scales_b[0]);
                }
            }
            if (last) product_wait<0>();
            else product_wait<1>();
            registers_fence(d);
            at.release(block);
            if (C::phases && C::blockwise && C::scale_rows == 1) {  // in place: there are no registers for both
#pragma unroll
                for (int i = 0; i < C::sums; ++i) d[i] *= scales_b[i >> 1 & 1];
                registers_fence(d);
            }
#pragma unroll
            for (int i = 0; i < C::sums; ++i) {
                if constexpr (C::blockwise) {
                    const float across = i & 1 ? scales_a[i / 4].y : scales_a[i / 4].x, along = scales_b[i >> 1 & 1];
                    if constexpr (C::halves_alike) sums[i] = fma_flushing(across, d[i], sums[i]);
                    else if constexpr (C::scale_rows > 1) sums[i] = fma_flushing(across * along, d[i], sums[i]);
                    else sums[i] = fma_flushing(across, C::phases ? d[i] : along * d[i], sums[i]);
                } else {
                    sums[i] += d[i];
                }
            }
            if (C::phases) registers_fence(sums);  // before the next products, or the compiler serializes (C7514)
        };
#if FP8_PHASES
        // While a k-block is multiplied, the weight's next one is loaded and aligned, where registers hold both.
        constexpr bool ahead = !C::blockwise || (C::width < 64 && C::ctas_per_sm < 3);
        if (next_k_block < k_iter.k_blocks) {
#pragma unroll 1
            for (next_k_block += C::k_warpgroups; next_k_block + C::k_warpgroups < k_iter.k_blocks;
                 next_k_block += 2 * C::k_warpgroups) {
                issue_mma(products[0], w[0]);
                if (ahead) load(w[1]);
                promote(products[0], true);
                if (!ahead) load(w[1]);
                issue_mma(products[0], w[1]);
                if (ahead) load(w[0]);
                promote(products[0], true);
                if (!ahead) load(w[0]);
            }
            issue_mma(products[0], w[0]);
            if (next_k_block < k_iter.k_blocks) {
                next_k_block += C::k_warpgroups;
                if (ahead) load(w[1]);
                promote(products[0], true);
                if (!ahead) load(w[1]);
                issue_mma(products[0], w[1]);
            }
            promote(products[0], true);
        }
#else
        if (next_k_block < k_iter.k_blocks) {
            // Two k-blocks an iteration: issue, issue the next, promote the first. If the loop contains its own
            // prologue and epilogue, or is in a function of its own, the compiler serializes the products (ptxas C7517).
            typename C::Tile::Weight w;
            issue_mma(products[0], w);
#pragma unroll 1
            for (next_k_block += C::k_warpgroups; next_k_block + C::k_warpgroups < k_iter.k_blocks;
                 next_k_block += 2 * C::k_warpgroups) {
                issue_mma(products[1], w);
                promote(products[0], false);
                issue_mma(products[0], w);
                promote(products[1], false);
            }
            if (next_k_block < k_iter.k_blocks) {
                next_k_block += C::k_warpgroups;
                issue_mma(products[1], w);
                promote(products[0], false);
                promote(products[1], true);
            } else {
                promote(products[0], true);
            }
        }
#endif
        next_k_block -= k_iter.k_blocks;
        if (!ADDENDS_EARLY) load_addends();

        if (iteration == 0) {
            if (!C::blockwise && !C::a_vectors) {
                if (threadIdx.x < C::width) row_scales[threadIdx.x] = row_scale;
                threads_sync(2, C::consumers);
            }
            if (C::cluster > 1) cluster_wait();  // the other blocks have initialized their barriers
            if constexpr (C::out_type > BFLOAT16) epilogue.reciprocal = reciprocal_exact(epilogue.reciprocal);
        } else if (C::k_warpgroups > 1 || C::split_k > 1) {
            barrier_wait(block.reduce_empty, (iteration - 1) & 1);
        }
        if (!own.reduce(sums, iteration & 1)) continue;

        // All numbers first, then all stores: interleaved, they would wait for each other.
        const int place = own.unit * 8, of = RESULT_ANEW ? computed_anew(lane) : lane;
#pragma unroll
        for (int j = 0; j < C::width / 8; ++j) {
            const float2 rows =
                C::blockwise ? make_float2(1.0f, 1.0f) : *(const float2*)&row_scales[8 * j + of % 4 * 2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& value = sums[4 * j + i];
                if (!C::blockwise) value = epilogue.scaled(value, i & 1 ? rows.y : rows.x, channel_scales[i / 2]);
                value = epilogue.biased(value, channel_biases[i / 2]);
                value = ending.of(value, addends.number(4 * j + i));
                if constexpr (C::amax) {
                    const int row = j * 8 + of % 4 * 2 + i % 2;
                    if (own.owned[i / 2] && row < m && own.channel(k_iter.tile, i / 2, of) < n)
                        largest = maximum(largest, magnitude(value));
                }
                if constexpr (C::out_type > BFLOAT16) value *= epilogue.reciprocal;
            }
        }
        if constexpr (C::phases == 0 && (C::out_type == FLOAT16 || C::out_type == BFLOAT16))
            store_pairs<C>(sums, own.owned, out, ldo, C::Tile::channel(k_iter.tile, place), m, n, of);
        else
            store_each<C>(sums, own.owned, out, RESULT_ANEW ? computed_anew(ldo) : ldo, own.channel(k_iter.tile, 0, of),
                          m, n, of);
    }
    if constexpr (C::amax) publish_amax(largest, amax);
}
