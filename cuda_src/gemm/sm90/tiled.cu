// Products of many rows on sm_90a: out[m, n] = round(scales * (a[m, k] @ weight[n, k]^T) + bias). tiled_block.cuh has
// the pipeline, tiled_constants.cuh the constants.
//
// The caller owes: tensor maps of uint8, zero fill out of bounds, boxes of COLUMNS / CLUSTER rows (weight) and of a
// tile's rows, at most m rounded up to 8 (a), x 128 columns, 128-byte swizzle; a map of the scales of a, as words,
// boxes of one row x a tile's rows; a map of out, as bytes, boxes of 64 rows (16 if k is split) x piece_bytes, swizzled
// by piece_bytes; a grid of whole clusters, whose blocks all have tiles (if k is split, one each and at least one
// k-block); scale strides in elements, 0 where broadcast; 0 in amax before the launch; dynamic shared memory of STAGES
// * (weight_bytes + a_bytes) + the buffers + SplitSums::bytes + 1,024. With `prefetch_weight` the weight, its scales
// and the bias may be read before the preceding kernel has ended; otherwise dependents start only after the wait, as in
// sm90_decode.
#include "tiled_constants.cuh"
#include "tiled_block.cuh"

using C = TiledLayout<Config>;

extern "C" __global__ void __launch_bounds__(C::threads, 1)
    sm90_tiled(TILED_PARAMETERS, const float* out_scale, float* amax, float beta) {
    make_tiles<C>(C::Tiles(m, n), weight_map, a_map, out_map, scale_map, scale_a, scale_a_row, scale_a_k, scale_b,
                  scale_b_row, scale_b_k, bias, out, ldo, m, n, k_blocks, prefetch_weight, out_scale, amax, beta);
}
