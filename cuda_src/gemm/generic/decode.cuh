// Products of few rows, any m, n, k >= 0, any address, stride and format: out[m, n] = round(scale_a * (scale_b * acc) +
// bias), where acc is the sum over k of a[m, k] * b[n, k] in fp32. The weight b is streamed from memory once for every
// SIDE rows of a. The GPU's FP8 matrix instructions multiply the codes; if it has none for the formats, codes become
// 16-bit floats in registers, exactly. With BLOCKED scales the sum of a chunk of k, which never crosses a multiple of
// 128, is scaled before it is added: acc = sum of scale_a * (scale_b * partial).
//
// A block makes SIDE tokens x 16 * TILES channels. Its WARPS warps take chunks of CHUNK of k round-robin; the block
// adds the warps' sums in their order. So the bits of a row depend on n, k and WARPS alone, not on m, SIDE, TILES or
// other rows. Rows past m and n load the last row again, and their results are dropped; k past its end counts as zeros.
//
// The caller owes: if ALIGNED, a, b, lda, ldb and k divisible by 16; scale strides over (m, k blocks) and (n or n
// blocks, k blocks), 0 where broadcast; 0 in amax before the launch; WARPS * SIDE * (16 * TILES + 4) floats of dynamic
// shared memory.
#pragma once
#include "../args.cuh"
#include "../epilogue.cuh"
#include "../warp_sums.cuh"
#include "codes.cuh"
#include "operands.cuh"

constexpr int A = FP8_A, B = FP8_B, SIDE = FP8_SIDE, TILES = FP8_TILES, WARPS = FP8_WARPS;
constexpr bool ALIGNED = FP8_ALIGNED, BLOCKED = FP8_BLOCKED, B_BLOCK = FP8_B_BLOCK, AMAX = FP8_AMAX;
constexpr int UNITS = SIDE / MMA_SIDE, CHANNELS = TILES * MMA_SIDE, PITCH = CHANNELS + 4;
constexpr int PARTS = MMA_DEPTH / 8 / LANE_CHUNKS;                          // lanes that share a row
constexpr int CHUNK = LANE_ROWS * LANE_CHUNKS > 2 ? BLOCK_K / 2 : BLOCK_K;  // as much as a lane's registers hold
constexpr int PIECES = CHUNK / (PIECE * PARTS);                             // pieces of a chunk that a lane loads
constexpr int STEPS = CHUNK / MMA_DEPTH;
static_assert(BLOCK_K % CHANNELS == 0, "the channels of a block have one scale");

// A lane's codes of 16 rows of a matrix: of each row that it holds, PIECES neighbouring pieces of a chunk of k.
struct LaneCodes {
    Pieces<ALIGNED, PIECES> rows[LANE_ROWS];

    DEVICE static int offset() { return lane_chunk() / LANE_CHUNKS * (PIECE * PIECES); }

    // `from` points at this lane's codes of each row at k = 0.
    template <bool CAREFUL>
    DEVICE void load(const byte* const (&from)[LANE_ROWS], int at, int left, const byte* first, const byte* last) {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) rows[i].template load<CAREFUL>(from[i] + at, left, first, last);
    }
    template <int FORMAT>
    DEVICE void widen_into(Fragment (&fragments)[STEPS], const byte* const (&from)[LANE_ROWS], int left) const {
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i)
#pragma unroll
            for (int j = 0; j < PIECES; ++j) {
                const Vector16 codes = rows[i].codes(j, from[i], left);
                fragments[2 * j / LANE_CHUNKS].chunk[i][2 * j % LANE_CHUNKS] = operand<FORMAT>(codes.x, codes.y);
                fragments[(2 * j + 1) / LANE_CHUNKS].chunk[i][(2 * j + 1) % LANE_CHUNKS] =
                    operand<FORMAT>(codes.z, codes.w);
            }
    }
};

// Sets `rows` to the addresses of this lane's codes at k = 0, of 16 rows from `first_row` on.
DEVICE void point(const byte* (&rows)[LANE_ROWS], const byte* codes, long long stride, int first_row, int count) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i)
        rows[i] = codes + least(first_row + lane_row(i), count - 1) * stride + LaneCodes::offset();
}

constexpr int THREADS = WARPS * WARP;
#if FP8_BLOCKED || FP8_SIDE > 16
KERNEL_ALONE(THREADS)
#else
KERNEL(THREADS)
#endif
generic_decode(MATMUL_PARAMETERS, const float* out_scale, float* amax, float beta) {
    DYNAMIC_SHARED(shared);
    float* const sums = reinterpret_cast<float*>(shared);  // [WARPS][SIDE][PITCH]
    const TileOrigin origin = dense_tile<SIDE, CHANNELS>(row_tiles);
    const int first_row = origin.row, first_col = origin.column;
    const int warp = int(thread_x()) / WARP;
    const byte* const end_a = end_of(a, lda, m, k);
    const byte* const end_b = end_of(b, ldb, n, k);

    grid_dependency_launch();
    grid_dependency_wait();

    const byte* channels[TILES][LANE_ROWS];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) point(channels[tile], b, ldb, first_col + tile * MMA_SIDE, n);
    LaneCodes weight[TILES];  // of the next chunk, loaded while the current one is multiplied
    const auto load_weight = [&](int at) {
        const int left = k - at - LaneCodes::offset();
        if (careful<ALIGNED>(at, CHUNK, k)) {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                weight[tile].template load<true>(channels[tile], at, left, b, end_b);
        } else {
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile)
                weight[tile].template load<false>(channels[tile], at, left, b, end_b);
        }
    };

    Sum sum[UNITS][TILES] = {};
    int at = warp * CHUNK;
    if (at < k) load_weight(at);
    for (; at < k; at += WARPS * CHUNK) {
        const int left = k - at - LaneCodes::offset(), following = at + WARPS * CHUNK;
        Fragment w[TILES][STEPS];
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) weight[tile].template widen_into<B>(w[tile], channels[tile], left);
        if (following < k) load_weight(following);
        const long long block = at / BLOCK_K;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
            const byte* rows[LANE_ROWS];
            point(rows, a, lda, first_row + unit * MMA_SIDE, m);
            LaneCodes tokens;
            if (careful<ALIGNED>(at, CHUNK, k)) tokens.template load<true>(rows, at, left, a, end_a);
            else tokens.template load<false>(rows, at, left, a, end_a);
            Fragment t[STEPS];
            tokens.template widen_into<A>(t, rows, left);
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                Sum partial = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) multiply<B, A>(partial, w[tile][step], t[step]);
#pragma unroll
                for (int e = 0; e < SUMS; ++e) {
                    float& acc = sum[unit][tile].of[e];
                    if constexpr (BLOCKED) {
                        const int row = least(first_row + unit * MMA_SIDE + sum_column(e), m - 1);
                        const int col = least(first_col + tile * MMA_SIDE + sum_row(e), n - 1);
                        const float across = scale_a[row * scale_a_row + block * scale_a_k];
                        const float along =
                            scale_b[(B_BLOCK ? first_col / BLOCK_K : col) * scale_b_row + block * scale_b_k];
                        acc += across * (along * partial.of[e]);
                    } else {
                        acc += partial.of[e];
                    }
                }
            }
        }
    }
#pragma unroll
    for (int unit = 0; unit < UNITS; ++unit)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int e = 0; e < SUMS; ++e)
                sums[(warp * SIDE + unit * MMA_SIDE + sum_column(e)) * PITCH + tile * MMA_SIDE + sum_row(e)] =
                    sum[unit][tile].of[e];
    block_barrier();

    const Epilogue<FP8_OUT, FP8_BIAS> finish(bias, out_scale);
    const Ending<FP8_OUT, FP8_ACTIVATION, FP8_ACCUMULATES> end = {beta};
    float largest = 0.0f;
    for_each_sum<WARPS, SIDE, CHANNELS, PITCH>(sums, origin, m, n, [&](float acc, long long y, long long x) {
        const float across = BLOCKED ? 1.0f : scale_a[y * scale_a_row];
        const float along = BLOCKED ? 1.0f : scale_b[x * scale_b_row];
        const float value = end.of(finish.value(acc, across, along, int(x)), out, y * ldo + x);
        finish.store(out, y * ldo + x, value);
        if (AMAX) largest = maximum(largest, magnitude(value));
    });
    if (AMAX) publish_amax(largest, amax);
}
