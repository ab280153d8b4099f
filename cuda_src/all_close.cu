#include "platform.cuh"
#include "common/all_close.cuh"

KERNEL(FP8_THREADS) all_close(const float* x, long long count, int* result) {
    all_close_block<FP8_THREADS>(x, count, result);
}
