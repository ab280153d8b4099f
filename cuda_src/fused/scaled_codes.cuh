// Parts of quantizing a producer's values: which elements of a vector exist, the maximum of a group, codes.
#pragma once
#include "../common/cluster_reduce.cuh"
#include "../common/values.cuh"

// ALIGNED: the alignment of rows. UNALIGNED: only to their elements. VECTORS_AND_TAIL: to vectors, of which the row's
// end may cut the last. WHOLE: the same, and the row is a whole number of blocks' parts.
constexpr int UNALIGNED = 0, VECTORS_AND_TAIL = 1, WHOLE = 2;

template <int ALIGNED>
DEVICE bool is_inside(int col, int cols) {
    return ALIGNED == WHOLE || col < cols;
}
// How many of the VECTOR elements from col on are in the row: 0 or less past its end.
template <int ALIGNED, int VECTOR>
DEVICE int valid_at(int col, int cols) {
    return ALIGNED == WHOLE ? VECTOR : cols - col;
}

template <int VECTOR>
DEVICE float amax_of(const float (&y)[VECTOR]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) amax = maximum(amax, magnitude(y[i]));
    return amax;
}

// The maximum of x[i] over a team, in the team's lanes whose number is i modulo COUNT, a power of two up to TEAM.
template <int TEAM, int COUNT>
DEVICE unsigned team_max_each(unsigned (&x)[COUNT]) {
#pragma unroll
    for (int mask = 1; mask < COUNT; mask *= 2) {
        const bool odd = (lane() & mask) != 0;
#pragma unroll
        for (int i = 0; i < COUNT / mask; i += 2) {
            const unsigned mine = odd ? x[i + 1] : x[i], other = shuffle_xor(odd ? x[i] : x[i + 1], mask);
            x[i / 2] = mine > other ? mine : other;
        }
    }
#pragma unroll
    for (int mask = COUNT; mask < TEAM; mask *= 2) {
        const unsigned other = shuffle_xor(x[0], mask);
        x[0] = x[0] > other ? x[0] : other;
    }
    return x[0];
}

template <int value>
struct Constant {
    static constexpr int VALUE = value;
};

constexpr int power_of_two_from(int count) { return count <= 1 ? 1 : 2 * power_of_two_from((count + 1) / 2); }

// Encodes values divided by their scale. If not CAREFUL, for an ordinary divisor, by the steps of value_of: if a
// remainder is flushed to zero, the quotient is near no code but 0. A scale that is a power of two needs no remainder.
template <int FORMAT, int MODE, int SCALE_FORMAT, bool CAREFUL, int VECTOR>
DEVICE Codes<FORMAT, VECTOR> encode_scaled(float (&values)[VECTOR], const Divisor& divisor) {
    constexpr bool PRODUCT = MODE == STATIC || SCALE_FORMAT != SCALE_FLOAT32;
    if constexpr (CAREFUL) {
        // Unrolled, this would be most of the instructions of a kernel for groups, so there it is a loop.
        constexpr int AT_ONCE = MODE == GROUP ? 1 : VECTOR;
#pragma unroll AT_ONCE
        for (int count = 0; count < VECTOR; ++count) {
            const float value = value_of<MODE, true>(values[0], divisor);
#pragma unroll
            for (int i = 1; i < VECTOR; ++i) values[i - 1] = values[i];
            values[VECTOR - 1] = value;
        }
    } else {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float near = values[i] * divisor.reciprocal;
            const float rest = fma_flushing(near, divisor.scale, -values[i]);
            values[i] = PRODUCT ? near : fma_flushing(rest, -divisor.reciprocal, near);
        }
    }
    return Codes<FORMAT, VECTOR>::encoded(values);
}
