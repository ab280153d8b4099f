// Grid-wide maximum: every thread of a launch receives the largest magnitude of all blocks. All threads call begin()
// once, then largest() once. Except with a resident grid, begin() touches no memory but the launch's own, so it comes
// before the wait for the preceding kernel: a cluster's blocks meet without waiting for a load. Magnitudes are the bits
// of non-negative fp32 numbers.
#pragma once
#include "reduce.cuh"

// A launch of one cluster of `blocks` blocks, at most WARP: each warp sends its magnitude to every block.
template <int threads, int blocks>
struct GridMax {
    static constexpr int WARPS = threads / WARP, MAGNITUDES = blocks * WARPS;
    struct Shared {
        word64 barrier;
        unsigned magnitudes[MAGNITUDES];
    };
    DEVICE Shared& shared() {
        SHARED Shared here;
        return here;
    }

    DEVICE void begin() {
        if (thread_x() < WARP) tx_barrier_open(&shared().barrier, MAGNITUDES * 4);
        cluster_arrive();
    }
    DEVICE unsigned largest(unsigned absmax) {
        Shared& here = shared();
        absmax = warp_max(absmax);
        cluster_wait();
        if (lane() < blocks)
            dsmem_store(&here.magnitudes[block_x() * WARPS + thread_x() / WARP], absmax, &here.barrier, lane());
        tx_barrier_wait(&here.barrier);
        absmax = 0;
        for (int i = lane(); i < MAGNITUDES; i += WARP)
            absmax = here.magnitudes[i] > absmax ? here.magnitudes[i] : absmax;
        return warp_max(absmax);
    }
};

// A launch of one block.
template <int threads>
struct GridMax<threads, 1> {
    DEVICE void begin() {}
    DEVICE unsigned largest(unsigned absmax) { return block_max<threads>(absmax); }
};

// A cooperative launch of one block per multiprocessor, at most `threads` blocks.
//
// Each block publishes one flag: 64 bits with the launch's epoch and the block's largest magnitude, so no other memory
// has to be ordered. A block derives the epoch from its own flag of the launch before. So the flags need no reset
// between launches, no argument that a graph would bake in, and no memory but the module's. This is correct because:
//   - every launch of the module has the same grid, one block per multiprocessor, and asks for more than half of a
//     multiprocessor's shared memory: no multiprocessor holds two of its blocks, from whichever streams or graphs;
//   - so a block of launch n + 1 begins only where a block of launch n has exited, which is after all flags of launch n
//     were written; and it passes its own grid_max only when all blocks of launch n have exited. Two alternating sets
//     of flags are enough. A programmatic launch changes nothing: its blocks begin early, but only where there is room;
//   - the launch is cooperative, so two grids cannot each hold a part of the device and wait for the rest;
//   - a programmatic successor may begin only when all blocks have triggered it, that is, when all are resident.
// All blocks poll. Polls of one line by a hundred multiprocessors are serialized, so each flag is stored COPIES times.
constexpr int COPIES = 8;
MODULE_MEMORY word64 grid_max_flags[2][COPIES][CLUSTER == 0 ? THREADS : 1];

template <int threads>
struct GridMax<threads, 0> {
    unsigned epoch = 0;  // of this launch; only thread 0 knows it

    DEVICE void begin() {
        if (thread_x() != 0) return;
        const unsigned even = static_cast<unsigned>(load_relaxed(&grid_max_flags[0][0][block_x()]) >> 32);
        const unsigned odd = static_cast<unsigned>(load_relaxed(&grid_max_flags[1][0][block_x()]) >> 32);
        epoch = (static_cast<int>(odd - even) > 0 ? odd : even) + 1;
    }
    DEVICE unsigned largest(unsigned absmax) {
        SHARED unsigned shared_epoch;
        if (thread_x() == 0) shared_epoch = epoch;
        absmax = block_max<threads, 0>(absmax);
        const unsigned now = shared_epoch;
        auto& flags = grid_max_flags[now % 2];
        if (thread_x() < COPIES) post_relaxed(&flags[thread_x()][block_x()], static_cast<word64>(now) << 32 | absmax);
        if (thread_x() < grid_x()) {
            const word64* const flag = &flags[block_x() % COPIES][thread_x()];
            word64 seen = load_relaxed(flag);
            while (seen >> 32 != now) {
                pause();
                seen = load_relaxed(flag);
            }
            absmax = static_cast<unsigned>(seen);
        }
        return block_max<threads, 1>(absmax);
    }
};
