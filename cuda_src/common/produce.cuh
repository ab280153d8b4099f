// The common end of kernels that make a row's values and quantize them in one go: scales, codes, stores.
//
// A producer makes VECTOR values at a time: `load(col, cols, raw)` fetches what they are made of, `values(raw, y)` makes
// them, in fp32; behind the row's end they have to be zeros. A block owns THREADS * VECTORS vectors of one row, kept in
// registers from one pass to the next, or, with VECTORS 0, the whole row, fetched again for each pass.
//
// MODE STATIC  y * RN(1 / scale), the scale given for groups of GROUP_ROWS x GROUP_COLS (-1 spans the axis)
//      TOKEN   scale = max(min(amax, upper) / MAX, 1 / (MAX * 512)), y / scale; the block owns the row
//      GROUP   scale = max(amax, eps) / MAX of 1 x GROUP_COLS, y / scale
// The caller owes: GROUP_COLS / VECTOR is a power of two up to WARP in GROUP, a whole number in STATIC; THREADS % WARP
// is 0; no block_max of place 0 elsewhere in the kernel.
#pragma once
#include "reduce.cuh"
#include "values.cuh"

// ALIGNED: how rows lie. PARTS: aligned to their elements only. VECTORS_AND_END: whole vectors, of which the last may be
// cut by the row's end. WHOLE: the row is a whole number of blocks' parts.
constexpr int PARTS = 0, VECTORS_AND_END = 1, WHOLE = 2;

template <int ALIGNED>
DEVICE bool is_inside(int col, int cols) {
    return ALIGNED == WHOLE || col < cols;
}
// How many of the VECTOR elements from col on there are: 0 or less behind the end.
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

// Sizes whose quotient by MAXIMUM, and that quotient's reciprocal, can neither over- nor underflow.
DEVICE bool is_ordinary(float amax) { return amax >= 0x1p-40f && amax <= 0x1p60f; }

// amax / MAXIMUM for an ordinary amax: the product with the reciprocal, put right by the remainder. For every mantissa
// this is the rounded quotient.
template <int FORMAT>
DEVICE float over_maximum(float amax) {
    constexpr float MAXIMUM = Format<FORMAT>::MAXIMUM, RECIPROCAL = 1.0f / MAXIMUM;
    const float near = amax * RECIPROCAL;
    return fma_flushing(fma_flushing(near, -MAXIMUM, amax), RECIPROCAL, near);
}

// The largest of x[i] over a team, in the team's lanes whose number is i modulo COUNT: a power of two up to the team.
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

// Values over their scale, as codes. Not careful, for an ordinary divisor: value_of's steps, where a remainder that
// counts as zero belongs to a quotient that no code but 0 is near; a power of two needs no remainder.
template <int FORMAT, int MODE, int SCALE_FORMAT, bool CAREFUL, int VECTOR>
DEVICE Codes<FORMAT, VECTOR> encode_scaled(float (&values)[VECTOR], const Divisor& divisor) {
    constexpr bool PRODUCT = MODE == STATIC || SCALE_FORMAT != SCALE_FLOAT32;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) {
        if constexpr (CAREFUL) {
            values[i] = value_of<MODE, true>(values[i], divisor);
        } else {
            const float near = values[i] * divisor.reciprocal;
            const float rest = fma_flushing(near, divisor.scale, -values[i]);
            values[i] = PRODUCT ? near : fma_flushing(rest, -divisor.reciprocal, near);
        }
    }
    return Codes<FORMAT, VECTOR>::encoded(values);
}

// Where a block's part of a row lies, and where its codes and scales go.
struct Destination {
    byte* data;
    long long data_stride;
    void* scale;
    long long scale_row_stride, scale_col_stride;
    const float* upper;  // null without one
    float upper_value, eps;
};

template <class Producer, int FORMAT, int MODE, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT, int ALIGNED, int VECTORS,
          int THREADS>
DEVICE void quantize_produced(const Producer& producer, typename Producer::Raw* raw, const Destination& to, long long row,
                              int first_col, int cols) {
    constexpr int VECTOR = Producer::VECTOR;
    constexpr bool KEPT = VECTORS > 0;
    constexpr int UNROLLED = KEPT ? VECTORS : 1;
    const int passes = KEPT ? VECTORS : (cols - first_col + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    const long long scale_row = (GROUP_ROWS < 0 ? 0 : row / (GROUP_ROWS < 0 ? 1 : GROUP_ROWS)) * to.scale_row_stride;
    float y[UNROLLED][VECTOR];

    const auto at = [](int pass) { return KEPT ? pass : 0; };
    const auto col_of = [&](int pass) { return first_col + (pass * THREADS + int(thread_x())) * VECTOR; };
    const auto produce = [&](int pass) {
        if constexpr (KEPT) {
            producer.values(raw[pass], y[pass]);
        } else {
            typename Producer::Raw fetched;
            producer.load(col_of(pass), cols, fetched);
            producer.values(fetched, y[0]);
        }
    };
    const auto store = [&](int col, const Codes<FORMAT, VECTOR>& codes) {
        if (!is_inside<ALIGNED>(col, cols)) return;
        const int valid = valid_at<ALIGNED, VECTOR>(col, cols);
        codes.template store_to<ALIGNED != PARTS>(to.data + row * to.data_stride + col, valid);
    };
    // Encodes and stores COUNT vectors from `begin` on, all of them in one of two ways; divisor_of counts them from 0.
    const auto finish = [&](auto count, int begin, bool quick, const auto& divisor_of, bool made) {
        constexpr int COUNT = decltype(count)::VALUE;
        if (quick) {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (!made) produce(begin + i);
                const Divisor& divisor = divisor_of(i);
                store(col_of(begin + i), encode_scaled<FORMAT, MODE, SCALE_FORMAT, false>(y[at(begin + i)], divisor));
            }
        } else {
#pragma unroll
            for (int i = 0; i < COUNT; ++i) {
                if (!made) produce(begin + i);
                const Divisor& divisor = divisor_of(i);
                store(col_of(begin + i), encode_scaled<FORMAT, MODE, SCALE_FORMAT, true>(y[at(begin + i)], divisor));
            }
        }
    };
    const auto finish_all = [&](const Divisor& divisor, bool made) {
        for (int begin = 0; begin < passes; begin += UNROLLED)
            finish(Constant<UNROLLED>{}, begin, divisor.ordinary, [&](int) { return divisor; }, made);
    };

    if constexpr (MODE == TOKEN) {
        float upper = to.upper_value;
        if (to.upper != nullptr) upper = minimum(upper, *to.upper);
        float amax = 0.0f;
#pragma unroll UNROLLED
        for (int pass = 0; pass < passes; ++pass) {
            produce(pass);
            amax = maximum(amax, amax_of(y[at(pass)]));
        }
        const unsigned amax_bits = block_max<THREADS>(bits_of(amax));
        const float scale = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, to.eps));
        if (thread_x() == 0) store_scale<SCALE_FORMAT>(to.scale, scale_row, scale);
        finish_all(prepared<MODE>(scale, upper < float_of(amax_bits)), KEPT);
    } else if constexpr (GROUP_COLS < 0) {
        finish_all(prepared<MODE>(load_scale<SCALE_FORMAT>(to.scale, scale_row)), false);
    } else if constexpr (MODE == STATIC) {
        for (int begin = 0; begin < passes; begin += UNROLLED) {
            Divisor divisors[UNROLLED];
            bool quick = true;
#pragma unroll
            for (int i = 0; i < UNROLLED; ++i) {
                const int col = col_of(begin + i);
                const long long scale_at = scale_row + col / GROUP_COLS * to.scale_col_stride;
                const bool inside = is_inside<ALIGNED>(col, cols);
                divisors[i] = prepared<MODE>(inside ? load_scale<SCALE_FORMAT>(to.scale, scale_at) : 1.0f);
                quick = quick && divisors[i].ordinary;
            }
            finish(Constant<UNROLLED>{}, begin, quick, [&](int i) { return divisors[i]; }, false);
        }
    } else {
        // The lanes of a team share the work on the scales of EACH vectors; a warp goes one of two ways.
        constexpr int TEAM = GROUP_COLS / VECTOR;
        constexpr int WISHED = power_of_two_from(UNROLLED < 4 ? UNROLLED : 4), EACH = WISHED <= TEAM ? WISHED : 1;
        constexpr int SHARES = (UNROLLED + EACH - 1) / EACH;
        const int member = int(lane()) % TEAM, first = int(lane()) - member;
        for (int begin = 0; begin < passes; begin += UNROLLED) {
            unsigned amax_bits[SHARES];
            float scale[SHARES], reciprocal[SHARES];
            bool ordinary = true;
#pragma unroll
            for (int share = 0; share < SHARES; ++share) {
                unsigned amax[EACH];
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    const int pass = begin + share * EACH + i;
                    if (share * EACH + i < UNROLLED) produce(pass);
                    amax[i] = share * EACH + i < UNROLLED ? bits_of(amax_of(y[at(pass)])) : 0u;
                }
                amax_bits[share] = team_max_each<TEAM>(amax);
                const float bounded = maximum(float_of(amax_bits[share]), to.eps);
                scale[share] = settled<SCALE_FORMAT>(over_maximum<FORMAT>(bounded));
                reciprocal[share] = reciprocal_ordinary(scale[share]);
                ordinary = ordinary && is_ordinary(bounded);
            }
            const auto store_scales = [&] {
#pragma unroll
                for (int share = 0; share < SHARES; ++share) {
                    const int i = share * EACH + member, group = col_of(begin + i) / GROUP_COLS;
                    if (member < EACH && i < UNROLLED && is_inside<ALIGNED>(group * GROUP_COLS, cols))
                        store_scale<SCALE_FORMAT>(to.scale, scale_row + group * to.scale_col_stride, scale[share]);
                }
            };
            const auto from = [&](const float (&each)[SHARES], int i) {
                return EACH == 1 ? each[i] : shuffle_from(each[i / EACH], unsigned(first + i % EACH));
            };
            if (warp_max(ordinary ? 0u : 1u) == 0u) {
                store_scales();
#pragma unroll
                for (int i = 0; i < UNROLLED; ++i) {
                    const Divisor divisor{from(scale, i), from(reciprocal, i), true};
                    store(col_of(begin + i), encode_scaled<FORMAT, MODE, SCALE_FORMAT, false>(y[at(begin + i)], divisor));
                }
            } else {
#pragma unroll
                for (int share = 0; share < SHARES; ++share)
                    scale[share] = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits[share], 0.0f, to.eps));
                store_scales();
#pragma unroll
                for (int i = 0; i < UNROLLED; ++i) {
                    const Divisor divisor{from(scale, i), 0.0f, false};
                    store(col_of(begin + i), encode_scaled<FORMAT, MODE, SCALE_FORMAT, true>(y[at(begin + i)], divisor));
                }
            }
        }
    }
}
