// The threads that share a row (a team), and their reductions, which gather a few words of each warp.
//
// A team has BLOCKS blocks of BLOCK_THREADS threads, and WORDS warps. It calls `start()` first. It has two exchanges:
// `gather<0>` of `first` words per warp, and `gather<1>` of one. Each returns the first words of all warps, then the
// second words, and so on. A kernel calls each of them once.
#pragma once
#include "reduce.cuh"

// Combines COUNT numbers as a tree, to keep the dependency chain short.
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

// Up to so many words, each thread reads all of them: vector loads are faster than a second round of shuffles.
constexpr int MOST_READ = 16, MOST_READ_OF_CLUSTER = 32;

template <class Team>
DEVICE float sum_of_words(const unsigned* words) {
    const float* sums = reinterpret_cast<const float*>(words);
    constexpr int MOST = Team::BLOCKS > 1 ? MOST_READ_OF_CLUSTER : MOST_READ;
    if constexpr (Team::WORDS <= MOST) return combined<Team::WORDS>(sums, [](float a, float b) { return a + b; });
    return warp_sum(lane() < Team::WORDS ? sums[lane()] : 0.0f);
}
template <class Team>
DEVICE float row_sum(Team& team, float x) {
    return sum_of_words<Team>(team.template gather<0>(bits_of(warp_sum(x))));
}
template <class Team>
DEVICE unsigned row_max(Team& team, unsigned x) {
    const unsigned* words = team.template gather<1>(warp_max(x));
    if constexpr (Team::WORDS <= MOST_READ)
        return combined<Team::WORDS>(words, [](unsigned a, unsigned b) { return a > b ? a : b; });
    return warp_max(lane() < Team::WORDS ? words[lane()] : 0u);
}

// Returns argument number `which` of those that follow it.
DEVICE unsigned chosen(unsigned, unsigned x) { return x; }
template <class... More>
DEVICE unsigned chosen(unsigned which, unsigned x, More... more) {
    return which == 0 ? x : chosen(which - 1, more...);
}

// A team of one block.
template <int threads, int first>
struct BlockTeam {
    static constexpr int BLOCK_THREADS = threads, BLOCKS = 1, WORDS = threads / WARP;
    static_assert(threads % WARP == 0 && WORDS <= WARP, "a block is some whole warps");

    DEVICE void start() {}
    template <int place, class... More>
    DEVICE const unsigned* gather(unsigned x, More... more) {
        constexpr int COUNT = 1 + sizeof...(more);
        static_assert(COUNT == (place == 0 ? first : 1), "as many words as the exchange has");
        SHARED alignas(16) unsigned words[COUNT * WORDS];
        if (lane() < COUNT) words[lane() * WORDS + thread_x() / WARP] = chosen(lane(), x, more...);
        block_barrier();
        return words;
    }
};

// A team of the blocks of a cluster, consecutive along x. A warp stores its words into the shared memory of every
// block, and each block waits only for the words that it receives. A block may exit when it has all words of the last
// exchange: no store into it is outstanding then.
template <int threads, int blocks, int first>
struct ClusterTeam {
    static constexpr int BLOCK_THREADS = threads, BLOCKS = blocks, WARPS = threads / WARP, WORDS = WARPS * blocks,
                         PLACES = 2;
    static_assert(WORDS <= WARP, "a warp reads the words of all");
    unsigned* words;
    word64* barriers;
    RemotePlace to;  // this lane's destination in the first exchange

    DEVICE void start() {
        SHARED alignas(16) unsigned memory[(first + 1) * WORDS];
        SHARED word64 barrier[PLACES];
        words = memory, barriers = barrier;
        const unsigned from = block_x() % BLOCKS * WARPS + thread_x() / WARP, which = lane() / BLOCKS;
        to = RemotePlace(&memory[(which < first ? which : 0) * WORDS + from], &barrier[0], lane() % BLOCKS);
        if (thread_x() < WARP) {
            tx_barrier_open(&barrier[0], 4 * WORDS * first);
            tx_barrier_open(&barrier[1], 4 * WORDS);
        }
        cluster_arrive();
        cluster_wait();
    }
    // Each lane stores one word into one block.
    template <int place, class... More>
    DEVICE const unsigned* gather(unsigned x, More... more) {
        constexpr int COUNT = 1 + sizeof...(more);
        static_assert(COUNT == (place == 0 ? first : 1), "as many words as the exchange has");
        static_assert(COUNT * BLOCKS <= WARP, "a lane stores one word");
        const unsigned which = lane() / BLOCKS;
        if (which < COUNT) to.store(chosen(which, x, more...), place * first * WORDS, place);
        tx_barrier_wait(&barriers[place]);
        return words + place * first * WORDS;
    }
};

template <int threads, int blocks, int first = 1>
struct RowTeam : ClusterTeam<threads, blocks, first> {};
template <int threads, int first>
struct RowTeam<threads, 1, first> : BlockTeam<threads, first> {};
