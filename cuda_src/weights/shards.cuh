// The ends of fused shards, passed by value in a kernel's arguments.
#pragma once
#include "../common/values.cuh"

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
