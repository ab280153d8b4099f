// Grouped products on sm_90a: the rows of each group times the group's own weight, by the tiles of sm90_tiled. A block
// makes a table of the groups, and from it the tiles (grouped_tiles.cuh). Few rows of a group stream its weight once.
//
// The caller owes what it owes sm90_tiled, with a map of the weights of all groups, which follow each other; blocks may
// have no tiles. Blocks of a cluster share a, of which each loads a part of the rows: they need as many tiles side by
// side.
#include "tiled_constants.cuh"
#include "tiled_block.cuh"

using C = TiledLayout<Config>;

extern "C" __global__ void __launch_bounds__(C::threads, 1) sm90_grouped(TILED_PARAMETERS, GROUP_PARAMETERS) {
    __shared__ GroupTable<C::group_table> table;
    make_tiles<C>(C::Tiles(table, offs, groups, m, n, scale_stride, bias_stride), weight_map, a_map, out_map, scale_map,
                  scale_a, scale_a_row, scale_a_k, scale_b, scale_b_row, scale_b_k, bias, out, ldo, m, n, k_blocks, 0,
                  nullptr, nullptr, 0.0f);
}
