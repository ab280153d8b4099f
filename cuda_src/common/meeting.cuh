// How every thread of a launch comes to know the largest size that any block found: begin() once, early, then
// largest() once, by all threads. Sizes are bits of non-negative fp32 numbers.
#pragma once
#include "reduce.cuh"

// A launch of one cluster of `blocks`, at most WARP: each warp sends its size to every block.
template <int threads, int blocks>
struct Meeting {
    static constexpr int WARPS = threads / WARP, SIZES = blocks * WARPS;
    struct Shared {
        word64 mail;
        unsigned sizes[SIZES];
    };
    DEVICE Shared& shared() {
        SHARED Shared here;
        return here;
    }

    DEVICE void begin() {
        if (thread_x() < WARP) mail_open(&shared().mail, SIZES * 4);
        cluster_arrive();
    }
    DEVICE unsigned largest(unsigned size) {
        Shared& here = shared();
        size = warp_max(size);
        cluster_wait();
        if (lane() < blocks) mail_send(&here.sizes[block_x() * WARPS + thread_x() / WARP], size, &here.mail, lane());
        mail_wait(&here.mail);
        size = 0;
        for (int i = lane(); i < SIZES; i += WARP) size = here.sizes[i] > size ? here.sizes[i] : size;
        return warp_max(size);
    }
};

// A launch of one block.
template <int threads>
struct Meeting<threads, 1> {
    DEVICE void begin() {}
    DEVICE unsigned largest(unsigned size) { return block_max<threads>(size); }
};

// A cooperative launch of one block a multiprocessor, at most `threads` of them.
//
// Blocks meet through flags, one a block: a 64-bit word of the launch's epoch and the block's largest size, so nothing
// else has to be ordered. A block finds the epoch in its own flag of the launch before, so the words need no reset
// between launches, no argument that a graph would bake in, and no memory but the module's. What makes this right:
//   - every launch of the module has the same grid, one block a multiprocessor, and asks for more than half of a
//     multiprocessor's shared memory: no multiprocessor holds two blocks, from whichever streams or graphs they come;
//   - so a block of launch n + 1 begins only where a block of launch n has ended, that is after all flags n were
//     written; and it passes its own meeting only when all blocks n have ended. Two sets of flags, used by turns, are
//     enough. A programmatic launch changes none of this: its blocks come early, but only where there is room;
//   - the launch is cooperative, so two grids cannot each hold part of the device and wait for the rest;
//   - what follows programmatically is let in when all blocks have asked for it, so when all of them are there.
// All blocks poll, and a hundred multiprocessors at the same lines queue up: so each flag is written in COPIES places.
constexpr int COPIES = 8;
MODULE_MEMORY word64 meeting_flags[2][COPIES][CLUSTER == 0 ? THREADS : 1];

template <int threads>
struct Meeting<threads, 0> {
    unsigned epoch = 0;  // this launch's, known to thread 0 alone

    DEVICE void begin() {
        if (thread_x() != 0) return;
        const unsigned even = static_cast<unsigned>(load_relaxed(&meeting_flags[0][0][block_x()]) >> 32);
        const unsigned odd = static_cast<unsigned>(load_relaxed(&meeting_flags[1][0][block_x()]) >> 32);
        epoch = (static_cast<int>(odd - even) > 0 ? odd : even) + 1;
    }
    DEVICE unsigned largest(unsigned size) {
        SHARED unsigned shared_epoch;
        if (thread_x() == 0) shared_epoch = epoch;
        size = block_max<threads, 0>(size);
        const unsigned now = shared_epoch;
        auto& flags = meeting_flags[now % 2];
        if (thread_x() < COPIES) post_relaxed(&flags[thread_x()][block_x()], static_cast<word64>(now) << 32 | size);
        if (thread_x() < grid_x()) {
            const word64* const flag = &flags[block_x() % COPIES][thread_x()];
            word64 seen = load_relaxed(flag);
            while (seen >> 32 != now) {
                pause();
                seen = load_relaxed(flag);
            }
            size = static_cast<unsigned>(seen);
        }
        return block_max<threads, 1>(size);
    }
};
