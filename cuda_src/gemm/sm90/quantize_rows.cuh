// The consumer threads quantize the rows of a themselves, to the codes and scales of quantize/rowwise.cuh.
#pragma once
#include "../../ptx/tma.cuh"
#include "../../ptx/wgmma.cuh"
#include "../../platform.cuh"

#include "../../common/vec8.cuh"
#include "../../common/reduce.cuh"

// The rows to quantize: `rows` rows of `vecs` vectors of 8 elements, `stride` bytes apart.
struct WideRows {
    const byte* x;
    long long stride;
    int rows, vecs;
};

// THREADS threads quantize up to ROWS rows: per token, amax at most `upper` (MODE TOKEN), or by given scales (STATIC).
//
// A block multiplies only a part of k, `part` vectors from `first` on, in whole k-blocks of 16 vectors. Their codes are
// stored as TMA would store them, in tiles of SIDE rows x 128 columns, with zeros in columns past the end of a row;
// rows past the last keep what they have. The amax of a token is over all vectors of its row; a thread loads those of
// the block's own part first.
//
// The caller owes: ROWS, a power of two, at most SIDE and THREADS and at least the number of rows; THREADS / ROWS *
// VECTORS vectors cover the k-blocks of a row (STATIC: of the part); x and its stride are multiples of 16 bytes.
template <int THREADS, int ROWS, int VECTORS, int SIDE, int INPUT, int FORMAT, int MODE>
DEVICE void quantize_rows(char* tiles, float* scales, const WideRows& from, int first, int part, const float* given,
                          long long given_stride, float upper) {
    constexpr int TEAM = THREADS / ROWS, TEAM_WARPS = (TEAM + 31) / 32;
    __shared__ unsigned largest[THREADS / 32];
    const int row = threadIdx.x / TEAM, member = threadIdx.x % TEAM, all = (from.vecs + 15) & ~15;
    const bool some = row < from.rows;
    const byte* const x = from.x + row * from.stride;
    const auto vec_of = [&](int v) {
        const int vec = first + member + v * TEAM;
        return vec < all ? vec : vec - all;
    };
    const auto is_own = [&](int v) { return member + v * TEAM < part; };

    Vec8<INPUT> loaded[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        loaded[v] = empty_vec8<INPUT>();
        if (some && vec_of(v) < from.vecs && (MODE == TOKEN || is_own(v)))
            loaded[v] = load_vec8<INPUT, 16>(x + vec_of(v) * (8 * SIZE_OF<INPUT>));
    }
    float scale = 1.0f;
    bool bounded = false;
    if constexpr (MODE == STATIC) {
        if (some) scale = given[row * given_stride];
    } else {
        AbsMax<INPUT> seen;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) seen.update(loaded[v]);
        unsigned amax = team_max<(TEAM < 32 ? TEAM : 32)>(seen.bits());
        if constexpr (TEAM_WARPS > 1) {
            if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = amax;
            threads_sync(2, THREADS);
#pragma unroll
            for (int i = 0; i < TEAM_WARPS; ++i) amax = max(amax, largest[row * TEAM_WARPS + i]);
        }
        scale = scale_of<MODE, FORMAT>(amax, upper, 0.0f);
        bounded = upper < float_of(amax);
    }
    const Divisor divisor = prepared<MODE>(scale, bounded);
    if (member == 0) scales[row] = scale;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (!some || !is_own(v)) continue;
        const int own = member + v * TEAM, unit = (own / 2 ^ row) & 7;  // of 16 bytes, as the swizzle moves it
        Vector8 codes = {0, 0};
        if (vec_of(v) < from.vecs) codes = encode_vec8<INPUT, FORMAT, MODE>(loaded[v], divisor);
        store8(tiles + (own / 16 * SIDE + row) * 128 + unit * 16 + own % 2 * 8, codes);
    }
    accesses_fence();
    threads_sync(2, THREADS);
}
