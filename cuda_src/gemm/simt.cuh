// out[m, n] = round(scale_a * (scale_b * acc) + bias), acc = sum over k of a[m, k] * b[n, k] in fp32: decoded to fp32
// and multiplied by ordinary FMA, so any device, any m, n, k >= 0, any alignment. With BLOCKED scales the sum of every
// 128 of k is scaled before it joins: acc = sum of scale_a * (scale_b * partial).
//
// A block of 256 threads makes a tile of 16 * THREAD_ROWS rows by 16 * THREAD_COLS columns, THREAD_ROWS x THREAD_COLS
// numbers a thread, in steps of DEPTH of k (which divides 128).
// The caller owes, where VECTOR is 4: a, b, lda, ldb and k divisible by 4. Scales: the strides of the matrices over
// (m, k blocks) and (n or n blocks, k blocks), 0 where broadcast. amax is 0 before the launch.
#pragma once
#include "args.cuh"
#include "epilogue.cuh"
#include "scheduler.cuh"

constexpr int MM_THREADS = 256;

// ROWS rows of a matrix of codes at k .. k + DEPTH - 1, staged in registers between memory and shared memory.
// Two neighbours along k and sixteen rows to a warp: its stores into [k][row] then go to different banks.
template <int FORMAT, int ROWS, int DEPTH, int VECTOR>
struct Slab {
    static constexpr int QUADS = ROWS * (DEPTH / 4);
    static constexpr int STEPS = (QUADS + MM_THREADS - 1) / MM_THREADS;
    static constexpr int PITCH = ROWS + 4;
    unsigned quads[STEPS];

    DEVICE static int quad_k(int unit) { return 4 * ((unit & 1) + 2 * (unit / 32 % (DEPTH / 8))); }
    DEVICE static int quad_row(int unit) { return ((unit >> 1) & 15) + 16 * (unit / (4 * DEPTH)); }

    DEVICE void load(const byte* codes, long long stride, int first, int rows, int k, int past_k) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int unit = step * MM_THREADS + int(thread_x());
            const int row = first + quad_row(unit), from = k + quad_k(unit);
            unsigned quad = 0;  // code 0 is the number 0 in every format
            if (unit < QUADS && row < rows) {
                const byte* p = codes + row * stride + from;
                if constexpr (VECTOR == 4) {
                    if (from < past_k) quad = load4(p);
                } else {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (from + j < past_k) quad |= unsigned(p[j]) << (8 * j);
                }
            }
            quads[step] = quad;
        }
    }

    DEVICE void put(float* tile) const {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const int unit = step * MM_THREADS + int(thread_x());
            if (unit >= QUADS) break;
            float values[4];
            decode_pair<FORMAT>(static_cast<unsigned short>(quads[step]), values[0], values[1]);
            decode_pair<FORMAT>(static_cast<unsigned short>(quads[step] >> 16), values[2], values[3]);
#pragma unroll
            for (int j = 0; j < 4; ++j) tile[(quad_k(unit) + j) * PITCH + quad_row(unit)] = values[j];
        }
    }
};

// COUNT neighbouring floats of shared memory; COUNT is 1, 2 or 4 and their address divisible by their size.
template <int COUNT>
DEVICE void load_shared(const float* from, float (&values)[COUNT]) {
    Values<FLOAT32, COUNT> words;
    words.load_from(from, 0, COUNT);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) values[i] = words.get(i);
}

template <int A, int B, int OUT, int BIAS, int BLOCKED, int B_BLOCK, int AMAX, int THREAD_ROWS, int THREAD_COLS,
          int DEPTH, int VECTOR>
DEVICE void multiply_tile(MATMUL_PARAMETERS, const float* out_scale, float* amax) {
    static_assert(BLOCK_K % DEPTH == 0, "a step of k has one blocked scale");
    using SlabA = Slab<A, 16 * THREAD_ROWS, DEPTH, VECTOR>;
    using SlabB = Slab<B, 16 * THREAD_COLS, DEPTH, VECTOR>;
    SHARED alignas(16) float tile_a[2][DEPTH * SlabA::PITCH];
    SHARED alignas(16) float tile_b[2][DEPTH * SlabB::PITCH];
    const auto [first_row, first_col] = dense_tile<16 * THREAD_ROWS, 16 * THREAD_COLS>(row_tiles);
    const int row0 = first_row + int(thread_x()) / 16 * THREAD_ROWS;
    const int col0 = first_col + int(thread_x()) % 16 * THREAD_COLS;

    grid_dependency_launch();
    grid_dependency_wait();

    long long offset_a[THREAD_ROWS], offset_b[THREAD_COLS];  // of the scales of this thread's rows and columns at k = 0
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) offset_a[i] = (row0 + i < m ? row0 + i : 0) * scale_a_row;
#pragma unroll
    for (int j = 0; j < THREAD_COLS; ++j)
        offset_b[j] = (col0 + j < n ? col0 + j : 0) / (B_BLOCK ? BLOCK_K : 1) * scale_b_row;

    float acc[THREAD_ROWS][THREAD_COLS] = {}, partial[THREAD_ROWS][THREAD_COLS] = {};
    SlabA slab_a;
    SlabB slab_b;
    slab_a.load(a, lda, first_row, m, 0, k);
    slab_b.load(b, ldb, first_col, n, 0, k);
    for (int at = 0, buffer = 0; at < k; at += DEPTH, buffer ^= 1) {
        slab_a.put(tile_a[buffer]);
        slab_b.put(tile_b[buffer]);
        block_barrier();  // one a step: the other buffer was read before the last one
        if (at + DEPTH < k) {
            slab_a.load(a, lda, first_row, m, at + DEPTH, k);
            slab_b.load(b, ldb, first_col, n, at + DEPTH, k);
        }
        const float* rows = tile_a[buffer] + int(thread_x()) / 16 * THREAD_ROWS;
        const float* cols = tile_b[buffer] + int(thread_x()) % 16 * THREAD_COLS;
#pragma unroll 8
        for (int depth = 0; depth < DEPTH; ++depth) {
            float x[THREAD_ROWS], y[THREAD_COLS];
            load_shared<THREAD_ROWS>(rows + depth * SlabA::PITCH, x);
            load_shared<THREAD_COLS>(cols + depth * SlabB::PITCH, y);
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i)
#pragma unroll
                for (int j = 0; j < THREAD_COLS; ++j) partial[i][j] = fma_exact(x[i], y[j], partial[i][j]);
        }
        if (BLOCKED && ((at + DEPTH) % BLOCK_K == 0 || at + DEPTH >= k)) {
            const long long block = at / BLOCK_K;
            float along[THREAD_COLS];
#pragma unroll
            for (int j = 0; j < THREAD_COLS; ++j) along[j] = scale_b[offset_b[j] + block * scale_b_k];
#pragma unroll
            for (int i = 0; i < THREAD_ROWS; ++i) {
                const float across = scale_a[offset_a[i] + block * scale_a_k];
#pragma unroll
                for (int j = 0; j < THREAD_COLS; ++j) {
                    acc[i][j] += across * (along[j] * partial[i][j]);
                    partial[i][j] = 0.0f;
                }
            }
        }
    }

    const Epilogue<OUT, BIAS> finish(bias, out_scale);
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < THREAD_ROWS; ++i) {
#pragma unroll
        for (int j = 0; j < THREAD_COLS; ++j) {
            if (row0 + i >= m || col0 + j >= n) continue;
            const float across = BLOCKED ? 1.0f : scale_a[offset_a[i]];
            const float along = BLOCKED ? 1.0f : scale_b[offset_b[j]];
            const float value = finish.value(BLOCKED ? acc[i][j] : partial[i][j], across, along, col0 + j);
            finish.store(out, (row0 + i) * ldo + col0 + j, value);
            if (AMAX) largest = maximum(largest, magnitude(value));
        }
    }
    if (AMAX) publish_amax(largest, amax);
}

KERNEL(MM_THREADS)
simt(MATMUL_PARAMETERS, const float* out_scale, float* amax) {
    multiply_tile<FP8_A, FP8_B, FP8_OUT, FP8_BIAS, FP8_BLOCKED, FP8_B_BLOCK, FP8_AMAX, FP8_THREAD_ROWS, FP8_THREAD_COLS,
                  FP8_DEPTH, FP8_VECTOR>(MATMUL_ARGUMENTS, out_scale, amax);
}
