// Products of 17 to 64 rows on sm_90a: out[m, n] = round(scale_a * (scale_b * (a[m, k] @ weight[n, k]^T)) + bias).
//
// Like decode.cu, but wgmma's M side of 64 holds the rows of a and its N side CHANNELS channels. The tensor cores then
// read a from shared memory once per up to 128 channels instead of once per 64, a thread needs the scales of two rows
// instead of all, and the epilogue stores rows as the accumulators hold them (experiments/2026-11-rows-on-the-m-side).
//
// One warpgroup multiplies a tile of CHANNELS channels, chosen so that the tiles divide evenly among the blocks. The
// SPLIT_K blocks of a cluster that share a tile each take a part of its k-blocks of 128. They complete parts of the
// tile that are as equal as units of 8 channels allow: a block stores its partial sums into the owner's reduction
// buffer (DSMEM), and the owner adds them in the order of their ranks, so equal inputs give equal bits. The PDL
// prologue and the multicast of a are those of decode.cu.
//
// Constants, -DFP8_<name>:
//   CHANNELS    a multiple of 8 from 64 to 128
//   SPLIT_K     1 to 8
//   BLOCKWISE   1: scales of 1x128 (a) and 128x128 (weight); 0: per tensor or row
//   others      as in decode.cu
//
// The caller owes: tensor maps of uint8, zero fill out of bounds, 128-byte swizzle, boxes of CHANNELS rows (weight) and
// of m rows, or 64 / MULTICAST_TILES where multicast (a), x 128 columns; scale strides in elements, 0 where broadcast;
// at least SPLIT_K k-blocks; a first tile for every cluster; dynamic shared memory of ring_bytes + 1,024 + (SPLIT_K -
// 1) * MOST_UNITS * unit_bytes (reduction buffer).
#include "decode_epilogue.cuh"

// The constants of compilation. Only this struct reads the -D names.
struct Config {
    static constexpr int width = 64, warpgroup_channels = FP8_CHANNELS, m_warpgroups = 1, k_warpgroups = 1,
                         a_vectors = 0;
    static constexpr int phases = 0, residues = 1;
    // Small weights, which have tiles of 64 channels, take 0.3 to 0.5 us longer if their loads are issued as fast as
    // possible (experiments/2026-11-ahead-of-the-ring).
    static constexpr bool elects = FP8_CHANNELS > 64;
    static constexpr int split_k = FP8_SPLIT_K, multicast_tiles = FP8_MULTICAST_TILES;
    static constexpr int stages = FP8_STAGES, a_stages = FP8_A_STAGES, prefetch_k_blocks = FP8_PREFETCH_K_BLOCKS,
                         ahead_k_blocks = FP8_AHEAD_K_BLOCKS;
    static constexpr int a_type = FP8_A_TYPE, b_type = FP8_B_TYPE, out_type = FP8_OUT, bias_type = FP8_BIAS;
    static constexpr int activation = FP8_ACTIVATION, accumulates = FP8_ACCUMULATES;
    static constexpr bool keeps_result = FP8_KEEPS_RESULT;
    static constexpr int blockwise = FP8_BLOCKWISE, scale_rows = BLOCK_K;
};
using C = DecodeLayout<Config>;

// The blocks of a cluster divide a tile's units of 8 channels among them, in pairs if there are enough: a row's 16-bit
// results of a pair fill a sector of 32 bytes.
constexpr int UNITS = C::units, WARP_UNIT_BYTES = 32 * (int)sizeof(float4);
constexpr int PAIR = UNITS >= 4 * C::split_k ? 2 : 1, PAIRS = (UNITS + PAIR - 1) / PAIR;
constexpr int owner_of(int unit) { return unit / PAIR * C::split_k / PAIRS; }
constexpr int first_unit_of(int rank) {
    const int unit = (rank * PAIRS + C::split_k - 1) / C::split_k * PAIR;
    return unit < UNITS ? unit : UNITS;
}
constexpr int MOST_UNITS = (PAIRS + C::split_k - 1) / C::split_k * PAIR;
// The offset in the owner's reduction buffer of a unit that a warp of another block stores there.
DEVICE int slot_of(int place, int unit, int warp) {
    return ((place * MOST_UNITS + unit - first_unit_of(owner_of(unit))) * 4 + warp) * WARP_UNIT_BYTES;
}

extern "C" __global__ void __launch_bounds__(C::threads, 1)
    sm90_decode_rows(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap a_map,
                     const float* scale_a, long long scale_a_row, long long scale_a_k,
                     const float* __restrict__ scale_b, long long scale_b_row, long long scale_b_k,
                     const void* __restrict__ bias, void* out, long long ldo, int m, int n, int k_blocks,
                     int prefetch_weight, float beta) {
    extern __shared__ char dynamic[];
    // Double-buffered by tiles.
    __shared__ alignas(8) float channel_scales[2][C::tile], channel_biases[2][C::tile];

    if (prefetch_weight) grid_dependency_launch();  // else after the wait, as in decode.cu

    constexpr int ranks = C::split_k;
    const int active = min((m + 15) / 16, 4);  // warps that have rows of a
    DecodeBlock<C> block(dynamic, n, k_blocks);
    const ScaleGrid of_a = {scale_a, scale_a_row, scale_a_k}, of_b = {scale_b, scale_b_row, scale_b_k};
    if (block.loads(&weight_map, &a_map, of_a, of_b, {0, m, m}, n, active, prefetch_weight)) return;
    const int warp = block.warp, lane = block.lane, rank = block.rank, first = block.first;
    KBlockIterator& k_iter = block.k_iter;

    const int row = warp * 16 + lane / 4;
    RingPositions<C> at(k_iter, 0);
    const Epilogue<C::out_type, C::bias_type> epilogue(bias, nullptr);
    const Ending<C::out_type, C::activation, C::accumulates> ending = {beta};
    float row_scales[2] = {1.0f, 1.0f};

    for (int iteration = 0; k_iter.tile < k_iter.tiles; ++iteration, k_iter.tile += k_iter.step) {
        const int channel = k_iter.tile * C::tile, own = min(channel + (int)threadIdx.x, n - 1);
        const float channel_scale = C::blockwise ? 1.0f : scale_b[own * scale_b_row];
        // The first unit whose channels have the tile's second scale.
        const int second_scale_unit = C::crosses_scales ? (BLOCK_K - channel % BLOCK_K) / 8 : UNITS;
        const float channel_bias = epilogue.bias_of(own);
        if (ranks > 1 && threadIdx.x == 0)
            barrier_expect(block.reduce_full,
                           (ranks - 1) * active * WARP_UNIT_BYTES * (first_unit_of(rank + 1) - first_unit_of(rank)));
        if (iteration == 0) {
            grid_dependency_wait();
            if (!C::blockwise)
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    row_scales[half] = scale_a[min(row + 8 * half, m - 1) * scale_a_row];
        }

        float sums[C::sums], products[2][C::sums];
#pragma unroll
        for (int i = 0; i < C::sums; ++i) sums[i] = products[0][i] = products[1][i] = 0.0f;
        const auto issue_mma = [&](float (&d)[C::sums]) {
            block.pipeline.wait_full(at.next);
            block.a_pipeline.wait_full(at.a_next);
            const word64 w = tile_descriptor(block.ring + at.next.stage * C::weight_bytes);
            const word64 a = tile_descriptor(block.a_ring + at.a_next.stage * C::a_bytes);
            at.next.advance(1);
            at.a_next.advance(1);
            wgmma_k_block<C::a_type, C::b_type>(d, a, w);
        };
        // Promotes the products of the oldest k-block; `last`: no other products are in flight.
        const auto promote = [&](float (&d)[C::sums], bool last) {
            const float* const scales = block.stage_scales().of[C::blockwise ? at.a_oldest.stage : 0];
            // The scales of the lane's two rows times the weight's first scale, and times its second one.
            float first_scales[2] = {1.0f, 1.0f}, second_scales[2] = {1.0f, 1.0f};
            if constexpr (C::blockwise) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    second_scales[half] = scales[row + 8 * half];
                    first_scales[half] = second_scales[half] * scales[C::width];
                    if (C::crosses_scales) second_scales[half] *= scales[C::width + 1];
                }
            }
            if (last) wgmma_wait<0>();
            else wgmma_wait<1>();
            registers_fence(d);
            at.release(block);
#pragma unroll
            for (int i = 0; i < C::sums; ++i) {
                if constexpr (C::blockwise)
                    sums[i] = fma_flushing(C::crosses_scales && i / 4 >= second_scale_unit ? second_scales[i / 2 % 2]
                                                                                           : first_scales[i / 2 % 2],
                                           d[i], sums[i]);
                else sums[i] += d[i];
            }
        };
        // As in decode.cu: a loop that contains its own prologue and epilogue has its products serialized.
        int left = k_iter.part.count - 1;
        issue_mma(products[0]);
#pragma unroll 1
        for (; left > 1; left -= 2) {
            issue_mma(products[1]);
            promote(products[0], false);
            issue_mma(products[0]);
            promote(products[1], false);
        }
        if (left > 0) {
            issue_mma(products[1]);
            promote(products[0], false);
            promote(products[1], true);
        } else {
            promote(products[0], true);
        }

        const int parity = iteration & 1;
        if (threadIdx.x < C::tile) {
            if (!C::blockwise) channel_scales[parity][threadIdx.x] = channel_scale;
            if (C::bias_type >= 0) channel_biases[parity][threadIdx.x] = channel_bias;
        }
        if (!C::blockwise || C::bias_type >= 0) threads_sync(2, C::consumers);
        if (ranks > 1) {
            if (iteration == 0) cluster_wait();  // the other blocks have initialized their barriers
            else if (warp < active) barrier_wait(block.reduce_empty, parity ^ 1);  // warps without rows need not wait
        }
        if (warp >= active) continue;
        Addends<C::out_type, C::sums, C::accumulates> addends;  // arrive while partial sums are exchanged
#pragma unroll
        for (int i = 0; i < C::sums; ++i) {
            const int at_row = row + i / 2 % 2 * 8, at_column = channel + i / 4 * 8 + lane % 4 * 2 + i % 2;
            const bool exists = (ranks == 1 || owner_of(i / 4) == rank) && at_row < m && at_column < n;
            addends.load(i, out, at_row * ldo + at_column, exists);
        }
        if constexpr (ranks > 1) {
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                const int owner = owner_of(unit);
                if (owner == rank) continue;
                const int slot = slot_of(rank - (rank > owner), unit, warp);
                const unsigned remote = cluster_address(shared_address(block.reduce_buf), first + owner);
                remote_store(remote + slot + lane * (int)sizeof(float4),
                             make_float4(sums[4 * unit], sums[4 * unit + 1], sums[4 * unit + 2], sums[4 * unit + 3]),
                             cluster_address(block.reduce_full, first + owner));
            }
            barrier_wait(block.reduce_full, parity);
#pragma unroll 2
            for (int place = 0; place < ranks - 1; ++place) {
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) {
                    if (owner_of(unit) != rank) continue;
                    const float4 other = ((const float4*)(block.reduce_buf + slot_of(place, unit, warp)))[lane];
                    sums[4 * unit] += other.x;
                    sums[4 * unit + 1] += other.y;
                    sums[4 * unit + 2] += other.z;
                    sums[4 * unit + 3] += other.w;
                }
            }
            __syncwarp();
            if (k_iter.tile + k_iter.step < k_iter.tiles && lane < ranks)
                remote_arrive(cluster_address(block.reduce_empty, first + lane));
        }

        // The lane's four results of a unit, before they are rounded.
        const auto finished = [&](int unit, float* values) {
            const int at = unit * 8 + lane % 4 * 2;
            float2 scales = make_float2(1.0f, 1.0f), biases = make_float2(0.0f, 0.0f);
            if (!C::blockwise) scales = *(const float2*)&channel_scales[parity][at];
            if (C::bias_type >= 0) biases = *(const float2*)&channel_biases[parity][at];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                values[i] = sums[4 * unit + i];
                if (!C::blockwise)
                    values[i] = epilogue.scaled(values[i], row_scales[i / 2], i % 2 ? scales.y : scales.x);
                values[i] = epilogue.biased(values[i], i % 2 ? biases.y : biases.x);
                values[i] = ending.of(values[i], addends.number(4 * unit + i));
            }
        };
#pragma unroll
        for (int unit = 0; unit < UNITS; unit += PAIR) {
            if (ranks > 1 && owner_of(unit) != rank) continue;
            if (PAIR == 2 && unit + 1 < UNITS) {
                float values[8];
                finished(unit, values);
                finished(unit + 1, values + 4);
                store_units<C, 2>(values, out, ldo, row, channel + unit * 8, m, n, lane);
            } else {
                float values[4];
                finished(unit, values);
                store_units<C, 1>(values, out, ldo, row, channel + unit * 8, m, n, lane);
            }
        }
    }
}
