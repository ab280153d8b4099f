// quantize(silu(gate) * up) of rows [gate, up]: a block has a tile of a row, or in TOKEN mode a team has a whole row.
//   silu(v) = v / (1 + exp(-v)) within 6 ulp, or, below 2**-110, within |v| * 2**-118; v itself from 17;
//   NaN for -Inf
// The grid is (tiles of a row, rows, and as many of these layers as needed if one axis of a grid cannot hold all rows).
// producer.cuh defines all else.
//
// ROUND: the activation and the product are rounded to x's type, as in a kernel that stores them. With FLOAT16 the
// activation is then computed by expf and a rounded quotient, because errors within 6 ulp would round every 10,000th
// gate to the neighbouring number. (Of the 65,536 bfloat16 gates, none with a normal result is that near to a tie,
// except -2**-8.)
//
// The caller owes, if ALIGNED: gate, up and data begin at multiples of VECTOR elements in every row.
#pragma once
#include "producer.cuh"

// v / (1 + exp(-v)) = v / (1 + 2**p * t), where p + log2(t) = -v * log2(e) with more precision than fp32: expf and an
// exact division would take longer than the memory. The bounds avoid 0 * Inf, which would give NaN for v = Inf.
template <int X>
DEVICE float silu(float v) {
    constexpr float LN2 = 0x1.62e43p-1f;
    float power, rest;
    if constexpr (X == BFLOAT16) {
        // The first 16 bits of log2(e): their product with a bfloat16 is exact, and the rest is a fixed fraction of it.
        constexpr float LOG2E_16 = 0x1.7154p+0f, PART_LEFT = 0x1.48101ep-18f;
        power = maximum(v * -LOG2E_16, -150.0f);
        rest = power * PART_LEFT;
    } else {
        constexpr float LOG2E = 0x1.715476p+0f, LOG2E_LEFT = 0x1.4ae0cp-26f;
        const float near = minimum(maximum(v, -100.0f), 100.0f);
        power = near * -LOG2E;
        rest = -fma_exact(near, LOG2E_LEFT, fma_exact(near, LOG2E, power));
    }
    return v * reciprocal_fast(fma_exact(exp2_fast(power), fma_exact(rest, LN2, 1.0f), 1.0f));
}

// v / (1 + expf(-v)) with an IEEE-rounded sum and quotient, for results in float16: for v < -64 they are zeros.
DEVICE float silu_rounded(float v) {
    const float sum = 1.0f + exponential(-minimum(maximum(v, -64.0f), 64.0f));
    const float reciprocal = reciprocal_ordinary(sum), near = v * reciprocal;
    // (For an infinite v the remainder would be NaN.)
    return v > 64.0f ? v : fma_flushing(fma_flushing(near, sum, -v), -reciprocal, near);
}

template <int X, int ROUND, int ALIGNED>
struct SiluProducer {
    static constexpr int VECTOR = 16 / SIZE_OF<X>;
    struct Raw {
        Values<X, VECTOR> gate, up;
    };
    const char *gate, *up;

    // Makes `col` the column 0 of later calls.
    DEVICE void begin_at(int col) {
        gate = computed_here(gate + col * SIZE_OF<X>), up = computed_here(up + col * SIZE_OF<X>);
    }
    DEVICE void prefetch(int col, int cols) const {
        if (!is_inside<ALIGNED>(col, cols)) return;
        prefetch_to_l2(gate + col * SIZE_OF<X>), prefetch_to_l2(up + col * SIZE_OF<X>);
    }
    DEVICE void load_gate(int col, int cols, Raw& raw) const {
        raw.gate.template load_from<ALIGNED != UNALIGNED>(gate, col, valid_at<ALIGNED, VECTOR>(col, cols));
    }
    DEVICE void load_up(int col, int cols, Raw& raw) const {
        raw.up.template load_from<ALIGNED != UNALIGNED>(up, col, valid_at<ALIGNED, VECTOR>(col, cols));
    }
    DEVICE void load(int col, int cols, Raw& raw) const {
        load_gate(col, cols, raw);
        load_up(col, cols, raw);
    }
    DEVICE void store_inputs(int, int, const Raw&) const {}

    DEVICE void values(const Raw& raw, float (&y)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float gate = raw.gate.get(i), activated = ROUND && X == FLOAT16 ? silu_rounded(gate) : silu<X>(gate);
            y[i] = ROUND ? round_to<X>(round_to<X>(activated) * raw.up.get(i)) : activated * raw.up.get(i);
        }
    }
};

// FEW, for so few rows that latencies count: before the preceding kernel has ended, addresses are computed, and inputs
// and outputs are prefetched into L2.
template <int X, int FORMAT, int ROUND, int MODE, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT, int ALIGNED,
          int VECTORS, int FEW, class Team>
DEVICE void silu_tile(const void* x, long long x_stride, long long rows, int cols, const Destination& to) {
    using Producer = SiluProducer<X, ROUND, ALIGNED>;
    constexpr int VECTOR = Producer::VECTOR, THREADS = Team::BLOCK_THREADS;
    constexpr bool EARLY = FEW && VECTORS > 0;
    Team team;
    const long long row = static_cast<long long>(block_z()) * grid_y() + block_y();
    const int first_col = int(block_x()) * (THREADS * VECTOR * VECTORS);
    const char* const begin = static_cast<const char*>(x) + row * x_stride * SIZE_OF<X>;
    Producer producer{begin, begin + static_cast<long long>(cols) * SIZE_OF<X>};
    grid_dependency_launch();
    if (row >= rows) return;
    Quantizer<Producer, FORMAT, MODE, GROUP_ROWS, GROUP_COLS, SCALE_FORMAT, ALIGNED, VECTORS, Team, EARLY> quantize(
        to, row, first_col, cols);
    if constexpr (EARLY) {
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass) producer.prefetch(quantize.col_of(pass), cols);
        producer.begin_at(quantize.col_of(0));
        quantize.touch_outputs();
    }
    // The column of a thread's inputs, and the columns of the row from there on.
    const int left = cols - (EARLY ? quantize.col_of(0) : 0);
    const auto at_of = [&](int pass) { return EARLY ? pass * (THREADS * VECTOR) : quantize.col_of(pass); };
    if constexpr (MODE == TOKEN) team.start();
    grid_dependency_wait();
    quantize.load_given();
    typename Producer::Raw raw[VECTORS > 0 ? VECTORS : 1];
    // If a block has one tile, other blocks hide the latency.
    constexpr bool UP_FIRST = EARLY || (MODE == TOKEN && (VECTORS > 1 || Team::BLOCKS > 1));
#pragma unroll
    for (int pass = 0; pass < VECTORS; ++pass) {
        if constexpr (!UP_FIRST) producer.load_gate(at_of(pass), left, raw[pass]);
        producer.load_up(at_of(pass), left, raw[pass]);
    }
    if constexpr (UP_FIRST) {
        issue_loads();
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass) producer.load_gate(at_of(pass), left, raw[pass]);
        // Otherwise ptxas loads the last gates after the arithmetic of the first ones.
        if constexpr (EARLY) issue_loads();
    }
    quantize(team, producer, raw);
}

#if FP8_FEW
KERNEL_ALONE(FP8_THREADS)
#else
KERNEL(FP8_THREADS)
#endif
silu_and_mul_quant(const void* x, long long x_stride, byte* data, long long data_stride, void* scale,
                   long long scale_row_stride, long long scale_col_stride, const float* upper, float upper_value,
                   float eps, long long rows, int cols) {
    silu_tile<FP8_X, FP8_FORMAT, FP8_ROUND, FP8_MODE, FP8_GROUP_ROWS, FP8_GROUP_COLS, FP8_SCALE_FORMAT, FP8_ALIGNED,
              FP8_VECTORS, FP8_FEW, RowTeam<FP8_THREADS, FP8_BLOCKS>>(
        x, x_stride, rows, cols,
        {data, data_stride, scale, scale_row_stride, scale_col_stride, upper, upper_value, eps});
}
