// Tiles of a product with blocked scales, and the warps that load them, k-block by k-block.
#pragma once
#include "../pipeline.cuh"

#define BLOCK_K 128
#define ROWS (128 * M_SLICES)
#define A_BYTES (ROWS * BLOCK_K)
#define WEIGHT_BYTES (COLUMNS * BLOCK_K)
#define SCALES (ROWS + (SCALE_ROWS == 1 ? COLUMNS : 2)) // of a k-block: a's rows, then the weight's
#define SCALE_THREADS 64
#define ABREAST (16 / M_SLICES) // tiles of rows that are taken before the next channels

// A block's tiles in the order in which it takes them: tiles computed at a time share rows and channels in L2.
struct Tiles {
    int down, across, at;

    DEVICE Tiles(int m, int n)
        : down((m + ROWS - 1) / ROWS), across((n + COLUMNS - 1) / COLUMNS), at((int)blockIdx.x) {}
    DEVICE bool more() const { return at < down * across; }
    DEVICE void next() { at += (int)gridDim.x; }
    // The first row and the first channel.
    DEVICE int2 origin() const {
        const int first = at / (ABREAST * across) * ABREAST;
        const int rows = min(ABREAST, down - first), within = at - first * across;
        return make_int2((first + within % rows) * ROWS, within / rows * COLUMNS);
    }
};

// A thread: the tiles of one operand, so many bytes of a stage.
template <int BYTES, bool OF_WEIGHT>
DEVICE void load_tiles(const TensorMap *map, unsigned ring, const PipelineBarriers<STAGES> &pipeline, Tiles tiles,
                       int k_blocks) {
    for (Ring<STAGES> at(0); tiles.more(); tiles.next()) {
        const int2 origin = tiles.origin();
#pragma unroll 1
        for (int k_block = 0; k_block < k_blocks; ++k_block, at.advance(1)) {
            pipeline.wait_empty(at);
            barrier_expect(pipeline.full(at), BYTES);
            tile_load(ring + at.stage * BYTES, map, k_block * BLOCK_K, OF_WEIGHT ? origin.y : origin.x,
                      pipeline.full(at));
        }
    }
}

// SCALE_THREADS threads: the scales of both.
DEVICE void load_scales(float (&stage_scales)[STAGES][SCALES], const PipelineBarriers<STAGES> &pipeline,
                        const ScaleGrid &of_a, const ScaleGrid &of_b, Tiles tiles, int m, int n, int k_blocks,
                        int thread) {
    for (Ring<STAGES> at(0); tiles.more(); tiles.next()) {
        constexpr int words = (SCALES + SCALE_THREADS - 1) / SCALE_THREADS; // of a thread
        const int2 origin = tiles.origin();
        const float *from[words];
#pragma unroll
        for (int i = 0; i < words; ++i) {
            const int place = thread + SCALE_THREADS * i;
            const int row = min(origin.x + place, m - 1), channel = min(origin.y + (place - ROWS) * SCALE_ROWS, n - 1);
            from[i] = place < ROWS ? of_a.scales + row * of_a.row : of_b.scales + channel / SCALE_ROWS * of_b.row;
        }
#pragma unroll 1
        for (int left = k_blocks; left > 0; --left, at.advance(1)) {
            pipeline.wait_empty(at);
#pragma unroll
            for (int i = 0; i < words; ++i) {
                const int place = thread + SCALE_THREADS * i;
                if (place < SCALES) word_copy(shared_address(&stage_scales[at.stage][place]), from[i]);
                from[i] += place < ROWS ? of_a.col : of_b.col;
            }
            words_arrive(pipeline.full(at));
        }
    }
    words_wait();
}
