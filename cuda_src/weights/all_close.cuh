// *result = 1 when every x[i] equals x[0] or |x[i] - x[0]| is finite and at most RN(1e-5 * |x[0]|), else 0.
// No element is close; a NaN is close to nothing. One block.
#pragma once
#include "../common/values.cuh"

template <int THREADS>
DEVICE void all_close_block(const float* x, long long count, int* result) {
    SHARED unsigned apart[THREADS / WARP];
    grid_dependency_launch();
    grid_dependency_wait();
    const float first = count > 0 ? x[0] : 0.0f;
    const float allowed = minimum(multiply_exact(1e-5f, magnitude(first)), LARGEST_FLOAT);
    bool close = true;
    for (long long i = thread_x(); i < count; i += THREADS) {
        const float difference = magnitude(fma_exact(x[i], 1.0f, -first));
        close = close && (x[i] == first || difference <= allowed);
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
