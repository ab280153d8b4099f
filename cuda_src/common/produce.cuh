// The common end of kernels that make a row's values and quantize them in one go: scales, codes, stores.
//
// A producer makes VECTOR values at a time: `load(col, valid, raw)` fetches what they are made of, `values(raw, y)` makes
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

template <int VECTOR>
DEVICE float amax_of(const float (&y)[VECTOR]) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < VECTOR; ++i) amax = maximum(amax, magnitude(y[i]));
    return amax;
}

// Values over their scale, as codes. Where nothing can over- or underflow, fewer steps give the same quotients as
// value_of: the product with the reciprocal, put right by its remainder. `cut` says that a bound made amax smaller.
template <int FORMAT, int MODE, int VECTOR>
DEVICE Codes<FORMAT, VECTOR> encode_scaled(float (&values)[VECTOR], float scale, bool cut) {
    if (!cut && scale >= 0x1p-60f && scale <= 0x1p60f) {
        const float reciprocal = reciprocal_exact(scale), minus = -reciprocal;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float q = values[i] * reciprocal;
            values[i] = MODE == STATIC ? q : fma_exact(fma_exact(q, scale, -values[i]), minus, q);  // keeps -0
        }
    } else {
        const Divisor divisor = prepared<MODE>(scale);
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) values[i] = value_of<MODE, true>(values[i], divisor);
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
    const int passes = KEPT ? VECTORS : (cols - first_col + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    const long long scale_row = (GROUP_ROWS < 0 ? 0 : row / (GROUP_ROWS < 0 ? 1 : GROUP_ROWS)) * to.scale_row_stride;
    float y[KEPT ? VECTORS : 1][VECTOR];

    const auto col_of = [&](int pass) { return first_col + (pass * THREADS + int(thread_x())) * VECTOR; };
    const auto produce = [&](int pass) {
        if constexpr (KEPT) {
            producer.values(raw[pass], y[pass]);
        } else {
            typename Producer::Raw fetched;
            producer.load(col_of(pass), cols - col_of(pass), fetched);
            producer.values(fetched, y[0]);
        }
    };
    const auto store = [&](int col, const Codes<FORMAT, VECTOR>& codes) {
        if (col < cols) codes.template store_to<ALIGNED != 0>(to.data + row * to.data_stride + col, cols - col);
    };


    if constexpr (MODE == TOKEN) {
        float upper = to.upper_value;
        if (to.upper != nullptr) upper = minimum(upper, *to.upper);
        float amax = 0.0f;
#pragma unroll(KEPT ? VECTORS : 1)
        for (int pass = 0; pass < passes; ++pass) {
            produce(pass);
            amax = maximum(amax, amax_of(y[KEPT ? pass : 0]));
        }
        const unsigned amax_bits = block_max<THREADS>(bits_of(amax));
        const float scale = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, to.eps));
        if (thread_x() == 0) store_scale<SCALE_FORMAT>(to.scale, scale_row, scale);
        const bool cut = upper < float_of(amax_bits);
#pragma unroll(KEPT ? VECTORS : 1)
        for (int pass = 0; pass < passes; ++pass) {
            if constexpr (!KEPT) produce(pass);
            store(col_of(pass), encode_scaled<FORMAT, MODE>(y[KEPT ? pass : 0], scale, cut));
        }
    } else {
#pragma unroll(KEPT ? VECTORS : 1)
        for (int pass = 0; pass < passes; ++pass) {
            const int col = col_of(pass);
            produce(pass);
            float(&values)[VECTOR] = y[KEPT ? pass : 0];
            const int group = GROUP_COLS < 0 ? 0 : col / (GROUP_COLS < 0 ? 1 : GROUP_COLS);
            const long long scale_at = scale_row + group * to.scale_col_stride;
            float scale = 1.0f;
            if constexpr (MODE == STATIC) {
                if (col < cols) scale = load_scale<SCALE_FORMAT>(to.scale, scale_at);
            } else {
                const unsigned amax_bits = team_max<GROUP_COLS / VECTOR>(bits_of(amax_of(values)));
                scale = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, 0.0f, to.eps));
                if (col % GROUP_COLS == 0 && col < cols) store_scale<SCALE_FORMAT>(to.scale, scale_at, scale);
            }
            store(col, encode_scaled<FORMAT, MODE>(values, scale, false));
        }
    }
}
