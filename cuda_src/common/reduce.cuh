// Maxima over the threads of a team.
//
// Magnitudes are compared as the bits of non-negative fp32 numbers, which have the same order as the numbers.
#pragma once

// team: consecutive lanes, a power of two up to WARP. Every lane gets the result.
template <int team>
DEVICE unsigned team_max(unsigned x) {
    static_assert(team <= WARP && (team & (team - 1)) == 0, "a team is part of a warp");
    if constexpr (team == WARP) {
        x = warp_max(x);
    } else {
        for (int mask = team / 2; mask > 0; mask /= 2) {
            const unsigned other = shuffle_xor(x, mask);
            x = x > other ? x : other;
        }
    }
    return x;
}

// The same for a warp or half of one, by warp_max alone: faster than shuffles if that is one instruction.
template <int team>
DEVICE unsigned wide_team_max(unsigned x) {
    static_assert(team == WARP || 2 * team == WARP, "a team is a warp or a half of one");
    if constexpr (team == WARP) return warp_max(x);
    const bool former = lane() < team;
    const unsigned first = warp_max(former ? x : 0u), second = warp_max(former ? 0u : x);
    return former ? first : second;
}

// Called by all threads of a block of `threads`, a multiple of WARP; every thread gets the result. A kernel uses a
// `place` only once, or with a barrier between two uses.
template <int threads, int place = 0>
DEVICE unsigned block_max(unsigned x) {
    static_assert(threads % WARP == 0 && threads / WARP <= WARP, "a block is some whole warps");
    if constexpr (threads == WARP) return warp_max(x);
    SHARED unsigned largest[threads / WARP];
    x = warp_max(x);
    if (lane() == 0) largest[thread_x() / WARP] = x;
    block_barrier();
    return warp_max(lane() < threads / WARP ? largest[lane()] : 0u);
}
