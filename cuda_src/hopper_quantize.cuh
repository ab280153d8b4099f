// The rows of a, quantized by the threads that multiply them: codes and scales as rowwise.cuh gives them.
#pragma once
#include "hopper.cuh"
#include "platform.cuh"

#include "common/vec8.cuh"
#include "common/reduce.cuh"

// What is quantized: `rows` rows of `octets` octets, `stride` bytes apart.
struct WideRows {
    const byte *x;
    long long stride;
    int rows, octets;
};

// THREADS threads quantize up to ROWS rows: per token, no amax above `upper` (MODE TOKEN), or by given scales (STATIC).
//
// A block multiplies only a part of k, `part` octets from `first` on, whole chunks of 16: their codes become tiles of
// SIDE rows x 128 columns as the copy engine would lay them, columns past the row's end zero; rows past the last stay as
// they are. A token's size takes all octets of its row: those of the block's own part come first.
//
// The caller owes: ROWS a power of two up to SIDE and THREADS, and at least as many as there are; THREADS / ROWS * VECTORS
// octets cover a row's chunks (STATIC: the part's); x and its stride are multiples of 16 bytes.
template <int THREADS, int ROWS, int VECTORS, int SIDE, int INPUT, int FORMAT, int MODE>
DEVICE void quantize_rows(char *tiles, float *scales, const WideRows &from, int first, int part, const float *given,
                          long long given_stride, float upper) {
    constexpr int TEAM = THREADS / ROWS, TEAM_WARPS = (TEAM + 31) / 32;
    __shared__ unsigned largest[THREADS / 32];
    const int row = threadIdx.x / TEAM, member = threadIdx.x % TEAM, all = (from.octets + 15) & ~15;
    const bool some = row < from.rows;
    const byte *const x = from.x + row * from.stride;
    const auto octet_of = [&](int v) {
        const int octet = first + member + v * TEAM;
        return octet < all ? octet : octet - all;
    };
    const auto is_own = [&](int v) { return member + v * TEAM < part; };

    Vec8<INPUT> octets[VECTORS];
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        octets[v] = empty_vec8<INPUT>();
        if (some && octet_of(v) < from.octets && (MODE == TOKEN || is_own(v)))
            octets[v] = load_vec8<INPUT, 16>(x + octet_of(v) * (8 * ITEM_BYTES[INPUT]));
    }
    float scale = 1.0f;
    bool bounded = false;
    if constexpr (MODE == STATIC) {
        if (some) scale = given[row * given_stride];
    } else {
        AbsMax<INPUT> seen;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) seen.update(octets[v]);
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
        const int own = member + v * TEAM, unit = (own / 2 ^ row) & 7; // of 16 bytes, as the swizzle moves it
        Vector8 codes = {0, 0};
        if (octet_of(v) < from.octets) codes = encode_vec8<INPUT, FORMAT, MODE>(octets[v], divisor);
        store8(tiles + (own / 16 * SIDE + row) * 128 + unit * 16 + own % 2 * 8, codes);
    }
    writes_fence();
    threads_sync(2, THREADS);
}
