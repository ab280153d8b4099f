// A row shared by the blocks of a cluster (sm_90): a warp's word goes to every block, and is waited for there alone.
#pragma once
#include "hopper.cuh"
#include "common/row_team.cuh"

// Consecutive blocks along x are a cluster. A block that has all words may end: its own have arrived where they are
// waited for, and nobody writes to it any more.
template <int threads, int blocks>
struct ClusterTeam {
    static constexpr int THREADS = threads, BLOCKS = blocks, WARPS = threads / WARP, WORDS = WARPS * blocks, PLACES = 2;
    static_assert(WORDS <= WARP, "a warp reads the words of all");
    unsigned* words;
    uint32 full;  // the barriers of the places

    DEVICE void meet() {
        SHARED alignas(16) unsigned memory[PLACES * WORDS];
        SHARED word64 barriers[PLACES];
        words = memory;
        full = shared_address(barriers);
        if (thread_x() == 0) {
            for (int place = 0; place < PLACES; ++place) {
                barrier_init(full + 8 * place, 1);
                barrier_init_fence();
                barrier_expect(full + 8 * place, 4 * WORDS);
            }
        }
        cluster_arrive();
        cluster_wait();
    }
    template <int place>
    DEVICE const unsigned* gather(unsigned x) {
        const unsigned* const gathered = words + place * WORDS;
        if (lane() < BLOCKS) {
            const uint32 mine = shared_address(gathered) + 4 * (cluster_rank() * WARPS + thread_x() / WARP);
            remote_store(cluster_address(mine, lane()), x, cluster_address(full + 8 * place, lane()));
        }
        barrier_wait(full + 8 * place, 0);
        return gathered;
    }
};

template <int threads, int blocks>
struct RowTeam : ClusterTeam<threads, blocks> {};
template <int threads>
struct RowTeam<threads, 1> : BlockTeam<threads> {};
