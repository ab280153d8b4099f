// counts[b][e] = how many of the `chunk` consecutive choices of block b are expert e.
// The caller owes: EXPERTS >= experts.
#pragma once
#include "experts.cuh"

template <int EXPERTS, int THREADS, class Id>
DEVICE void count_chunk(const Id* ids, int choices, int chunk, int experts, int* counts) {
    SHARED int found[EXPERTS];
    for (int i = (int)thread_x(); i < EXPERTS; i += THREADS) found[i] = 0;
    grid_dependency_launch();
    grid_dependency_wait();
    block_barrier();
    const int begin = (int)block_x() * chunk, end = choices - begin < chunk ? choices : begin + chunk;
    for_each_choice<THREADS>(ids, begin, end, experts, [&](int, int expert) { atomic_add_shared(&found[expert], 1); });
    block_barrier();
    for (int i = (int)thread_x(); i < experts; i += THREADS) counts[(long long)block_x() * experts + i] = found[i];
}

KERNEL(FP8_THREADS) count_experts(const void* topk_ids, int choices, int chunk, int experts, int* counts) {
    count_chunk<FP8_EXPERTS, FP8_THREADS>(static_cast<const FP8_ID*>(topk_ids), choices, chunk, experts, counts);
}
