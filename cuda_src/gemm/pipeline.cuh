// The pipeline of a product: in which order k-blocks pass through a block's rings, and the barriers of their stages.
#pragma once
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"

// A block's k-blocks in the order in which they pass through the rings.
struct KBlockIterator {
    int tile, k_block, left;                  // the position
    int first_k_block, k_blocks, tiles, step; // the block's share of k; all tiles; from one of its tiles to the next

    DEVICE KBlockIterator(int all_tiles, int all_k_blocks, int rank, int ranks) {
        first_k_block = all_k_blocks * rank / ranks;
        k_blocks = all_k_blocks * (rank + 1) / ranks - first_k_block;
        tiles = all_tiles;
        step = (int)gridDim.x / ranks;
        tile = (int)blockIdx.x / ranks;
        begin();
    }
    DEVICE void begin() {
        left = k_blocks;
        k_block = first_k_block;
    }
    DEVICE bool more() const { return tile < tiles; }
    DEVICE void next() {
        ++k_block;
        if (--left == 0) {
            tile += step;
            begin();
        }
    }
};

// Scales of a matrix and their strides.
struct ScaleGrid {
    const float *scales;
    long long row, col;
};

// A place in a ring of SIZE stages; parity is that of the times it was passed before.
template <int SIZE> struct Ring {
    int stage, parity, passed;

    DEVICE explicit Ring(int first) : stage(first), parity(0), passed(0) {}
    DEVICE void advance(int count) {
        stage += count;
        if (stage >= SIZE) {
            stage -= SIZE;
            parity ^= 1;
            passed = 1;
        }
    }
};

// A ring's barriers: full, then empty.
template <int SIZE> struct PipelineBarriers {
    unsigned barriers;

    DEVICE unsigned full(const Ring<SIZE> &at) const { return barriers + 8 * at.stage; }
    DEVICE unsigned empty(const Ring<SIZE> &at) const { return full(at) + 8 * SIZE; }
    DEVICE void wait_full(const Ring<SIZE> &at) const { barrier_wait(full(at), at.parity); }
    DEVICE void wait_empty(const Ring<SIZE> &at) const {
        if (at.passed) barrier_wait(empty(at), at.parity ^ 1);
    }
    DEVICE void release(const Ring<SIZE> &at) const { barrier_arrive(empty(at)); }
};
