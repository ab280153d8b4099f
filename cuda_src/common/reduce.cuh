// The largest of the numbers that a team of threads holds.
//
// Magnitudes are compared as the bits of non-negative fp32 numbers, which order as the numbers do.
#pragma once

// team: a power of two up to WARP, of consecutive lanes. The result is in every lane.
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

// The same of a warp or a half of one, by warp_max alone: sooner than shuffles where that is one instruction.
template <int team>
DEVICE unsigned wide_team_max(unsigned x) {
    static_assert(team == WARP || 2 * team == WARP, "a team is a warp or a half of one");
    if constexpr (team == WARP) return warp_max(x);
    const bool former = lane() < team;
    const unsigned first = warp_max(former ? x : 0u), second = warp_max(former ? 0u : x);
    return former ? first : second;
}

// All threads of a block of `threads`, a multiple of WARP, call it. The result is in every thread; a `place` is used
// once in a kernel, or there is a barrier between two uses.
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
