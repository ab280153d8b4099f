// Products of few rows on sm_90a: out[m, n] = round(scale_a * (scale_b * (a[m, k] @ weight[n, k]^T)) + bias).
//
// Operands are swapped: wgmma's M side of 64 holds output channels and its N side of WIDTH >= m holds the rows of a, so
// the kernel streams the weight at memory bandwidth and does hardly anything else.
//
// Work split: a tile has 64 * M_WARPGROUPS channels. The SPLIT_K blocks of a cluster that share a tile each take a part
// of its k-blocks (128 columns of k). A cluster has MULTICAST_TILES tiles; blocks with the same part of k multicast
// their loads of a to each other. A block has M_WARPGROUPS * K_WARPGROUPS consumer warpgroups, of which those of the
// same 64 channels alternate over the k-blocks, and a producer warp each for the weight, a, and blocked scales. With
// PHASES blockIdx.y divides the rows: each panel of WIDTH rows has blocks of its own, and a box of a has WIDTH rows.
//
// Pipeline: TMA fills a deep ring of the weight, which comes from device memory, and a shallow ring of a, which comes
// from L2, with the k-block's blocked scales beside it. The tensor cores sum a k-block with fewer bits than fp32 has,
// so the products of every k-block are promoted, that is, added in fp32. For the split-K reduction every block
// completes an equal part of the tile's channels: the other blocks and warpgroups store their partial sums into its
// reduction buffer (DSMEM), and it adds them in the order of their ranks. That order is fixed, so equal inputs give
// equal bits.
//
// PDL: before the preceding kernel has ended, this one reads only the weight, its scales and the bias, and these only
// if `prefetch_weight`. Otherwise it lets its dependents start only after its own wait.
//
// Constants, -DFP8_<name>:
//   WIDTH                   8, 16, 32, 64; with PHASES also 96 and 128
//   SPLIT_K                 1, 2, 4, 8
//   MULTICAST_TILES         tiles of a cluster, at most WIDTH / 8
//   M_WARPGROUPS, K_WARPGROUPS, CTAS_PER_SM
//   STAGES, A_STAGES        of the rings of the weight and of a; multiples of K_WARPGROUPS
//   A_TYPE, B_TYPE          FP8 formats
//   BLOCKWISE               1: scales of 1x128 (a) and SCALE_ROWS x 128 (weight); 0: one per tensor or row
//   SCALE_ROWS              128 or 1
//   OUT, BIAS               0 fp32, 1 fp16, 2 bf16; BIAS -1: none; OUT with PHASES: also 3 + an FP8 format
//   ACTIVATION, ACCUMULATES of the ending (epilogue.cuh)
//   PREFETCH_K_BLOCKS       k-blocks of the weight in flight until a has been requested; 0: as many as fit
//   AHEAD_K_BLOCKS          k-blocks beyond its ring that a block prefetches into L2
//   KEEPS_RESULT            whether to keep the result in L2
//   PHASES                  0: one map has all channels; else the weight's rows begin at any address, every residue of
//                           channels has its own map, and wgmma takes the weight from registers (phases.cuh)
//   RESIDUES                that a tile has every PHASES-th channel of: 1, or with PHASES from 2 on also 2
//   AMAX                    whether to find the amax of the result; only with PHASES
//   A_VECTORS               0: TMA loads codes of a; else every block writes all of its A_STAGES k-blocks of a itself:
//                           it quantizes 16-bit rows, A_VECTORS vectors of 8 elements a thread (quantize_rows.cuh), or
//                           aligns codes at any address (loose_rows.cuh)
//   A_ROWS, A_INPUT, A_MODE of quantize_rows; for LooseRows A_INPUT is -1 and A_ROWS its BATCH
//
// The caller owes: tensor maps of uint8, zero fill out of bounds, boxes of 64 * M_WARPGROUPS rows (weight) and of m
// rows, or WIDTH / MULTICAST_TILES where multicast (a), 128 columns with 128-byte swizzle, but with PHASES 144 columns
// without swizzle for the weight; scale strides in elements, 0 where broadcast; at least SPLIT_K k-blocks; a first tile
// for every cluster; 0 in amax before the launch; dynamic shared memory of ring_bytes + 1,024 + (SPLIT_K * K_WARPGROUPS
// - 1) * units / SPLIT_K * unit_bytes (reduction buffer).
#include "decode_block.cuh"
#include "decode_epilogue.cuh"
#include "decode_promote.cuh"
#include "loose_rows.cuh"

// The constants of compilation. Only this struct and the kernel's #ifs read the -D names.
struct Config {
    static constexpr int width = FP8_WIDTH, split_k = FP8_SPLIT_K, multicast_tiles = FP8_MULTICAST_TILES;
    static constexpr int warpgroup_channels = 64, m_warpgroups = FP8_M_WARPGROUPS, k_warpgroups = FP8_K_WARPGROUPS,
                         ctas_per_sm = FP8_CTAS_PER_SM;
    static constexpr int stages = FP8_STAGES, a_stages = FP8_A_STAGES, prefetch_k_blocks = FP8_PREFETCH_K_BLOCKS,
                         ahead_k_blocks = FP8_AHEAD_K_BLOCKS;
    static constexpr int a_type = FP8_A_TYPE, b_type = FP8_B_TYPE, out_type = FP8_OUT, bias_type = FP8_BIAS;
    static constexpr int activation = FP8_ACTIVATION, accumulates = FP8_ACCUMULATES;
    static constexpr bool keeps_result = FP8_KEEPS_RESULT;
    static constexpr int blockwise = FP8_BLOCKWISE, scale_rows = FP8_SCALE_ROWS;
    static constexpr int phases = FP8_PHASES, residues = FP8_RESIDUES, amax = FP8_AMAX;
    static constexpr bool elects = true;
    static constexpr int a_vectors = FP8_A_VECTORS, a_rows = FP8_A_ROWS, a_input = FP8_A_INPUT, a_mode = FP8_A_MODE;
};
using C = DecodeLayout<Config>;

// ADDENDS_EARLY: the bias and the results that beta scales are loaded before the products, and arrive during them. With
// PHASES and beta only few rows leave registers for that, as the weight is in registers, too: otherwise the addends are
// loaded after the products. RECOMPUTES_ADDRESSES: result addresses are computed again there, to free registers.
constexpr bool RECOMPUTES_ADDRESSES = C::phases > 0 && C::accumulates;
constexpr bool ADDENDS_EARLY = !RECOMPUTES_ADDRESSES || (C::ctas_per_sm < 3 && C::width <= (C::blockwise ? 8 : 16));

// Whether the consumers of each block align the part of a that they multiply.
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
    RowPanel panel = {0, m, m};
    if constexpr (C::phases > 0) {
        panel = RowPanel::of<C::width>(m, (int)blockIdx.y, (int)gridDim.y);
        m = panel.rows;
        scale_a += panel.first * scale_a_row;
        constexpr int bytes = C::out_type > BFLOAT16 ? 1 : sizeof(typename Result<C::out_type>::Element);
        out = static_cast<char*>(out) + panel.first * ldo * bytes;
    }
#if FP8_A_VECTORS
    const TensorMap* const a_codes = nullptr;
    const WideRows rows_of_x = {x + panel.first * x_stride, x_stride, m, x_vecs};
#else
    const TensorMap* const a_codes = &a_map;
    const WideRows rows_of_x = {};
    constexpr float upper = 0.0f;
#endif

    // Later launches that prefetch the weight rely on one that may not: when it lets them start, everything before it
    // on the stream has ended. So it triggers its dependents only after its wait (in load_weight).
    if (prefetch_weight) grid_dependency_launch();

    DecodeBlock<C> block(dynamic, n, k_blocks);
    const ScaleGrid of_a = {scale_a, scale_a_row, scale_a_k}, of_b = {scale_b, scale_b_row, scale_b_k};
#if !FP8_PHASES
    constexpr float *out_scale = nullptr, *amax = nullptr;
#endif
    if (block.loads(&weight_map, a_codes, of_a, of_b, panel, n, WarpUnits<C>::storing_warps, prefetch_weight)) return;
    const int lane = block.lane;
    KBlockIterator& k_iter = block.k_iter;
    const WarpUnits<C> own(block);
    RingPositions<C> at(k_iter, own.k_warpgroup);
    Epilogue<C::out_type, C::bias_type> epilogue(bias, nullptr);
    const Ending<C::out_type, C::activation, C::accumulates> ending = {beta};
    float row_scale = 0.0f, largest = 0.0f;
    int next_k_block = own.k_warpgroup;  // index of this warpgroup's next k-block, counted from the tile's first

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
            const unsigned stage = at.next.stage * C::weight_bytes;
            block.pipeline.wait_full(at.next);
            C::Tile::align(w, dynamic + (block.ring - shared_address(dynamic)) + stage, weight_map, k_iter.tile,
                           own.m_warpgroup);
            registers_fence(w.codes);
            at.next.advance(C::k_warpgroups);
        };
#endif
        LooseRows<C::consumers, C::width, ALIGNS_A ? C::a_rows : 1> loose(rows_of_x, k_iter.part.first,
                                                                          k_iter.part.count);
        if (iteration == 0) {
            if constexpr (ALIGNS_A) loose.begin();
            grid_dependency_wait();
            if constexpr (C::out_type > BFLOAT16)  // its predecessor may write out_scale
                if (out_scale != nullptr) epilogue.reciprocal = *out_scale;
            if constexpr (C::a_vectors > 0) {
                char* const a_tiles = dynamic + (block.a_ring - shared_address(dynamic));
                if constexpr (ALIGNS_A) loose.request(C::blockwise ? nullptr : scale_a, scale_a_row);
                else
                    quantize_rows<C::consumers, C::a_rows, C::a_vectors, C::width, C::a_input, C::a_type, C::a_mode>(
                        a_tiles, row_scales, rows_of_x, k_iter.part.first * (BLOCK_K / 8),
                        k_iter.part.count * (BLOCK_K / 8), scale_a, scale_a_row, upper);
                if (C::prefetch_k_blocks && threadIdx.x == 0) barrier_arrive(block.a_requested);
            } else if (!C::blockwise && threadIdx.x < C::width) {
                row_scale = scale_a[min((int)threadIdx.x, m - 1) * scale_a_row];
            }
        }
#if FP8_PHASES
        // The first k-block of the weight is loaded while codes of a are in flight, where the registers hold both.
        constexpr bool weight_first = ALIGNS_A && C::ctas_per_sm < 3;
        if (weight_first && next_k_block < k_iter.part.count) load(w[0]);
        if constexpr (ALIGNS_A)
            if (iteration == 0) loose.store(dynamic + (block.a_ring - shared_address(dynamic)), row_scales);
#endif
        Addends<C::out_type, C::sums, C::accumulates> addends;
        const auto load_addends = [&] {
            const int first = own.channel(k_iter.tile, 0, RECOMPUTES_ADDRESSES ? opaque(lane) : lane);
            if (!ADDENDS_EARLY)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    channel_biases[half] = epilogue.bias_of(min(first + half * C::Tile::unit_stride, n - 1));
            const bool completed[2] = {own.completes(0), own.completes(1)};
            each_element<C>(completed, RECOMPUTES_ADDRESSES ? opaque(ldo) : ldo, first, C::Tile::unit_stride, m, n,
                            lane, [&](int i, long long index, bool exists) { addends.load(i, out, index, exists); });
        };
        if (ADDENDS_EARLY) load_addends();
        if (C::a_vectors) at.a_resident = Ring<C::a_stages>(next_k_block);

        // Two accumulators alternate: while the tensor cores fill one, the other is scaled and promoted.
        float sums[C::sums], products[2][C::sums];
#pragma unroll
        for (int i = 0; i < C::sums; ++i) sums[i] = products[0][i] = products[1][i] = 0.0f;
        const auto issue_mma = [&](float (&d)[C::sums], auto& w) {
            if (C::phases == 0) block.pipeline.wait_full(at.next);
            if (C::streams_a) block.a_pipeline.wait_full(at.a_next);
            if constexpr (C::phases == 0)
                w.place(block.ring + at.next.stage * C::weight_bytes + own.m_warpgroup * 64 * BLOCK_K);
            const word64 a =
                tile_descriptor(block.a_ring + (C::a_vectors ? at.a_resident : at.a_next).stage * C::a_bytes);
            if (C::phases == 0) at.next.advance(C::k_warpgroups);
            at.a_next.advance(C::k_warpgroups);
            at.a_resident.advance(C::k_warpgroups);
            wgmma_k_block<C::b_type, C::a_type>(d, w.codes, a);
        };
        const auto promote = [&](float (&d)[C::sums], bool last) {
            promote_k_block<C>(sums, d, last, block, at, own, lane);
        };
#if FP8_PHASES
        // Whether the weight's next k-block is loaded and aligned during a product: where the registers hold both.
        constexpr int ahead_width = C::residues > 1 && C::ctas_per_sm > 1 ? 16 : 32;
        constexpr bool ahead = !C::blockwise || (C::width <= ahead_width && C::ctas_per_sm < 3);
        if (next_k_block < k_iter.part.count) {
            if (!weight_first) load(w[0]);
#pragma unroll 1
            for (next_k_block += C::k_warpgroups; next_k_block + C::k_warpgroups < k_iter.part.count;
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
            if (next_k_block < k_iter.part.count) {
                next_k_block += C::k_warpgroups;
                if (ahead) load(w[1]);
                promote(products[0], true);
                if (!ahead) load(w[1]);
                issue_mma(products[0], w[1]);
            }
            promote(products[0], true);
        }
#else
        if (next_k_block < k_iter.part.count) {
            // Two k-blocks per iteration: issue, issue the next, promote the first. If the loop contains its own
            // prologue and epilogue, or is in a function of its own, the compiler serializes the products (C7517).
            typename C::Tile::Weight w;
            issue_mma(products[0], w);
#pragma unroll 1
            for (next_k_block += C::k_warpgroups; next_k_block + C::k_warpgroups < k_iter.part.count;
                 next_k_block += 2 * C::k_warpgroups) {
                issue_mma(products[1], w);
                promote(products[0], false);
                issue_mma(products[0], w);
                promote(products[1], false);
            }
            if (next_k_block < k_iter.part.count) {
                next_k_block += C::k_warpgroups;
                issue_mma(products[1], w);
                promote(products[0], false);
                promote(products[1], true);
            } else {
                promote(products[0], true);
            }
        }
#endif
        next_k_block -= k_iter.part.count;
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

        // Compute all values before the first store: interleaved, computations and stores would wait for each other.
        const int place = own.unit * 8, result_lane = RECOMPUTES_ADDRESSES ? opaque(lane) : lane;
#pragma unroll
        for (int j = 0; j < C::width / 8; ++j) {
            const float2 rows =
                C::blockwise ? make_float2(1.0f, 1.0f) : *(const float2*)&row_scales[8 * j + result_lane % 4 * 2];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& value = sums[4 * j + i];
                if (!C::blockwise) value = epilogue.scaled(value, i & 1 ? rows.y : rows.x, channel_scales[i / 2]);
                value = epilogue.biased(value, channel_biases[i / 2]);
                value = ending.of(value, addends.number(4 * j + i));
                if constexpr (C::amax) {
                    const int row = j * 8 + result_lane % 4 * 2 + i % 2;
                    if (own.owned[i / 2] && row < m && own.channel(k_iter.tile, i / 2, result_lane) < n)
                        largest = maximum(largest, magnitude(value));
                }
                if constexpr (C::out_type > BFLOAT16) value *= epilogue.reciprocal;
            }
        }
        if constexpr (C::phases == 0 && (C::out_type == FLOAT16 || C::out_type == BFLOAT16))
            store_pairs<C>(sums, own.owned, out, ldo, C::Tile::channel(k_iter.tile, place), m, n, result_lane);
        else
            store_each<C>(sums, own.owned, out, RECOMPUTES_ADDRESSES ? opaque(ldo) : ldo,
                          own.channel(k_iter.tile, 0, result_lane), m, n, result_lane);
    }
    if constexpr (C::amax) publish_amax(largest, amax);
}
