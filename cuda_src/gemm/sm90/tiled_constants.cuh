// The constants with which sm90_tiled and sm90_grouped are compiled, -DFP8_<name>:
//   GROUPS                   1, 2 or 3
//   M_SLICES                 1 or 2; with 3 groups, 1
//   PINGPONG                 0 or 1
//   COLUMNS                  channels of a tile: an N of wgmma, and a multiple of 16
//   STAGES                   of the ring
//   A_TYPE, B_TYPE           FP8 formats
//   SCALES                   SCALES_* of tiled_layout.cuh
//   SCALE_TILES              whether TMA loads the 1x128 scales of a
//   OUT, BIAS                0 fp32, 1 fp16, 2 bf16; OUT also 3 + an FP8 format; BIAS -1: none
//   ACTIVATION, ACCUMULATES  of the ending (epilogue.cuh)
//   AMAX                     whether to find the amax of the result
//   STORE_TILES              whether TMA stores the result
//   BUFFERS                  staging buffers of a consumer
//   CLUSTER                  blocks whose tiles have the same channels, and which multicast loads of the weight; in a
//                            grouped product, whose tiles have the same rows, and which multicast loads of a
//   SPLIT_K                  1; or 2 or 4 blocks, one cluster, that share a tile and its k (tiled_split.cuh)
//   GROUP_TABLE              0; or the groups that the table of a grouped product holds: a power of two from 32 on
#pragma once

// Only this struct reads the -D names.
struct Config {
    static constexpr int groups = FP8_GROUPS, m_slices = FP8_M_SLICES, columns = FP8_COLUMNS, stages = FP8_STAGES,
                         scales = FP8_SCALES, scale_tiles = FP8_SCALE_TILES, pingpong = FP8_PINGPONG;
    static constexpr int a_type = FP8_A_TYPE, b_type = FP8_B_TYPE, out_type = FP8_OUT, bias_type = FP8_BIAS,
                         amax = FP8_AMAX;
    static constexpr int activation = FP8_ACTIVATION, accumulates = FP8_ACCUMULATES;
    static constexpr int store_tiles = FP8_STORE_TILES, buffers = FP8_BUFFERS;
    static constexpr int cluster = FP8_CLUSTER, split_k = FP8_SPLIT_K, group_table = FP8_GROUP_TABLE;
};

// The parameters that sm90_tiled and sm90_grouped begin with: the maps and the CommonArgs of TiledArgs
// (fp8core/kernels/gemm/sm90/tiled.py). Strides are in elements, 0 where a scale is broadcast.
#define TILED_PARAMETERS                                                                                              \
    const __grid_constant__ TensorMap weight_map, const __grid_constant__ TensorMap a_map,                            \
        const __grid_constant__ TensorMap out_map, const __grid_constant__ TensorMap scale_map,                       \
        const float *__restrict__ scale_a, long long scale_a_row, long long scale_a_k,                                \
        const float *__restrict__ scale_b, long long scale_b_row, long long scale_b_k, const void *__restrict__ bias, \
        void *out, long long ldo, int m, int n, int k_blocks, int prefetch_weight
