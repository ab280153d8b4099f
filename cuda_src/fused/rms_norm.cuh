// quantize(rms_norm(x [+ residual]) * weight): a team has one row, and keeps it in registers, x in its memory type and
// sums in fp32.
//   h = x, or, with a residual, RN(x + residual) in fp32; residual becomes h rounded to its type
//   r = RN(1 / RN(sqrt(RN(sum(h * h) * inverse_cols) + epsilon))), inverse_cols = RN(1 / cols)
//   y = RN(RN(h * r) * weight)
//
// The order of the sum depends on the team; producer.cuh defines all else.
//   ROUND     h * r and its product with the weight are rounded to x's type, as in a kernel that stores them. With MODE
//             STATIC so is h: vLLM's kernels norm the stored h if the scale is given, the fp32 sum if they find one.
//   FEW       rows are so few that each multiprocessor has one block or none, and latencies count: inputs are
//             prefetched into L2 while the preceding kernel runs, and x is loaded first, because the sum waits for it.
//   PREDICTS_AMAX
//             the largest value of a token is found together with the sum of squares (predicted_amax.cuh).
// The caller owes: if ALIGNED, rows of x, residual and data, and the weight, begin at multiples of VECTOR elements; if
// PREDICTS_AMAX, MODE is TOKEN, ROUND is 0, and the weight's type has 16 bits.
#pragma once
#include "producer.cuh"

// RN(1 / RN(sqrt(x))): from 2**-100 to 2**100 by the steps of sqrt.rn and rcp.rn without their range checks.
DEVICE float reciprocal_root(float x) {
    const float near = rsqrt_fast(x), product = x * near;
    float found = reciprocal_ordinary(fma_flushing(fma_flushing(-product, product, x), 0.5f * near, product));
    if (__builtin_expect(!(x >= 0x1p-100f && x <= 0x1p100f), 0)) found = reciprocal_exact(sqrt_exact(x));
    return found;
}

template <int X, int W, int RESIDUAL, int ROUND, int MODE, int ALIGNED>
struct NormProducer {
    static constexpr int VECTOR = 16 / SIZE_OF<X>;
    static constexpr bool ROUNDED_SUM = RESIDUAL != 0 && ROUND != 0 && MODE == STATIC;
    static constexpr int H = RESIDUAL != 0 && !ROUNDED_SUM ? FLOAT32 : X;
    struct Raw {
        Values<H, VECTOR> h;
        Values<W, VECTOR> weight;
    };
    struct Inputs {
        Values<X, VECTOR> x, residual;
    };
    const void* x;
    void* residual;
    const void* weight;
    float factor;

    DEVICE void load_inputs(int col, int cols, Inputs& inputs) const {
        const int valid = valid_at<ALIGNED, VECTOR>(col, cols);
        inputs.x.template load_from<ALIGNED != UNALIGNED>(x, col, valid);
        if constexpr (RESIDUAL != 0) inputs.residual.template load_from<ALIGNED != UNALIGNED>(residual, col, valid);
    }
    DEVICE void load_weight(int col, int cols, Raw& raw) const {
        raw.weight.template load_from<ALIGNED != UNALIGNED>(weight, col, valid_at<ALIGNED, VECTOR>(col, cols));
    }
    // Makes `col` the column 0 of later calls.
    DEVICE void begin_at(int col) {
        x = pin_register(static_cast<const char*>(x) + col * SIZE_OF<X>);
        weight = pin_register(static_cast<const char*>(weight) + col * SIZE_OF<W>);
        if constexpr (RESIDUAL != 0) residual = pin_register(static_cast<char*>(residual) + col * SIZE_OF<X>);
    }
    DEVICE void prefetch(int col, int cols) const {
        if (!is_inside<ALIGNED>(col, cols)) return;
        prefetch_to_l2(static_cast<const char*>(weight) + col * SIZE_OF<W>);
        prefetch_to_l2(static_cast<const char*>(x) + col * SIZE_OF<X>);
        if constexpr (RESIDUAL != 0) prefetch_to_l2(static_cast<const char*>(residual) + col * SIZE_OF<X>);
    }
    // The h of the inputs.
    DEVICE static Values<H, VECTOR> sum_of(const Inputs& inputs) {
        if constexpr (RESIDUAL == 0) {
            return inputs.x;
        } else {
            float wide[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) wide[i] = inputs.x.get(i) + inputs.residual.get(i);
            return Values<H, VECTOR>::rounded(wide);
        }
    }
    DEVICE void load(int col, int cols, Raw& raw) const {
        Inputs inputs;
        load_inputs(col, cols, inputs);
        raw.h = sum_of(inputs);
        load_weight(col, cols, raw);
    }
    DEVICE static Values<X, VECTOR> stored(const Values<H, VECTOR>& h) {
        if constexpr (H == X) {
            return h;
        } else {
            float wide[VECTOR];
            h.widened(wide);
            return Values<X, VECTOR>::rounded(wide);
        }
    }
    // Stores h into residual, once per vector: x + residual cannot be computed again after that.
    DEVICE void store_inputs(int col, int cols, const Raw& raw) const {
        if constexpr (RESIDUAL != 0) {
            if (is_inside<ALIGNED>(col, cols))
                stored(raw.h).template store_to<ALIGNED != UNALIGNED>(residual, col,
                                                                      valid_at<ALIGNED, VECTOR>(col, cols));
        }
    }

    DEVICE void values(const Raw& raw, float (&y)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float normed = raw.h.get(i) * factor;
            y[i] = ROUND ? round_to<X>(round_to<X>(normed) * raw.weight.get(i)) : normed * raw.weight.get(i);
        }
    }
};

template <int X, int W, int FORMAT, int RESIDUAL, int ROUND, int MODE, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT,
          int ALIGNED, int VECTORS, int FEW, int PREDICTS_AMAX, class Team>
DEVICE void rms_norm_row(const void* x, long long x_stride, void* residual, long long residual_stride,
                         const void* weight, float epsilon, int cols, float inverse_cols, const Destination& to) {
    using Producer = NormProducer<X, W, RESIDUAL, ROUND, MODE, ALIGNED>;
    constexpr int VECTOR = Producer::VECTOR, THREADS = Team::BLOCK_THREADS, UNROLLED = VECTORS > 0 ? VECTORS : 1;
    constexpr bool IN_REGISTERS = VECTORS > 0;
    const long long row = block_x() / Team::BLOCKS;
    const int first_col = int(block_x()) % Team::BLOCKS * (THREADS * VECTOR * VECTORS);
    Team team;
    Producer producer{static_cast<const char*>(x) + row * x_stride * SIZE_OF<X>,
                      static_cast<char*>(residual) + row * residual_stride * SIZE_OF<X>, weight, 0.0f};
    typename Producer::Raw raw[UNROLLED];
    typename Producer::Inputs inputs[UNROLLED];

    Quantizer<Producer, FORMAT, MODE, GROUP_ROWS, GROUP_COLS, SCALE_FORMAT, ALIGNED, VECTORS, Team, FEW && IN_REGISTERS>
        quantize(to, row, first_col, cols);
    grid_dependency_launch();
    if constexpr (FEW && IN_REGISTERS) {
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass) producer.prefetch(quantize.col_of(pass), cols);
        producer.begin_at(quantize.col_of(0));
        quantize.prefetch_outputs();
    }
    // The column of a thread's inputs, and the columns of the row from there on.
    const int origin = FEW && IN_REGISTERS ? quantize.col_of(0) : 0, left = cols - origin;
    const auto at_of = [&](int pass) {
        return FEW && IN_REGISTERS ? pass * (THREADS * VECTOR) : quantize.col_of(pass);
    };
    team.start();
    grid_dependency_wait();
    quantize.load_given();
    if constexpr (FEW) {
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass) producer.load_inputs(at_of(pass), left, inputs[pass]);
        issue_loads();
    }
#pragma unroll
    for (int pass = 0; pass < VECTORS; ++pass) producer.load_weight(at_of(pass), left, raw[pass]);
    issue_loads();
    if constexpr (!FEW) {
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass) producer.load_inputs(at_of(pass), left, inputs[pass]);
    }
    const int passes = quantize.passes();
    float sum = 0.0f;
#pragma unroll UNROLLED
    for (int pass = 0; pass < passes; ++pass) {
        const int at = IN_REGISTERS ? pass : 0, col = at_of(pass);
        if constexpr (!IN_REGISTERS) producer.load_inputs(col, left, inputs[at]);
        raw[at].h = producer.sum_of(inputs[at]);
        if constexpr (IN_REGISTERS) producer.store_inputs(col, left, raw[at]);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) part = fma_flushing(raw[at].h.get(i), raw[at].h.get(i), part);
        sum += part;
    }
    const auto factor_of = [&](float total) { return reciprocal_root(total * inverse_cols + epsilon); };
    if constexpr (PREDICTS_AMAX) {
        LargestProduct mine;
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass)
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) mine.add(raw[pass].h.get(i), raw[pass].weight.get(i));
        sum = warp_sum(sum);
        mine = mine.of_warp();
        const unsigned* words = team.template gather<0>(bits_of(sum), bits_of(mine.product), bits_of(mine.h));
        const PredictedAmax<W> predicted(LargestProduct::of_words<Team>(words + Team::WORDS));
        producer.factor = factor_of(sum_of_words<Team>(words));
        quantize(team, producer, raw, predicted);
    } else {
        producer.factor = factor_of(row_sum(team, sum));
        quantize(team, producer, raw);
    }
}

#if FP8_FEW
KERNEL_ALONE(FP8_THREADS)
#else
KERNEL(FP8_THREADS)
#endif
rms_norm_quant(const void* x, long long x_stride, const void* weight, void* residual, long long residual_stride,
               float epsilon, byte* data, long long data_stride, void* scale, long long scale_row_stride,
               long long scale_col_stride, const float* upper, float upper_value, float eps, int cols,
               float inverse_cols) {
    rms_norm_row<FP8_X, FP8_W, FP8_FORMAT, FP8_RESIDUAL, FP8_ROUND, FP8_MODE, FP8_GROUP_ROWS, FP8_GROUP_COLS,
                 FP8_SCALE_FORMAT, FP8_ALIGNED, FP8_VECTORS, FP8_FEW, FP8_PREDICTS_AMAX,
                 RowTeam<FP8_THREADS, FP8_BLOCKS, FP8_PREDICTS_AMAX ? 3 : 1>>(
        x, x_stride, residual, residual_stride, weight, epsilon, cols, inverse_cols,
        {data, data_stride, scale, scale_row_stride, scale_col_stride, upper, upper_value, eps});
}
