// Products with blocked scales on sm_90a: out[m, n] = round(sum of scale_a * scale_b * (a[m, k] @ weight[n, k]^T) over
// the k-blocks of 128 + bias), for any number of rows.
//
// Two consumer warpgroups multiply; the warps of a producer warpgroup load the weight, a and the scales, through one
// ring of STAGES k-blocks. A tile is 128 * M_SLICES rows x COLUMNS channels; a consumer has M_SLICES slices of 64
// rows of it, one after the other. The tensor cores sum a k-block with fewer bits than fp32 has, so the threads scale
// it and add it (promote it) in fp32, while the other consumer's is multiplied. Blocks are persistent, and load for
// their next tile during the epilogue of one.
//
// The order of a sum is that of k: equal rows get equal bits, by any tile, in any batch.
//
// Constants, -D: M_SLICES 1, 2; COLUMNS 32, 48, 64, 96, 128; STAGES; A_TYPE, B_TYPE the formats; SCALE_ROWS (128 or 1)
// of the weight's scales; OUT, BIAS: 0 fp32, 1 fp16, 2 bf16, -1 none.
//
// The caller owes: maps of uint8, boxes of COLUMNS (weight) and 128 * M_SLICES (a) rows x 128 columns, 128-byte
// swizzle, zeros out of bounds; scale strides in elements, 0 where broadcast; of dynamic shared memory STAGES *
// (weight_bytes + a_bytes) + 1,024. `prefetch_weight`: weight and bias may be read before the kernel before has
// ended; if not, dependents start only after the wait, as in sm90_decode.
#include "../../ptx/transpose.cuh"
#include "../epilogue.cuh"
#include "blockwise_load.cuh"

// How the kernel is compiled: all -D names of this source, which are read here alone.
struct Config {
    static constexpr int m_slices = M_SLICES, columns = COLUMNS, stages = STAGES, scale_rows = SCALE_ROWS;
    static constexpr int a_type = A_TYPE, b_type = B_TYPE, out_type = OUT, bias_type = BIAS;
};
using C = BlockwiseLayout<Config>;

// Rounds and stores a lane's part of a tile: two rows from ``row`` on, 8 apart, and channels from ``channel`` on.
template <class C>
DEVICE void store_part(const float (&sums)[C::sums], void* result, long long ldo, int row, int channel, int m, int n,
                       int lane) {
    using Out = typename Result<C::out_type>::Element;
    Out* const out = static_cast<Out*>(result);
    const int quad = lane % 4;
    if (C::out_type != FLOAT32 && channel + C::columns <= n && (ldo & 7) == 0) {
        // Four threads have of two rows the channels of two times eight: each passes three on and stores eight.
#pragma unroll
        for (int i = 0; i < C::sums; i += 8) {
            unsigned pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j)
                pairs[j] = hardware_round_pair<C::out_type>(sums[i + 2 * j], sums[i + 2 * j + 1]);
            quad_transpose(pairs[0], pairs[1], pairs[2], pairs[3], lane);
            const int here = row + quad % 2 * 8;
            if (here < m)
                *(uint4*)(out + here * ldo + channel + 2 * i + quad / 2 * 8) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < C::sums; i += 2) {
        const int here = row + i / 2 % 2 * 8, first = channel + i / 4 * 8 + quad * 2;
        Out* const to = out + here * ldo + first;
        Out pair[2];
        if constexpr (C::out_type == FLOAT32) {
            pair[0] = sums[i], pair[1] = sums[i + 1];
        } else {
            const unsigned rounded = hardware_round_pair<C::out_type>(sums[i], sums[i + 1]);
            pair[0] = (Out)rounded, pair[1] = (Out)(rounded >> 16);
        }
        if (here < m && first < n) to[0] = pair[0];
        if (here < m && first + 1 < n) to[1] = pair[1];
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    sm90_blockwise(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap a_map,
                   const float* __restrict__ scale_a, long long scale_a_row, long long scale_a_k,
                   const float* __restrict__ scale_b, long long scale_b_row, long long scale_b_k,
                   const void* __restrict__ bias, void* out, long long ldo, int m, int n, int k_blocks,
                   int prefetch_weight) {
    extern __shared__ char dynamic[];
    __shared__ alignas(8) word64 barriers[2 * C::stages];
    __shared__ float stage_scales[C::stages][C::scales];

    if (prefetch_weight) grid_dependency_launch();  // else after the wait, as in sm90_decode

    // After a shuffle the compiler knows a warp's number to be uniform, and descriptors stay in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned ring = (shared_address(dynamic) + 1023) & ~1023u, a_ring = ring + C::stages * C::weight_bytes;
    const PipelineBarriers<C::stages> pipeline = {shared_address(barriers)};
    C::Tiles tiles(m, n);
    const Epilogue<C::out_type, C::bias_type> epilogue(bias, nullptr);

    if (threadIdx.x == 0) {
        pipeline.init(2 + C::scale_threads, 8);  // the threads that load; the warps that multiply
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_give<56>();
        if (warp > 0 || !prefetch_weight) grid_dependency_wait();
        if (warp == 0 && !prefetch_weight) grid_dependency_launch();
        if (warp == 0 && lane == 0) load_tiles<C, C::weight_bytes, true>(&weight_map, ring, pipeline, tiles, k_blocks);
        if (warp == 1 && lane == 0) load_tiles<C, C::a_bytes, false>(&a_map, a_ring, pipeline, tiles, k_blocks);
        if (warp > 1) {
            const ScaleGrid of_a = {scale_a, scale_a_row, scale_a_k}, of_b = {scale_b, scale_b_row, scale_b_k};
            load_scales<C>(stage_scales, pipeline, of_a, of_b, tiles, m, n, k_blocks, (int)threadIdx.x - 64);
        }
        return;
    }
    registers_take<224>();
    grid_dependency_wait();

    // Of the tile, and of 64 rows.
    const int group_row = (warp / 4 - 1) * 64 * C::m_slices, lane_row = warp % 4 * 16 + lane / 4;
    const word64 first_w = tile_descriptor(ring), first_a = tile_descriptor(a_ring + group_row * BLOCK_K);
    for (Ring<C::stages> at(0); tiles.more(); tiles.next()) {
        const TileOrigin origin = tiles.origin();
        // The channel where the weight's next scale begins.
        const int seam = C::scale_rows - origin.column % C::scale_rows;
        float sums[C::m_slices][C::sums], products[C::sums];
#pragma unroll
        for (int i = 0; i < C::m_slices * C::sums; ++i) sums[i / C::sums][i % C::sums] = 0.0f;

#pragma unroll 1
        for (int left = k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_full(at);
            const float* const scales = stage_scales[at.stage];
            const float first_b = scales[C::rows], second_b = scales[C::rows + 1];
            const word64 w = first_w + at.stage * (C::weight_bytes / 16);
#pragma unroll
            for (int slice = 0; slice < C::m_slices; ++slice) {
                const float scales_a[2] = {scales[group_row + slice * 64 + lane_row],
                                           scales[group_row + slice * 64 + lane_row + 8]};
                const word64 a = first_a + at.stage * (C::a_bytes / 16) + slice * (64 * BLOCK_K / 16);
                product_of_block<C::a_type, C::b_type>(products, a, w);
                product_wait<0>();
                registers_fence(products);
                // The last scales are in registers, but those of single channels.
                const auto release = [&](bool now) {
                    if (!now || slice < C::m_slices - 1) return;
                    __syncwarp();
                    if (lane == 0) pipeline.release(at);
                };
                release(C::scale_rows > 1);
#pragma unroll
                for (int i = 0; i < C::sums; ++i) {
                    const float scale_a = scales_a[i / 2 % 2];
                    const int column = i / 4 * 8;
                    if (C::scale_rows > 1) {
                        const float scale_b = BLOCK_K % C::columns != 0 && column >= seam ? second_b : first_b;
                        sums[slice][i] = fma_flushing(scale_a * scale_b, products[i], sums[slice][i]);
                    } else {
                        const float scale_b = scales[C::rows + column + lane % 4 * 2 + i % 2];
                        sums[slice][i] = fma_flushing(scale_a, scale_b * products[i], sums[slice][i]);
                    }
                }
                release(C::scale_rows == 1);
            }
        }

#pragma unroll
        for (int slice = 0; slice < C::m_slices; ++slice) {
#pragma unroll
            for (int i = 0; i < C::sums; ++i) {
                const int channel = min(origin.column + i / 4 * 8 + lane % 4 * 2 + i % 2, n - 1);
                sums[slice][i] = epilogue.biased(sums[slice][i], epilogue.bias_of(channel));
            }
            store_part<C>(sums[slice], out, ldo, origin.row + group_row + slice * 64 + lane_row, origin.column, m, n,
                          lane);
        }
    }
}
