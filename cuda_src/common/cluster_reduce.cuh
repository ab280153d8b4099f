// The threads that share a row (a team), and their reductions: each warp's word is gathered where all can read it.
//
// A team has BLOCK_THREADS threads a block, BLOCKS blocks, and WORDS words, one a warp. `start()` is called first;
// `gather<place>(x)` returns the words of all warps, and each `place` is used once in a kernel.
#pragma once
#include "reduce.cuh"

// Combines COUNT numbers as a tree, whose dependency chain is short.
template <int COUNT, class T, class Combine>
DEVICE T combined(const T* x, const Combine& combine) {
    if constexpr (COUNT == 1) return x[0];
    else return combine(combined<COUNT / 2>(x, combine), combined<COUNT - COUNT / 2>(x + COUNT / 2, combine));
}

DEVICE float warp_sum(float x) {
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

// Up to this many words each thread reads all of them: vector loads are faster than a second round of shuffles.
constexpr int MOST_READ = 16;

template <class Team>
DEVICE float row_sum(Team& team, float x) {
    const unsigned* words = team.template gather<0>(bits_of(warp_sum(x)));
    const float* sums = reinterpret_cast<const float*>(words);
    if constexpr (Team::WORDS <= MOST_READ) return combined<Team::WORDS>(sums, [](float a, float b) { return a + b; });
    return warp_sum(lane() < Team::WORDS ? sums[lane()] : 0.0f);
}
template <class Team>
DEVICE unsigned row_max(Team& team, unsigned x) {
    const unsigned* words = team.template gather<1>(warp_max(x));
    if constexpr (Team::WORDS <= MOST_READ)
        return combined<Team::WORDS>(words, [](unsigned a, unsigned b) { return a > b ? a : b; });
    return warp_max(lane() < Team::WORDS ? words[lane()] : 0u);
}

// A block.
template <int threads>
struct BlockTeam {
    static constexpr int BLOCK_THREADS = threads, BLOCKS = 1, WORDS = threads / WARP;
    static_assert(threads % WARP == 0 && WORDS <= WARP, "a block is some whole warps");

    DEVICE void start() {}
    template <int place>
    DEVICE const unsigned* gather(unsigned x) {
        SHARED alignas(16) unsigned words[WORDS];
        if (lane() == 0) words[thread_x() / WARP] = x;
        block_barrier();
        return words;
    }
};

// The blocks of a cluster, consecutive along x. A warp stores its word into every block's shared memory, and each block
// waits only for its own words. A block that has all of them may end: no store to it is outstanding.
template <int threads, int blocks>
struct ClusterTeam {
    static constexpr int BLOCK_THREADS = threads, BLOCKS = blocks, WARPS = threads / WARP, WORDS = WARPS * blocks,
                         PLACES = 2;
    static_assert(WORDS <= WARP, "a warp reads the words of all");
    unsigned* words;
    word64* barriers;

    DEVICE void start() {
        SHARED alignas(16) unsigned memory[PLACES * WORDS];
        SHARED word64 barrier[PLACES];
        words = memory, barriers = barrier;
        if (thread_x() < WARP) {
            for (int place = 0; place < PLACES; ++place) tx_barrier_open(&barrier[place], 4 * WORDS);
        }
        cluster_arrive();
        cluster_wait();
    }
    template <int place>
    DEVICE const unsigned* gather(unsigned x) {
        unsigned* const gathered = words + place * WORDS;
        const unsigned from = block_x() % BLOCKS * WARPS + thread_x() / WARP;
        if (lane() < BLOCKS) dsmem_store(&gathered[from], x, &barriers[place], lane());
        tx_barrier_wait(&barriers[place]);
        return gathered;
    }
};

template <int threads, int blocks>
struct RowTeam : ClusterTeam<threads, blocks> {};
template <int threads>
struct RowTeam<threads, 1> : BlockTeam<threads> {};
