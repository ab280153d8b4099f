// The pipeline of a product: positions in the rings through which k-blocks pass, and the mbarriers of their stages.
#pragma once
#include "../ptx/tma.cuh"
#include "../ptx/wgmma.cuh"
#include "../common/scale.cuh"

// Scales of a matrix and their strides.
struct ScaleGrid {
    const float* scales;
    long long row, col;
};

// A position in a ring of SIZE stages. `parity` is that of the number of times it has wrapped around; `passed` tells
// whether it has wrapped around at all.
template <int SIZE>
struct Ring {
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
    // For a consumer: advances by any count.
    DEVICE void skip(int count) {
        const int from = stage + count;
        parity ^= from / SIZE & 1;
        stage = from % SIZE;
    }
};

// The address of an array in shared memory, a multiple of 8, as a number that the compiler keeps in a register. Other
// addresses it computes anew where they are used, beginning with a read of a special register; NVRTC 13.5 does so in
// each round of a loop that waits for barriers.
DEVICE unsigned kept_address(const void* p) {
    unsigned address = shared_address(p);
#if FP8CORE_PTX
    asm("and.b32 %0, %0, -8;" : "+r"(address));
#endif
    return address;
}

// A ring's mbarriers: a full one per stage, then an empty one per stage.
template <int SIZE>
struct PipelineBarriers {
    unsigned barriers;

    // Called by one thread. In a phase so many threads arrive at each full, and at each empty, barrier.
    DEVICE void init(int full_arrivals, int empty_arrivals) const {
#pragma unroll
        for (int i = 0; i < SIZE; ++i) {
            barrier_init(barriers + 8 * i, full_arrivals);
            barrier_init(barriers + 8 * (SIZE + i), empty_arrivals);
        }
    }
    DEVICE unsigned full(const Ring<SIZE>& at) const { return barriers + 8 * at.stage; }
    DEVICE unsigned empty(const Ring<SIZE>& at) const { return full(at) + 8 * SIZE; }
    DEVICE void wait_full(const Ring<SIZE>& at) const { barrier_wait(full(at), at.parity); }
    DEVICE void wait_empty(const Ring<SIZE>& at) const {
        if (at.passed) barrier_wait(empty(at), at.parity ^ 1);
    }
    DEVICE void release(const Ring<SIZE>& at) const { barrier_arrive(empty(at)); }
};
