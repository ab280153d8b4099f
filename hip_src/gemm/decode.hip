#include "mfma.cuh"
#include "../../cuda_src/gemm/args.cuh"
#include "../../cuda_src/gemm/epilogue.cuh"
#include "../../cuda_src/gemm/warp_sums.cuh"

// Products of few rows by FP8 matrix instructions: out[m, n] = round(scale_a * (scale_b * acc) + bias), where acc is
// the sum over k of a[m, k] * b[n, k] in fp32. The weight b is streamed from memory once for every 16 rows.
//
// A block makes 16 tokens x 16 channels. Its WAVEFRONTS waves take chunks of UNROLL * WARP bytes of k round-robin, a
// lane 16 bytes of a row at a time; the block adds the waves' sums in their order. So the bits of a row depend on n, k
// and WAVEFRONTS alone, not on m or other rows. Rows past m and n load the last row again, and their results are
// dropped; k past its end counts as zeros.
//
// The caller owes: k, lda and ldb divisible by 16, k not 0, a and b aligned to 16; row_tiles = ceil(m / 16); a grid of
// row_tiles * ceil(n / 16) blocks of WAVEFRONTS * WARP threads; scale strides, 0 where one scale serves all rows.
constexpr int A = FP8_A, B = FP8_B, WAVEFRONTS = FP8_WAVEFRONTS, UNROLL = FP8_UNROLL;
constexpr int VECTOR_BYTES = 16;  // bytes of a row that a lane loads at once
constexpr int STEP = WARP;        // of k: a vector for each of the WARP / 16 lanes that share a row
constexpr int CHUNK = UNROLL * STEP;
constexpr int PITCH = MATRIX_SIDE + 4;

// A lane's part of a chunk.
struct Chunk {
    Vector16 weight[UNROLL], tokens[UNROLL];

    // If RAGGED, only `left` bytes from the pointers on belong to the rows, and vectors past them are zero.
    template <bool RAGGED>
    DEVICE void load(const byte* weight_row, const byte* token_row, int left) {
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            weight[i] = tokens[i] = Vector16{0, 0, 0, 0};
            if (RAGGED && i * STEP >= left) continue;
            weight[i] = load16_streaming(weight_row + i * STEP);
            tokens[i] = load16_whole(token_row + i * STEP);
        }
    }

    DEVICE Accumulator multiply(Accumulator sum) const {
        keep_order();
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const Vector16 w = weight[i], t = tokens[i];
            sum = matrix_multiply<B, A>(Vector8{w.x, w.y}, Vector8{t.x, t.y}, sum);
            sum = matrix_multiply<B, A>(Vector8{w.z, w.w}, Vector8{t.z, t.w}, sum);
        }
        return sum;
    }
};

constexpr int THREADS = WAVEFRONTS * WARP;
KERNEL(THREADS)
gfx9_decode(MATMUL_PARAMETERS, float beta) {
    SHARED alignas(16) float partial[WAVEFRONTS][MATRIX_SIDE * PITCH];
    const TileOrigin origin = dense_tile<MATRIX_SIDE, MATRIX_SIDE>(row_tiles);
    const auto [first_row, first_col] = origin;
    const int wave = wave_uniform(int(thread_x()) / WARP);
    const int place = int(lane()) % MATRIX_SIDE, part = int(lane()) / MATRIX_SIDE;
    const int token = first_row + place < m ? first_row + place : m - 1;
    const int channel = first_col + place < n ? first_col + place : n - 1;
    const byte* const weight_row = b + channel * ldb + part * VECTOR_BYTES;
    const byte* const token_row = a + token * lda + part * VECTOR_BYTES;

    Accumulator sum = {};
    Chunk chunk;
    int at = wave * CHUNK;
    for (; at + CHUNK <= k; at += WAVEFRONTS * CHUNK) {
        chunk.load<false>(weight_row + at, token_row + at, CHUNK);
        sum = chunk.multiply(sum);
    }
    if (at < k) {
        chunk.load<true>(weight_row + at, token_row + at, k - at - part * VECTOR_BYTES);
        sum = chunk.multiply(sum);
    }

    float* const mine = partial[wave] + place * PITCH + part * MATRIX_ROWS;
#pragma unroll
    for (int i = 0; i < MATRIX_ROWS; ++i) mine[i] = sum[i];
    block_barrier();

    const Epilogue<FP8_OUT, FP8_BIAS> finish(bias, nullptr);
    const Ending<FP8_OUT, FP8_ACTIVATION, FP8_ACCUMULATES> ending = {beta};
    const auto end = [&](float acc, long long y, long long x) {
        const float value = finish.value(acc, scale_a[y * scale_a_row], scale_b[x * scale_b_row], int(x));
        finish.store(out, y * ldo + x, ending.of(value, out, y * ldo + x));
    };
    for_each_sum<WAVEFRONTS, MATRIX_SIDE, MATRIX_SIDE, PITCH>(partial[0], origin, m, n, end);
}
