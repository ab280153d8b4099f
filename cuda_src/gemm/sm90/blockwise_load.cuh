// Tiles of a product with blocked scales, and the warps that load them, k-block by k-block.
#pragma once
#include "../pipeline.cuh"
#include "../scheduler.cuh"

// What follows from how the kernel is compiled (Config of blockwise.cu).
template <class Config>
struct BlockwiseLayout : Config {
    static_assert(Config::m_slices == 1 || Config::m_slices == 2, "what the registers of a consumer hold");
    static_assert(Config::columns <= BLOCK_K, "a tile has at most two scales of the weight");
    static_assert(Config::scale_rows == 1 || Config::scale_rows == BLOCK_K, "scales of 1x128 or 128x128");

    static constexpr int rows = 128 * Config::m_slices;                                       // of a tile
    static constexpr int a_bytes = rows * BLOCK_K, weight_bytes = Config::columns * BLOCK_K;  // of a stage
    static constexpr int sums = Config::columns / 2;  // of a thread, in 64 rows of a tile
    // Of a k-block: a's rows, then the weight's, of which a tile can have two.
    static constexpr int scales = rows + (Config::scale_rows == 1 ? Config::columns : 2);
    static constexpr int scale_threads = 64;
    using Tiles = PersistentTiles<rows, Config::columns, 16 / Config::m_slices>;
};

// A thread: the tiles of one operand, so many bytes of a stage.
template <class C, int bytes, bool of_weight>
DEVICE void load_tiles(const TensorMap* map, unsigned ring, const PipelineBarriers<C::stages>& pipeline,
                       typename C::Tiles tiles, int k_blocks) {
    for (Ring<C::stages> at(0); tiles.more(); tiles.next()) {
        const TileOrigin origin = tiles.origin();
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, at.advance(1)) {
            pipeline.wait_empty(at);
            barrier_expect(pipeline.full(at), bytes);
            tile_load(ring + at.stage * bytes, map, k_block * BLOCK_K, of_weight ? origin.column : origin.row,
                      pipeline.full(at));
        }
    }
}

// scale_threads threads: the scales of both.
template <class C>
DEVICE void load_scales(float (&stage_scales)[C::stages][C::scales], const PipelineBarriers<C::stages>& pipeline,
                        const ScaleGrid& of_a, const ScaleGrid& of_b, typename C::Tiles tiles, int m, int n,
                        int k_blocks, int thread) {
    for (Ring<C::stages> at(0); tiles.more(); tiles.next()) {
        constexpr int words = (C::scales + C::scale_threads - 1) / C::scale_threads;  // of a thread
        const TileOrigin origin = tiles.origin();
        const float* from[words];
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = thread + C::scale_threads * i;
            const int row = min(origin.row + place, m - 1),
                      channel = min(origin.column + (place - C::rows) * C::scale_rows, n - 1);
            from[i] = place < C::rows ? of_a.scales + row * of_a.row : of_b.scales + channel / C::scale_rows * of_b.row;
        }
#pragma unroll 1
        for (int left = k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_empty(at);
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const int place = thread + C::scale_threads * i;
                if (place < C::scales) word_copy(shared_address(&stage_scales[at.stage][place]), from[i]);
                from[i] += place < C::rows ? of_a.col : of_b.col;
            }
            words_arrive(pipeline.full(at));
        }
    }
    words_wait();
}
