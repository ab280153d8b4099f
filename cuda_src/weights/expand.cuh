// Expands a scale per shard to one per row: out[row] = scales[shard of row], or scales[0] if there is only one scale or
// any later one is unset. A thread writes one row.
#pragma once
#include "shards.cuh"

template <int CAPACITY, int THREADS>
DEVICE void expand_scales(const float* scales, int count, const Shards<CAPACITY>& shards, float* out, int rows) {
    const int row = static_cast<int>(block_x() * THREADS + thread_x());
    if (row >= rows) return;
    bool one = count == 1;
    for (int i = 1; i < count; ++i) one |= scales[i] <= UNSET;
    out[row] = scales[one ? 0 : shard_of(shards, row)];
}

KERNEL(FP8_THREADS)
expand(const float* scales, int scales_count, Shards<FP8_SHARDS> shards, float* out, int rows) {
    expand_scales<FP8_SHARDS, FP8_THREADS>(scales, scales_count, shards, out, rows);
}
