// quantize(rms_norm(x [+ residual]) * weight), one row a team, kept in registers as it lies in memory.
//   h = x, or, with a residual, x + residual rounded to their type, which goes back to residual
//   r = RN(1 / RN(sqrt(RN(sum(h * h) * RN(1 / cols)) + epsilon))), y = RN(RN(h * r) * weight)
// ROUND: h * r and its product with the weight are rounded to x's type, as a kernel that stores them would.
// The sum's order is that of the team; all else is defined by produce.cuh.
// The caller owes, where ALIGNED: rows of x, residual and data and the weight begin at multiples of VECTOR elements.
#pragma once
#include "produce.cuh"

// RN(1 / RN(sqrt(x))). From 2**-100 to 2**100 by the steps of sqrt.rn and rcp.rn without their tests of the range.
DEVICE float reciprocal_root(float x) {
    if (__builtin_expect(!(x >= 0x1p-100f && x <= 0x1p100f), 0)) return reciprocal_exact(sqrt_exact(x));
    const float near = rsqrt_fast(x), product = x * near;
    return reciprocal_ordinary(fma_flushing(fma_flushing(-product, product, x), 0.5f * near, product));
}

template <int X, int W, int ROUND, int ALIGNED>
struct NormProducer {
    static constexpr int VECTOR = 16 / SIZE_OF<X>;
    struct Raw {
        Values<X, VECTOR> h;
        Values<W, VECTOR> weight;
    };
    const void* row;  // h, once the row has been summed
    const void* weight;
    float factor;

    DEVICE void load(int col, int cols, Raw& raw) const {
        const int valid = valid_at<ALIGNED, VECTOR>(col, cols);
        raw.h.template load_from<ALIGNED != PARTS>(row, col, valid);
        raw.weight.template load_from<ALIGNED != PARTS>(weight, col, valid);
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
          int ALIGNED, int VECTORS, class Team>
DEVICE void norm_quantize_row(const void* x, long long x_stride, void* residual, long long residual_stride,
                              const void* weight, float epsilon, int cols, const Destination& to) {
    using Producer = NormProducer<X, W, ROUND, ALIGNED>;
    constexpr int VECTOR = Producer::VECTOR, THREADS = Team::BLOCK_THREADS, UNROLLED = VECTORS > 0 ? VECTORS : 1;
    constexpr bool KEPT = VECTORS > 0;
    const long long row = block_x() / Team::BLOCKS;
    const int first_col = int(block_x()) % Team::BLOCKS * (THREADS * VECTOR * VECTORS);
    const char* x_row = static_cast<const char*>(x) + row * x_stride * SIZE_OF<X>;
    char* residual_row = static_cast<char*>(residual) + row * residual_stride * SIZE_OF<X>;
    Team team;
    typename Producer::Raw raw[UNROLLED];
    Values<X, VECTOR> added[UNROLLED];

    const auto at = [](int pass) { return KEPT ? pass : 0; };
    const auto col_of = [&](int pass) { return first_col + (pass * THREADS + int(thread_x())) * VECTOR; };
    const auto valid_of = [&](int pass) { return valid_at<ALIGNED, VECTOR>(col_of(pass), cols); };
    const auto fetch = [&](int pass) {
        raw[at(pass)].h.template load_from<ALIGNED != PARTS>(x_row, col_of(pass), valid_of(pass));
        if constexpr (RESIDUAL != 0)
            added[at(pass)].template load_from<ALIGNED != PARTS>(residual_row, col_of(pass), valid_of(pass));
    };

    grid_dependency_launch();
    team.meet();
    grid_dependency_wait();
    const Quantizer<Producer, FORMAT, MODE, GROUP_ROWS, GROUP_COLS, SCALE_FORMAT, ALIGNED, VECTORS, Team> quantize(
        to, row, first_col, cols);
#pragma unroll
    for (int pass = 0; pass < VECTORS; ++pass)
        raw[pass].weight.template load_from<ALIGNED != PARTS>(weight, col_of(pass), valid_of(pass));
    issue_loads();
#pragma unroll
    for (int pass = 0; pass < VECTORS; ++pass) fetch(pass);
    const int passes = quantize.passes();
    float sum = 0.0f;
#pragma unroll UNROLLED
    for (int pass = 0; pass < passes; ++pass) {
        Values<X, VECTOR>& h = raw[at(pass)].h;
        if constexpr (!KEPT) fetch(pass);
        if constexpr (RESIDUAL != 0) {
            float wide[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) wide[i] = h.get(i) + added[at(pass)].get(i);
            h = Values<X, VECTOR>::rounded(wide);
            if (is_inside<ALIGNED>(col_of(pass), cols))
                h.template store_to<ALIGNED != PARTS>(residual_row, col_of(pass), valid_of(pass));
        }
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) part = fma_flushing(h.get(i), h.get(i), part);
        sum += part;
    }
    const float factor = reciprocal_root(row_sum(team, sum) * reciprocal_ordinary(static_cast<float>(cols)) + epsilon);
    quantize(team, Producer{RESIDUAL != 0 ? residual_row : x_row, weight, factor}, raw);
}
