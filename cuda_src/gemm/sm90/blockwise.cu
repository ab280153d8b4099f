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
// Constants: M_SLICES 1, 2; COLUMNS 32, 48, 64, 96, 128; STAGES; A_TYPE, B_TYPE e4m3 or e5m2; SCALE_ROWS (128 or 1) of
// the weight's scales; OUT, BIAS: 0 fp32, 1 fp16, 2 bf16, -1 none.
//
// The caller owes: maps of uint8, boxes of COLUMNS (weight) and 128 * M_SLICES (a) rows x 128 columns, 128-byte
// swizzle, zeros out of bounds; scale strides in elements, 0 where broadcast; of dynamic shared memory STAGES *
// (WEIGHT_BYTES + A_BYTES) + 1,024. `prefetch_weight`: weight and bias may be read before the kernel before has
// ended; if not, dependents start only after the wait, as in sm90_decode.
#include "blockwise_load.cuh"
#include "output.cuh"

#define SUMS (COLUMNS / 2) // of a thread, in 64 rows of a tile
#define TYPES WGMMA_STRING(A_TYPE) "." WGMMA_STRING(B_TYPE)

// d = (keep ? d : 0) + 64 rows of a * weight tile, 32 columns of each.
DEVICE void multiply(float (&d)[SUMS], word64 w, word64 a, int keep) {
#if COLUMNS == 32
    WGMMA_PRODUCT("32", TYPES, WGMMA_R16, "%16", "%17", "%18", WGMMA_D16(0));
#elif COLUMNS == 48
    WGMMA_PRODUCT("48", TYPES, WGMMA_R24, "%24", "%25", "%26", WGMMA_D16(0), WGMMA_D8(16));
#elif COLUMNS == 64
    WGMMA_PRODUCT("64", TYPES, WGMMA_R32, "%32", "%33", "%34", WGMMA_D32(0));
#elif COLUMNS == 96
    WGMMA_PRODUCT("96", TYPES, WGMMA_R48, "%48", "%49", "%50", WGMMA_D32(0), WGMMA_D16(32));
#else
    WGMMA_PRODUCT("128", TYPES, WGMMA_R64, "%64", "%65", "%66", WGMMA_D32(0), WGMMA_D32(32));
#endif
}

// Rounds and stores a lane's part of a tile: two rows from ``row`` on, 8 apart, and channels from ``channel`` on.
DEVICE void store(const float (&sums)[SUMS], Out *out, long long ldo, int row, int channel, int m, int n, int lane) {
    const int quad = lane % 4;
#if OUT > 0
    if (channel + COLUMNS <= n && (ldo & 7) == 0) {
        // Four threads have of two rows the channels of two times eight: each passes three on and stores eight.
#pragma unroll
        for (int i = 0; i < SUMS; i += 8) {
            unsigned pairs[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = hardware_round_pair<OUT>(sums[i + 2 * j], sums[i + 2 * j + 1]);
            quad_transpose(pairs[0], pairs[1], pairs[2], pairs[3], lane);
            const int here = row + quad % 2 * 8;
            if (here < m)
                *(uint4 *)(out + here * ldo + channel + 2 * i + quad / 2 * 8) =
                    make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
        return;
    }
#endif
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        const int here = row + i / 2 % 2 * 8, first = channel + i / 4 * 8 + quad * 2;
        Out *const to = out + here * ldo + first;
#if OUT > 0
        const unsigned rounded = hardware_round_pair<OUT>(sums[i], sums[i + 1]);
        const Out pair[2] = {(Out)rounded, (Out)(rounded >> 16)};
#else
        const Out pair[2] = {sums[i], sums[i + 1]};
#endif
        if (here < m && first < n) to[0] = pair[0];
        if (here < m && first + 1 < n) to[1] = pair[1];
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    sm90_blockwise(const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap a_map,
                    const float *__restrict__ scale_a, long long scale_a_row, long long scale_a_col,
                    const float *__restrict__ scale_b, long long scale_b_row, long long scale_b_col,
                    const Bias *__restrict__ bias, Out *out, long long ldo, int m, int n, int k_blocks,
                    int prefetch_weight) {
    extern __shared__ char dynamic[];
    __shared__ alignas(8) word64 barriers[2 * STAGES];
    __shared__ float stage_scales[STAGES][SCALES];

    if (prefetch_weight) grid_dependency_launch(); // else after the wait, as in sm90_decode

    // After a shuffle the compiler knows a warp's number to be uniform, and descriptors stay in uniform registers.
    const int warp = __shfl_sync(0xffffffffu, (int)threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const unsigned ring = (shared_address(dynamic) + 1023) & ~1023u, a_ring = ring + STAGES * WEIGHT_BYTES;
    const PipelineBarriers<STAGES> pipeline = {shared_address(barriers)};
    Tiles tiles(m, n);

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(pipeline.barriers + 8 * i, 2 + SCALE_THREADS);
            barrier_init(pipeline.barriers + 8 * (STAGES + i), 8); // the warps that multiply
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (warp < 4) {
        registers_give<56>();
        if (warp > 0 || !prefetch_weight) grid_dependency_wait();
        if (warp == 0 && !prefetch_weight) grid_dependency_launch();
        if (warp == 0 && lane == 0) load_tiles<WEIGHT_BYTES, true>(&weight_map, ring, pipeline, tiles, k_blocks);
        if (warp == 1 && lane == 0) load_tiles<A_BYTES, false>(&a_map, a_ring, pipeline, tiles, k_blocks);
        if (warp > 1) {
            const ScaleGrid of_a = {scale_a, scale_a_row, scale_a_col}, of_b = {scale_b, scale_b_row, scale_b_col};
            load_scales(stage_scales, pipeline, of_a, of_b, tiles, m, n, k_blocks, (int)threadIdx.x - 64);
        }
        return;
    }
    registers_take<224>();
    grid_dependency_wait();

    const int group_row = (warp / 4 - 1) * 64 * M_SLICES, lane_row = warp % 4 * 16 + lane / 4; // of a tile, of 64 rows
    const word64 first_w = tile_descriptor(ring), first_a = tile_descriptor(a_ring + group_row * BLOCK_K);
    for (Ring<STAGES> at(0); tiles.more(); tiles.next()) {
        const int2 origin = tiles.origin();
        const int seam = SCALE_ROWS - origin.y % SCALE_ROWS; // the channel where the weight's next scale begins
        float sums[M_SLICES][SUMS], products[SUMS];
#pragma unroll
        for (int i = 0; i < M_SLICES * SUMS; ++i) sums[i / SUMS][i % SUMS] = 0.0f;

#pragma unroll 1
        for (int left = k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_full(at);
            const float *const scales = stage_scales[at.stage];
            const float first_b = scales[ROWS], second_b = scales[ROWS + 1];
            const word64 w = first_w + at.stage * (WEIGHT_BYTES / 16);
#pragma unroll
            for (int slice = 0; slice < M_SLICES; ++slice) {
                const float scales_a[2] = {scales[group_row + slice * 64 + lane_row],
                                           scales[group_row + slice * 64 + lane_row + 8]};
                const word64 a = first_a + at.stage * (A_BYTES / 16) + slice * (64 * BLOCK_K / 16);
                registers_fence(products);
                product_begin();
                multiply(products, a, w, 0);
                multiply(products, a + 2, w + 2, 1);
                multiply(products, a + 4, w + 4, 1);
                multiply(products, a + 6, w + 6, 1);
                product_commit();
                product_wait<0>();
                registers_fence(products);
                // The last scales are in registers, but those of single channels.
                const auto release = [&](bool now) {
                    if (!now || slice < M_SLICES - 1) return;
                    __syncwarp();
                    if (lane == 0) pipeline.release(at);
                };
                release(SCALE_ROWS > 1);
#pragma unroll
                for (int i = 0; i < SUMS; ++i) {
                    const float scale_a = scales_a[i / 2 % 2];
                    const int column = i / 4 * 8;
                    if (SCALE_ROWS > 1) {
                        const float scale_b = 128 % COLUMNS != 0 && column >= seam ? second_b : first_b;
                        sums[slice][i] = fma_flushing(scale_a * scale_b, products[i], sums[slice][i]);
                    } else {
                        const float scale_b = scales[ROWS + column + lane % 4 * 2 + i % 2];
                        sums[slice][i] = fma_flushing(scale_a, scale_b * products[i], sums[slice][i]);
                    }
                }
                release(SCALE_ROWS == 1);
            }
        }

#pragma unroll
        for (int slice = 0; slice < M_SLICES; ++slice) {
#pragma unroll
            for (int i = 0; BIAS >= 0 && i < SUMS; ++i)
                sums[slice][i] += bias_value(bias, min(origin.y + i / 4 * 8 + lane % 4 * 2 + i % 2, n - 1));
            store(sums[slice], out, ldo, origin.x + group_row + slice * 64 + lane_row, origin.y, m, n, lane);
        }
    }
}
