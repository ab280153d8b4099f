// *result = 1 if every x[i] equals x[0], or |x[i] - x[0]| is finite and at most RN(1e-5 * |x[0]|); else 0.
// An empty x gives 1; a NaN is close to nothing. One block.
#pragma once
#include "../common/values.cuh"

template <int THREADS>
DEVICE void all_close_block(const float* x, long long count, int* result) {
    SHARED unsigned apart[THREADS / WARP];
    grid_dependency_launch();
    grid_dependency_wait();
    // Compares magnitudes by their bits, because float comparisons treat subnormal numbers as equal.
    const auto absolute = [](float value) { return bits_of(value) & 0x7fffffffu; };
    const unsigned first = count > 0 ? bits_of(x[0]) : 0u;
    const unsigned part = absolute(multiply_exact(1e-5f, float_of(first)));
    const unsigned allowed = part < bits_of(LARGEST_FLOAT) ? part : bits_of(LARGEST_FLOAT);
    const bool infinite = absolute(float_of(first)) == 0x7f800000u;
    bool close = true;
    for (long long i = thread_x(); i < count; i += THREADS) {
        const unsigned difference = absolute(fma_exact(x[i], 1.0f, float_of(first ^ 0x80000000u)));
        close = close && (difference <= allowed || (infinite && bits_of(x[i]) == first));
    }
    const unsigned warp_apart = warp_max(close ? 0u : 1u);
    if (lane() == 0) apart[thread_x() / WARP] = warp_apart;
    block_barrier();
    if (thread_x() == 0) {
        unsigned any = 0;
        for (int i = 0; i < THREADS / WARP; ++i) any |= apart[i];
        *result = any ? 0 : 1;
    }
}

KERNEL(FP8_THREADS) all_close(const float* x, long long scale_count, int* result) {
    all_close_block<FP8_THREADS>(x, scale_count, result);
}
