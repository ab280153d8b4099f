// Which of a block's tiles a math warpgroup makes, and when it multiplies. Cooperative: all make a part of each tile.
// Ping-pong: each of two makes every other tile whole; while one multiplies, the other ends its tile and stores it.
#pragma once
#include "tiled_layout.cuh"

template <class C>
struct TileSequence {
    static constexpr int step = C::pingpong ? 2 : 1;
    static constexpr int barrier = C::groups + 1;  // the first one behind those of `TileStore`
    static constexpr int threads = 256;            // that share one: those that await it, and those that arrive
    int group, left;                               // left: the block's tiles from this warpgroup's next one on

    DEVICE TileSequence(int group, int tiles) : group(group), left(C::pingpong ? tiles - group : tiles) {
        if (C::pingpong && group == 1) pass();
    }
    // Before the first and after each tile: whether this warpgroup makes another one.
    DEVICE bool any() const { return C::pingpong ? left > 0 : left != 0; }
    // At a tile's beginning: it counts no longer.
    DEVICE void take() { left -= step; }
    // Amid a tile: whether the block has a tile behind it, whosever it is.
    DEVICE bool followed() const { return left > 1 - step; }

    // By named barriers: a wait for the other warpgroup's products to be issued, and what ends its wait. A warpgroup that
    // did not wait could take the phase before the last of a full barrier, which has the same parity, for its own.
    DEVICE void await() const { threads_sync(barrier + group, threads); }
    DEVICE void pass() const { threads_arrive(barrier + 1 - group, threads); }
};
