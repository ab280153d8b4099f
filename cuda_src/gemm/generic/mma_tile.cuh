// A tile of a product of many rows, any m, n, k >= 0, any address, stride and format: out[m, n] = round(scale_a *
// (scale_b * acc) + bias), where acc is the sum over k of a[m, k] * b[n, k] in fp32. The GPU's FP8 matrix instructions
// multiply the codes; if it has none for the formats, codes become 16-bit floats on their way into shared memory,
// exactly. With BLOCKED scales the sum of every 128 of k is scaled before it is added: acc = sum of scale_a * (scale_b
// * partial). With PROMOTED alone it is added in fp32 without a scale.
//
// A block makes a tile of ROWS x COLS, each of its warps WARP_ROWS x WARP_COLS tiles of 16 x 16 of it, in steps of
// DEPTH of k (which divides 128), through two buffers in shared memory. Rows past m and n load the last row again, and
// their results are dropped.
//
// The caller owes: if ALIGNED, a, b, lda, ldb and k divisible by 16; scale strides over (m, k blocks) and (n or n
// blocks, k blocks), 0 where broadcast; if B_BLOCK, COLS divides 128; 0 in amax before the launch; dynamic shared
// memory for 2 * (ROWS + COLS) * DEPTH operands.
#pragma once
#include "../args.cuh"
#include "../epilogue.cuh"
#include "../scheduler.cuh"
#include "codes.cuh"
#include "operands.cuh"

constexpr int A = FP8_A, B = FP8_B, ROWS = FP8_ROWS, COLS = FP8_COLS, DEPTH = FP8_DEPTH;
constexpr int WARP_ROWS = FP8_WARP_ROWS, WARP_COLS = FP8_WARP_COLS;
constexpr bool ALIGNED = FP8_ALIGNED, BLOCKED = FP8_BLOCKED, B_BLOCK = FP8_B_BLOCK;
constexpr bool PROMOTED = FP8_PROMOTED, AMAX = FP8_AMAX;
static_assert(PROMOTED || !BLOCKED, "blocked scales need promoted sums");
constexpr int WARPS_DOWN = ROWS / (MMA_SIDE * WARP_ROWS), WARPS_ACROSS = COLS / (MMA_SIDE * WARP_COLS);
constexpr int THREADS = WARPS_DOWN * WARPS_ACROSS * WARP;
constexpr int CHUNKS = MMA_DEPTH / 8;
static_assert(BLOCK_K % DEPTH == 0 && DEPTH % MMA_DEPTH == 0, "a step of k has one blocked scale");
static_assert(!B_BLOCK || BLOCK_K % COLS == 0, "the columns of a tile have one blocked scale");

// The index of a chunk of eight numbers along k in a tile in shared memory: a swizzle in which neither the loads nor
// the stores of a warp have bank conflicts.
template <int HEIGHT>
DEVICE int place(int slab, int row, int chunk) {
    constexpr int ROWS_OF_BANKS = 128 / (CHUNKS * int(sizeof(Chunk)));
    return (slab * HEIGHT + row) * CHUNKS + (chunk ^ (row / ROWS_OF_BANKS % CHUNKS) ^ slab % 2 * 2);
}

// A thread's codes of a step, in registers between global and shared memory: COUNT vectors of one row of a tile.
template <int FORMAT, int HEIGHT>
struct Stage {
    static constexpr int COUNT = HEIGHT * DEPTH / (VECTOR_BYTES * THREADS), ACROSS = DEPTH / (VECTOR_BYTES * COUNT);
    static_assert(COUNT * VECTOR_BYTES * THREADS == HEIGHT * DEPTH && ACROSS * HEIGHT == THREADS,
                  "every thread must stage equally many codes");
    const byte* first;
    const byte* last;
    const byte* from;
    int left;  // codes of the row from this thread's first on
    CodeVectors<ALIGNED, COUNT> vectors;

    DEVICE static int row() { return int(thread_x()) / ACROSS; }
    DEVICE static int vector(int i) { return int(thread_x()) % ACROSS * COUNT + i; }

    DEVICE Stage(const byte* codes, long long stride, int first_row, int rows, int k)
        : first(codes),
          last(end_of(codes, stride, rows, k)),
          from(codes + min_int(first_row + row(), rows - 1) * stride + VECTOR_BYTES * vector(0)),
          left(k - VECTOR_BYTES * vector(0)) {}

    template <bool CAREFUL>
    DEVICE void load(int at) {
        vectors.template load<CAREFUL>(from + at, left - at, first, last);
    }

    // Steps of k are divisible by 16, so a vector begins at the same byte of its words in all of them.
    DEVICE void put(Chunk* tile, int at) const {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const Vector16 codes = vectors.codes(i, from, left - at);
            const int slab = vector(i) / 2, chunk = vector(i) % 2 * 2;
            tile[place<HEIGHT>(slab, row(), chunk)] = operand<FORMAT>(codes.x, codes.y);
            tile[place<HEIGHT>(slab, row(), chunk + 1)] = operand<FORMAT>(codes.z, codes.w);
        }
    }
};

template <int HEIGHT>
DEVICE Fragment fragment(const Chunk* tile, int slab, int first_row) {
    Fragment result;
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < LANE_CHUNKS; ++j)
            result.chunk[i][j] = tile[place<HEIGHT>(slab, first_row + lane_row(i), lane_chunk() + j)];
    return result;
}

// Calls `visit` for each of a lane's sums, with the row and column of its 16 x 16 tile and its index in the tile.
template <class Visit>
DEVICE void for_each_sum(const Visit& visit) {
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < WARP_COLS; ++j)
#pragma unroll
            for (int e = 0; e < SUMS; ++e) visit(i, j, e);
}

// Makes the tile from `origin` on, once the kernels before have ended.
DEVICE void make_tile(TileOrigin origin, const byte* a, long long lda, const byte* b, long long ldb,
                      const float* scale_a, long long scale_a_row, long long scale_a_k, const float* scale_b,
                      long long scale_b_row, long long scale_b_k, const void* bias, void* out, long long ldo, int m,
                      int n, int k, const float* out_scale, float* amax, float beta) {
    DYNAMIC_SHARED(shared);
    constexpr int SIZE_A = ROWS * DEPTH / 8, SIZE_B = COLS * DEPTH / 8;
    Chunk* const tiles = reinterpret_cast<Chunk*>(shared);
    const int first_row = origin.row, first_col = origin.column;
    const int warp = int(thread_x()) / WARP;
    const int warp_row = warp / WARPS_ACROSS * (MMA_SIDE * WARP_ROWS);
    const int warp_col = warp % WARPS_ACROSS * (MMA_SIDE * WARP_COLS);
    const int row0 = first_row + warp_row, col0 = first_col + warp_col;

    Sum acc[WARP_ROWS][WARP_COLS] = {}, partial[WARP_ROWS][WARP_COLS] = {};
    Stage<A, ROWS> stage_a(a, lda, first_row, m, k);
    Stage<B, COLS> stage_b(b, ldb, first_col, n, k);
    const auto load = [&](int at) {
        if (careful<ALIGNED>(at, DEPTH, k)) {
            stage_a.template load<true>(at);
            stage_b.template load<true>(at);
        } else {
            stage_a.template load<false>(at);
            stage_b.template load<false>(at);
        }
    };
    const auto row_of = [&](int i, int e) { return min_int(row0 + i * MMA_SIDE + sum_row(e), m - 1); };
    const auto col_of = [&](int j, int e) { return min_int(col0 + j * MMA_SIDE + sum_column(e), n - 1); };

    // While one buffer is multiplied, the other is filled with the next step, and loads of the one after it begin.
    const auto fill = [&](int at, int buffer) {
        stage_a.put(tiles + buffer * (SIZE_A + SIZE_B), at);
        stage_b.put(tiles + buffer * (SIZE_A + SIZE_B) + SIZE_A, at);
        if (at + DEPTH < k) load(at + DEPTH);
    };
    if (k > 0) {
        load(0);
        fill(0, 0);
    }
    for (int at = 0, buffer = 0; at < k; at += DEPTH, buffer ^= 1) {
        const Chunk* const tile_a = tiles + buffer * (SIZE_A + SIZE_B);
        const Chunk* const tile_b = tile_a + SIZE_A;
        block_barrier();  // one per step: all reads of the other buffer precede it
#pragma unroll
        for (int slab = 0; slab < DEPTH / MMA_DEPTH; ++slab) {
            Fragment columns[WARP_COLS];
#pragma unroll
            for (int j = 0; j < WARP_COLS; ++j) columns[j] = fragment<COLS>(tile_b, slab, warp_col + j * MMA_SIDE);
#pragma unroll
            for (int i = 0; i < WARP_ROWS; ++i) {
                const Fragment rows = fragment<ROWS>(tile_a, slab, warp_row + i * MMA_SIDE);
#pragma unroll
                for (int j = 0; j < WARP_COLS; ++j)
                    multiply<A, B>(PROMOTED ? partial[i][j] : acc[i][j], rows, columns[j]);
            }
            if (slab == 0 && at + DEPTH < k) fill(at + DEPTH, buffer ^ 1);
        }
        if (PROMOTED && ((at + DEPTH) % BLOCK_K == 0 || at + DEPTH >= k)) {
            const long long block = at / BLOCK_K;
            const float* const scales_a = scale_a + block * scale_a_k;
            const float* const scales_b =
                scale_b + block * scale_b_k + (B_BLOCK ? first_col / BLOCK_K * scale_b_row : 0);
            for_each_sum([&](int i, int j, int e) {
                float& part = partial[i][j].of[e];
                if constexpr (BLOCKED) {
                    const float scale_of_a = scales_a[row_of(i, e) * scale_a_row];
                    const float scale_of_b = scales_b[B_BLOCK ? 0 : col_of(j, e) * scale_b_row];
                    acc[i][j].of[e] += scale_of_a * (scale_of_b * part);
                } else {
                    acc[i][j].of[e] += part;
                }
                part = 0.0f;
            });
        }
    }

    const Epilogue<FP8_OUT, FP8_BIAS> finish(bias, out_scale);
    const Ending<FP8_OUT, FP8_ACTIVATION, FP8_ACCUMULATES> end = {beta};
    // Loaded before the first result is stored: the compiler moves no load before a store.
    float scales_a[WARP_ROWS][SUMS], scales_b[WARP_COLS][SUMS];
#pragma unroll
    for (int e = 0; e < SUMS; ++e) {
#pragma unroll
        for (int i = 0; i < WARP_ROWS; ++i) scales_a[i][e] = BLOCKED ? 1.0f : scale_a[row_of(i, e) * scale_a_row];
#pragma unroll
        for (int j = 0; j < WARP_COLS; ++j) scales_b[j][e] = BLOCKED ? 1.0f : scale_b[col_of(j, e) * scale_b_row];
    }
    float largest = 0.0f;
    for_each_sum([&](int i, int j, int e) {
        const int row = row0 + i * MMA_SIDE + sum_row(e), col = col0 + j * MMA_SIDE + sum_column(e);
        if (row >= m || col >= n) return;
        const float sum = finish.value(acc[i][j].of[e], scales_a[i][e], scales_b[j][e], col);
        const float value = end.of(sum, out, row * ldo + col);
        finish.store(out, row * ldo + col, value);
        if (AMAX) largest = maximum(largest, magnitude(value));
    });
    if (AMAX) publish_amax(largest, amax);
}
