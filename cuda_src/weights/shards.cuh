// The ends of fused shards, passed by value in a kernel's arguments.
#pragma once
#include "../common/values.cuh"

// A scale but the first that is at most this stands for one that was never loaded: the weight was fused on disk, and
// all of its shards have the first scale.
constexpr float UNSET = -448.0f;

// end[i]: the number of rows in shards 0 to i; the largest int after the last shard.
template <int CAPACITY>
struct Shards {
    int end[CAPACITY];
};

// The shard that contains `row`: the first one that ends after it. CAPACITY is a power of two.
template <int CAPACITY>
DEVICE int shard_of(const Shards<CAPACITY>& shards, int row) {
    int shard = 0;
#pragma unroll
    for (int half = CAPACITY / 2; half > 0; half /= 2)
        if (row >= shards.end[shard + half - 1]) shard += half;
    return shard;
}
