// out[t] = the sum over each choice j of token t of weights[t][j] * y[inverse[t][j]]: product and sum each rounded in
// fp32, in the order of j, and once more to OUT. Places that are no row of y are left out.
//
// A block has ACROSS x (THREADS / ACROSS) threads, with VECTOR columns of a token each, which load AT_ONCE rows before
// they add the first. Block b has column tile b % column_tiles of its tokens.
// The caller owes: rows of y and of the result aligned to VECTOR elements; fewer than 2**31 rows of y.
#pragma once
#include "../common/values.cuh"

template <int Y, int WEIGHTS, int OUT, int VECTOR, int AT_ONCE, int ACROSS, int THREADS>
DEVICE void unpermute_tokens(const void* y, long long y_stride, const int* inverse, const void* weights, int each,
                             void* out, long long out_stride, long long tokens, int rows, int cols, int column_tiles) {
    const int col = (int(block_x() % column_tiles) * ACROSS + int(thread_x() % ACROSS)) * VECTOR;
    const long long token = (long long)(block_x() / column_tiles) * (THREADS / ACROSS) + thread_x() / ACROSS;
    const int valid = cols - col;
    grid_dependency_launch();
    grid_dependency_wait();
    if (token >= tokens || valid <= 0) return;
    float sums[VECTOR] = {};
    for (int first = 0; first < each; first += AT_ONCE) {
        int places[AT_ONCE];
        float shares[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const long long choice = token * each + first + i;
            const int place = first + i < each ? inverse[choice] : -1;
            places[i] = place < rows ? place : -1;
            if constexpr (WEIGHTS >= 0) {
                Values<(WEIGHTS < 0 ? FLOAT32 : WEIGHTS), 1> share;
                share.load_from(weights, choice, first + i < each);
                shares[i] = share.get(0);
            }
        }
        Values<Y, VECTOR> values[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i)
            if (places[i] >= 0) values[i].load_from(y, places[i] * y_stride + col, valid);
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            if (places[i] < 0) continue;
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                const float value = values[i].get(j);
                sums[j] = fma_exact(WEIGHTS >= 0 ? multiply_exact(shares[i], value) : value, 1.0f, sums[j]);
            }
        }
    }
    Values<OUT, VECTOR>::rounded(sums).store_to(out, token * out_stride + col, valid);
}

KERNEL(FP8_THREADS)
unpermute(const void* y, long long y_stride, const int* inverse, const void* weights, int each, void* out,
          long long out_stride, long long tokens, int rows, int cols, int column_tiles) {
    unpermute_tokens<FP8_Y, FP8_WEIGHTS, FP8_OUT, FP8_VECTOR, FP8_AT_ONCE, FP8_ACROSS, FP8_THREADS>(
        y, y_stride, inverse, weights, each, out, out_stride, tokens, rows, cols, column_tiles);
}
