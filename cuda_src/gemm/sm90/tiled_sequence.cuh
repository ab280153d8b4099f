// Which of a block's tiles a consumer warpgroup makes, and when it multiplies. Cooperative: each makes a part of every
// tile. Ping-pong: two make whole tiles by turns; while one multiplies, the other runs the epilogue of its tile.
#pragma once
#include "tiled_layout.cuh"

template <class C>
struct TileSequence {
    static constexpr int step = C::pingpong ? 2 : 1;
    static constexpr int barrier = C::groups + 1;  // the first named barrier after those of `TileStore`
    static constexpr int threads = 256;            // of a barrier: those that wait, and those that arrive
    int group, left;                               // left: the block's tiles from this warpgroup's next one on

    DEVICE TileSequence(int group, int tiles) : group(group), left(C::pingpong ? tiles - group : tiles) {
        if (C::pingpong && group == 1) pass();
    }
    // Before the first tile and after each: whether this warpgroup makes another one.
    DEVICE bool any() const { return C::pingpong ? left > 0 : left != 0; }
    // At the beginning of a tile: takes it off `left`.
    DEVICE void take() { left -= step; }
    // During a tile: whether the block has another one after it, of either warpgroup.
    DEVICE bool followed() const { return left > 1 - step; }

    // By named barriers: `await` waits until the other warpgroup has issued its products, `pass` ends the other's wait.
    // A warpgroup that did not wait could mistake the last phase but one of a full barrier, which has the same parity,
    // for its own.
    DEVICE void await() const { threads_sync(barrier + group, threads); }
    DEVICE void pass() const { threads_arrive(barrier + 1 - group, threads); }
};
