#include "../../ptx/mma.cuh"
#include "../args.cuh"
#include "../epilogue.cuh"
#include "../warp_sums.cuh"

// Products of few rows by mma.sync: out[m, n] = round(scale_a * (scale_b * acc) + bias), where acc is the sum over k of
// a[m, k] * b[n, k] in fp32. The weight b is streamed from memory once for every SIDE rows. With BLOCKED scales the sum
// of every 128 of k is scaled before it is added: acc = sum of scale_a * (scale_b * partial).
//
// A block makes SIDE tokens x 16 * TILES channels. Its WARPS warps take chunks of 128 of k round-robin; the block adds
// the warps' sums in their order. So the bits of a row depend on n, k and WARPS alone, not on m, SIDE, TILES or other
// rows. The tensor cores accumulate only within a chunk, because some GPUs keep only 14 bits of sums. Rows past m and
// n load an earlier row again, and their results are dropped; k past its end counts as zeros.
//
// The caller owes: k, lda and ldb divisible by 16, k not 0, a and b aligned to 16; row_tiles = ceil(m / SIDE); a grid
// of row_tiles * ceil(n / (16 * TILES)) blocks of WARPS * 32 threads; WARPS * SIDE * (16 * TILES + 4) floats of dynamic
// shared memory; scale strides over (m, k blocks) and (n or n blocks, k blocks), 0 where broadcast; B_BLOCK where a
// scale covers 128 channels.
constexpr int A = FP8_A, B = FP8_B, SIDE = FP8_SIDE, TILES = FP8_TILES, WARPS = FP8_WARPS;
constexpr bool BLOCKED = FP8_BLOCKED, B_BLOCK = FP8_B_BLOCK;
constexpr int VECTOR_BYTES = 16;  // bytes of a row that a lane loads at once
constexpr int STEP = 4 * VECTOR_BYTES;
constexpr int STEPS = BLOCK_K / STEP;
constexpr int COLUMNS = SIDE / MMA_TOKENS;
constexpr int CHANNELS = TILES * MMA_CHANNELS;
constexpr int PITCH = CHANNELS + 4;
static_assert(BLOCK_K % CHANNELS == 0, "the channels of a block have one scale");

// A lane's cursor over rows, which stays at the last row when it is moved past it. (Registers do not hold pointers to
// all rows.)
template <class T>
struct RowCursor {
    const T* from;
    long long stride;
    int left;  // rows after this one

    DEVICE static RowCursor of(const T* rows, long long stride, int first, int count) {
        return {rows + min_int(first, count - 1) * stride, stride, count - 1 - first};
    }
    DEVICE void move(int step) {
        if (left >= step) from += step * stride;
        left -= step;
    }
};

// Loads the vectors of a row at STEPS steps. If RAGGED, only `left` bytes belong to the row; those past it are zero.
template <bool RAGGED, class Load>
DEVICE void load(Vector16 (&vectors)[STEPS], const byte* row, int left, Load load_vector) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        if (RAGGED) vectors[step] = Vector16{0, 0, 0, 0};
        if (!RAGGED || step * STEP < left) vectors[step] = load_vector(row + step * STEP);
    }
}

// A lane's rows, scales and sums.
struct Lane {
    RowCursor<byte> channels, tokens;
    RowCursor<float> scale_b, scale_a[2];
    MmaSum sum[COLUMNS][TILES];

    // Adds the chunk of k at `at`. If RAGGED, only `left` bytes from this lane's first vector on belong to the rows.
    template <bool RAGGED>
    DEVICE void add(int at, int left, long long scale_a_at, long long scale_b_at) {
        Vector16 w[2 * TILES][STEPS];
        float scale_of_b[2 * TILES];
        RowCursor<byte> channel = channels;
        RowCursor<float> channel_scale = scale_b;
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            load<RAGGED>(w[i], channel.from + at, left, [](const byte* p) { return load16_streaming(p); });
            channel.move(8);
            if (BLOCKED) scale_of_b[i] = channel_scale.from[scale_b_at];
            channel_scale.move(8);
        }
        RowCursor<byte> token = tokens;
        RowCursor<float> token_scale[2] = {scale_a[0], scale_a[1]};
#pragma unroll
        for (int column = 0; column < COLUMNS; ++column) {
            Vector16 t[STEPS];
            load<RAGGED>(t, token.from + at, left, [](const byte* p) { return load16(p); });
            token.move(MMA_TOKENS);
            float scale_of_a[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (BLOCKED) scale_of_a[i] = token_scale[i].from[scale_a_at];
                token_scale[i].move(MMA_TOKENS);
            }
#pragma unroll
            for (int tile = 0; tile < TILES; ++tile) {
                MmaSum partial = {};
#pragma unroll
                for (int step = 0; step < STEPS; ++step) {
                    const Vector16 top = w[2 * tile][step], low = w[2 * tile + 1][step];
                    mma<B, A>(partial, {top.x, low.x, top.y, low.y}, {t[step].x, t[step].y});
                    mma<B, A>(partial, {top.z, low.z, top.w, low.w}, {t[step].z, t[step].w});
                }
                float (&acc)[4] = sum[column][tile].of;
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float part = partial.of[i];
                    if constexpr (BLOCKED)
                        acc[i] = fma_flushing(scale_of_a[i % 2], scale_of_b[2 * tile + i / 2] * part, acc[i]);
                    else acc[i] += part;
                }
            }
        }
    }
};

constexpr int THREADS = WARPS * WARP;
KERNEL(THREADS)
sm89_decode(MATMUL_PARAMETERS, float beta) {
    DYNAMIC_SHARED(shared);
    float* const sums = reinterpret_cast<float*>(shared);  // [WARPS][SIDE][PITCH]
    const TileOrigin origin = dense_tile<SIDE, CHANNELS>(row_tiles);
    const auto [first_row, first_col] = origin;
    const int warp = int(thread_x()) / WARP, g = int(lane()) / 4, q = int(lane()) % 4;

    Lane mine;
    mine.channels = RowCursor<byte>::of(b + q * VECTOR_BYTES, ldb, first_col + g, n);
    if (B_BLOCK) mine.scale_b = {scale_b + first_col / BLOCK_K * scale_b_row, 0, 0};
    else mine.scale_b = RowCursor<float>::of(scale_b, scale_b_row, first_col + g, n);
    mine.tokens = RowCursor<byte>::of(a + q * VECTOR_BYTES, lda, first_row + g, m);
#pragma unroll
    for (int i = 0; i < 2; ++i) mine.scale_a[i] = RowCursor<float>::of(scale_a, scale_a_row, first_row + 2 * q + i, m);
#pragma unroll
    for (int i = 0; i < COLUMNS * TILES; ++i) mine.sum[i / TILES][i % TILES] = {};

    grid_dependency_launch();
    grid_dependency_wait();
    int at = warp * BLOCK_K;
    for (; at + BLOCK_K <= k; at += WARPS * BLOCK_K)
        mine.add<false>(at, BLOCK_K, at / BLOCK_K * scale_a_k, at / BLOCK_K * scale_b_k);
    if (at < k) mine.add<true>(at, k - at - q * VECTOR_BYTES, at / BLOCK_K * scale_a_k, at / BLOCK_K * scale_b_k);

#pragma unroll
    for (int column = 0; column < COLUMNS; ++column)
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = column * MMA_TOKENS + 2 * q + i % 2, col = tile * MMA_CHANNELS + 8 * (i / 2) + g;
                sums[(warp * SIDE + row) * PITCH + col] = mine.sum[column][tile].of[i];
            }
    block_barrier();

    const Epilogue<FP8_OUT, FP8_BIAS> finish(bias, nullptr);
    const Ending<FP8_OUT, FP8_ACTIVATION, FP8_ACCUMULATES> ending = {beta};
    for_each_sum<WARPS, SIDE, CHANNELS, PITCH>(sums, origin, m, n, [&](float acc, long long y, long long x) {
        const float scale_of_a = BLOCKED ? 1.0f : scale_a[y * scale_a_row];
        const float scale_of_b = BLOCKED ? 1.0f : scale_b[x * scale_b_row];
        const float value = finish.value(acc, scale_of_a, scale_of_b, int(x));
        finish.store(out, y * ldo + x, ending.of(value, out, y * ldo + x));
    });
}
