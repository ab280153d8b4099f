// Requantizes fused shards, each with a scale of its own, to the largest of the scales.
//   max_scale = scales[0] if there is one scale or any later one is the mark "unset" (<= UNSET), else max(scales), NaN
//   if any is. out = encode(RN(RN(float(code) * scales[shard]) * RN(1 / max_scale))), clamped. Codes stay as they are
//   in a shard whose scale is max_scale, if there is one scale or the mark, and if max_scale is 0 (below 2**-126),
//   infinite or NaN.
// Every thread or warp decides this for itself from the scales, without a second launch or a host synchronization.
//
// A block has ACROSS x (THREADS / ACROSS) threads with VECTOR codes each, and handles REQUANTIZE_ROWS rows per row of
// threads. Block b has column tile b % column_tiles of row tile b / column_tiles.
// The caller owes: count <= CAPACITY; rows of weight and out aligned to VECTOR bytes. out may be weight; otherwise they
// must not overlap.
#pragma once
#include "shards.cuh"

constexpr int REQUANTIZE_ROWS = 2;

struct Decision {
    float max_scale;
    bool rewrite;
};

template <int CAPACITY>
DEVICE Decision decide_scale(const float* scales, int count) {
    // Compares scales as integers of the same order, because the maximum of floats flushes subnormal numbers to 0.
    unsigned highest = 0, unset = 0, nan = 0;
    const auto consider = [&](int i) {
        const float scale = scales[i];
        const unsigned bits = bits_of(scale), order = bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
        unset |= i > 0 && scale <= UNSET;
        nan |= scale != scale;
        highest = order > highest ? order : highest;
    };
    if constexpr (CAPACITY <= 8) {
#pragma unroll
        for (int i = 0; i < CAPACITY; ++i) consider(i < count ? i : 0);
    } else {
        for (int i = lane(); i < count; i += WARP) consider(i);
#pragma unroll
        for (int mask = WARP / 2; mask > 0; mask /= 2) {
            const unsigned other = shuffle_xor(highest, mask);
            highest = other > highest ? other : highest;
            unset |= shuffle_xor(unset, mask);
            nan |= shuffle_xor(nan, mask);
        }
    }
    if (count == 1 || unset) return {scales[0], false};
    if (nan) return {float_of(0x7fc00000u), false};
    const float largest = float_of(highest ^ (highest >> 31 ? 0x80000000u : 0xffffffffu));
    return {largest, magnitude(largest) >= SMALLEST_NORMAL && magnitude(largest) <= LARGEST_FLOAT};
}

template <int FORMAT, int CAPACITY, int VECTOR, int ACROSS, int THREADS>
DEVICE void requantize_shards(const byte* weight, long long weight_stride, const float* scales, int count,
                              const Shards<CAPACITY>& shards, byte* out, long long out_stride, float* max_scale,
                              int rows, int cols, int column_tiles) {
    constexpr int DOWN = THREADS / ACROSS;
    const int col = (int(block_x() % column_tiles) * ACROSS + int(thread_x() % ACROSS)) * VECTOR;
    const int first = int(block_x() / column_tiles) * (DOWN * REQUANTIZE_ROWS) + int(thread_x() / ACROSS);
    const int valid = cols - col;
    grid_dependency_launch();
    grid_dependency_wait();

    // Load the codes before it is known whether they are needed.
    Codes<FORMAT, VECTOR> codes[REQUANTIZE_ROWS];
#pragma unroll
    for (int i = 0; i < REQUANTIZE_ROWS; ++i)
        if (valid > 0 && first + i * DOWN < rows)
            codes[i].load_from(weight + (first + i * DOWN) * weight_stride + col, valid);
    const Decision decision = decide_scale<CAPACITY>(scales, count);
    if (block_x() == 0 && thread_x() == 0) *max_scale = decision.max_scale;
    if (valid <= 0) return;
    const float reciprocal = reciprocal_exact(decision.max_scale);
#pragma unroll
    for (int i = 0; i < REQUANTIZE_ROWS; ++i) {
        const int row = first + i * DOWN;
        if (row >= rows) break;
        const float scale = decision.rewrite ? scales[shard_of(shards, row)] : decision.max_scale;
        const bool changed = decision.rewrite && scale != decision.max_scale;
        if (changed) {
            float values[VECTOR];
            codes[i].get(values);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) values[j] = multiply_exact(multiply_exact(values[j], scale), reciprocal);
            codes[i] = Codes<FORMAT, VECTOR>::encoded(values);
        }
        if (changed || out != weight) codes[i].store_to(out + row * out_stride + col, valid);
    }
}

KERNEL(FP8_THREADS)
requantize(const byte* weight, long long weight_stride, const float* scales, int scales_count,
           Shards<FP8_SHARDS> shards, byte* out, long long out_stride, float* max_scale, int rows, int cols,
           int column_tiles) {
    requantize_shards<FP8_FORMAT, FP8_SHARDS, FP8_VECTOR, FP8_ACROSS, FP8_THREADS>(
        weight, weight_stride, scales, scales_count, shards, out, out_stride, max_scale, rows, cols, column_tiles);
}
