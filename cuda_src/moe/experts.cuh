// Counts of choices by expert in shared memory.
#pragma once
#include "../common/scan.cuh"

// For all threads of a block: calls give(choice, expert) for the choices from `begin` to `end` whose expert is below
// `experts`. Id is unsigned, so that no negative number is.
template <int THREADS, class Id, class Give>
DEVICE void for_each_choice(const Id* ids, int begin, int end, int experts, const Give& give) {
    constexpr int AT_ONCE = 8;  // loads in flight
    for (int first = begin + (int)thread_x(); first < end; first += AT_ONCE * THREADS) {
        Id given[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) given[i] = first + i * THREADS < end ? ids[first + i * THREADS] : ~Id(0);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (given[i] < Id(experts)) give(first + i * THREADS, (int)given[i]);
    }
}
