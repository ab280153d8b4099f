// quantize(rms_norm(x [+ residual]) * weight), one row a block, the row kept in registers.
//   h = x, or, with a residual, x + residual rounded to their type, which goes back to residual
//   r = RN(1 / RN(sqrt(RN(sum(h * h) / cols) + epsilon))), y = RN(RN(h * r) * weight)
// ROUND: h * r and its product with the weight are rounded to x's type, as a kernel that stores them would.
// The sum's order is that of the block; all else is defined by produce.cuh.
// The caller owes, where ALIGNED: rows of x, residual and data and the weight begin at multiples of VECTOR elements.
#pragma once
#include "produce.cuh"

// 1 / sqrt(sum of x over the block / cols + epsilon), in every thread. One warp does what is done once: the turns of
// the other warps go to other blocks.
template <int THREADS>
DEVICE float norm_factor(float x, int cols, float epsilon) {
    constexpr int WARPS = THREADS / WARP, HALF = power_of_two_from(WARPS) / 2;
    SHARED float sums[WARPS];
    SHARED float factor;
#pragma unroll
    for (int mask = WARP / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
    if (lane() == 0) sums[thread_x() / WARP] = x;
    block_barrier();
    if (thread_x() < WARP) {
        x = lane() < WARPS ? sums[lane()] : 0.0f;
#pragma unroll
        for (int mask = HALF; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
        const float mean = divide_exact(x, static_cast<float>(cols));
        if (lane() == 0) factor = reciprocal_exact(sqrt_exact(mean + epsilon));
    }
    block_barrier();
    return factor;
}

template <int X, int W, int ROUND, int ALIGNED>
struct NormProducer {
    static constexpr int VECTOR = 16 / SIZE_OF<X>;
    struct Raw {
        float h[VECTOR];
        Values<W, VECTOR> weight;
    };
    const void* row;  // h, once the row has been summed
    const void* weight;
    float factor;

    DEVICE void load(int col, int cols, Raw& raw) const {
        const int valid = valid_at<ALIGNED, VECTOR>(col, cols);
        Values<X, VECTOR> read;
        read.template load_from<ALIGNED != PARTS>(row, col, valid);
        read.widened(raw.h);
        raw.weight.template load_from<ALIGNED != PARTS>(weight, col, valid);
    }

    DEVICE void values(const Raw& raw, float (&y)[VECTOR]) const {
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) {
            const float normed = raw.h[i] * factor;
            y[i] = ROUND ? round_to<X>(round_to<X>(normed) * raw.weight.get(i)) : normed * raw.weight.get(i);
        }
    }
};

template <int X, int W, int FORMAT, int RESIDUAL, int ROUND, int MODE, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT,
          int ALIGNED, int VECTORS, int THREADS>
DEVICE void norm_quantize_row(const void* x, long long x_stride, void* residual, long long residual_stride,
                              const void* weight, float epsilon, int cols, const Destination& to) {
    using Producer = NormProducer<X, W, ROUND, ALIGNED>;
    constexpr int VECTOR = Producer::VECTOR;
    constexpr bool KEPT = VECTORS > 0;
    constexpr int UNROLLED = KEPT ? VECTORS : 1;
    const long long row = block_x();
    const char* x_row = static_cast<const char*>(x) + row * x_stride * SIZE_OF<X>;
    char* residual_row = static_cast<char*>(residual) + row * residual_stride * SIZE_OF<X>;
    const int passes = KEPT ? VECTORS : (cols + THREADS * VECTOR - 1) / (THREADS * VECTOR);
    typename Producer::Raw raw[UNROLLED];
    Values<X, VECTOR> read[UNROLLED], added[UNROLLED];

    const auto at = [](int pass) { return KEPT ? pass : 0; };
    const auto col_of = [&](int pass) { return (pass * THREADS + int(thread_x())) * VECTOR; };
    const auto valid_of = [&](int pass) { return valid_at<ALIGNED, VECTOR>(col_of(pass), cols); };
    const auto fetch = [&](int pass) {
        read[at(pass)].template load_from<ALIGNED != PARTS>(x_row, col_of(pass), valid_of(pass));
        if constexpr (RESIDUAL != 0)
            added[at(pass)].template load_from<ALIGNED != PARTS>(residual_row, col_of(pass), valid_of(pass));
    };
    const auto fetch_weights = [&] {
#pragma unroll
        for (int pass = 0; pass < VECTORS; ++pass)
            raw[pass].weight.template load_from<ALIGNED != PARTS>(weight, col_of(pass), valid_of(pass));
    };

    grid_dependency_launch();
    grid_dependency_wait();
#pragma unroll
    for (int pass = 0; pass < VECTORS; ++pass) fetch(pass);
    if constexpr (RESIDUAL == 0) fetch_weights();
    float sum = 0.0f;
#pragma unroll UNROLLED
    for (int pass = 0; pass < passes; ++pass) {
        Values<X, VECTOR>& h = read[at(pass)];
        if constexpr (!KEPT) fetch(pass);
        if constexpr (RESIDUAL != 0) {
            float wide[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; ++i) wide[i] = h.get(i) + added[at(pass)].get(i);
            h = Values<X, VECTOR>::rounded(wide);
            if (is_inside<ALIGNED>(col_of(pass), cols))
                h.template store_to<ALIGNED != PARTS>(residual_row, col_of(pass), valid_of(pass));
        }
        h.widened(raw[at(pass)].h);
        float part = 0.0f;
#pragma unroll
        for (int i = 0; i < VECTOR; ++i) part = fma_flushing(raw[at(pass)].h[i], raw[at(pass)].h[i], part);
        sum += part;
    }
    if constexpr (RESIDUAL != 0) fetch_weights();  // not before: the residual's registers are free now
    const Producer producer{RESIDUAL != 0 ? residual_row : x_row, weight, norm_factor<THREADS>(sum, cols, epsilon)};
    quantize_produced<Producer, FORMAT, MODE, GROUP_ROWS, GROUP_COLS, SCALE_FORMAT, ALIGNED, VECTORS, THREADS>(
        producer, raw, to, row, 0, cols);
}
