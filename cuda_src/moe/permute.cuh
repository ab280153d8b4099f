// Sorts the choices of all tokens by expert, equal ones in their order, and copies the row of its token, with its
// scales, to the place of each: inverse[t][j] is the place of choice j of token t, or -1 if there is no such expert,
// and offs[e] is where the rows of expert e end.
//
// A block has ACROSS x (THREADS / ACROSS) threads, with VECTOR bytes of a row each, for `block_tokens` tokens; block b
// has column tile b % column_tiles of its tokens. Every block counts the choices before its own: those of its chunk by
// itself, those of other chunks from `counts` (count.cuh). If there is one chunk, it counts that and needs no `counts`.
// The caller owes: EXPERTS, a power of two of at least a warp's lanes, >= experts; block_tokens * each <= PLACES;
// chunk_tokens a multiple of block_tokens; rows of x and of the result aligned to VECTOR bytes.
#pragma once
#include "experts.cuh"
#include "../common/values.cuh"

constexpr int bits_below(int number) { return number > 1 ? 1 + bits_below(number / 2) : 0; }

// For each expert: how many choices there are, and how many of them before the block's own. `find_places` makes of the
// latter the place of the block's next choice.
template <int EXPERTS>
struct Experts {
    int all[EXPERTS], next[EXPERTS];
};

// Called by all threads: counts the choices from `begin` to `own`, the block's first, and takes all others from
// `counts`; or, if there is one chunk, counts all choices from `begin` to `end`.
template <int EXPERTS, int THREADS, class Id>
DEVICE void count_others(Experts<EXPERTS>& of, const Id* ids, const int* counts, int chunks, int chunk, int begin,
                         int own, int end, int experts) {
    if (chunks == 1) {
        for_each_choice<THREADS>(ids, begin, end, experts, [&](int choice, int expert) {
            atomic_add_shared(&of.all[expert], 1);
            if (choice < own) atomic_add_shared(&of.next[expert], 1);
        });
        return;
    }
    for_each_choice<THREADS>(ids, begin, own, experts,
                             [&](int, int expert) { atomic_add_shared(&of.next[expert], 1); });
    constexpr int ACROSS = EXPERTS < THREADS ? EXPERTS : THREADS, DOWN = THREADS / ACROSS;
    for (int expert = (int)thread_x() % ACROSS; expert < experts; expert += ACROSS) {
        int all = 0, before = 0;
#pragma unroll 8
        for (int i = (int)thread_x() / ACROSS; i < chunks; i += DOWN) {
            const int count = counts[(long long)i * experts + expert];
            all += count;
            before += i < chunk ? count : 0;
        }
        atomic_add_shared(&of.all[expert], all);
        atomic_add_shared(&of.next[expert], before);
    }
}

// Called by one warp: each lane adds the counts of consecutive experts, and begins after those of the lanes before it.
template <int EXPERTS>
DEVICE void find_places(Experts<EXPERTS>& of, int experts, int* offs) {
    constexpr int EACH = EXPERTS / WARP;  // consecutive experts of a lane
    const int first = (int)lane() * EACH;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) sum += of.all[first + i];
    sum = scan_warp_before(sum, sum_int);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        of.next[first + i] += sum;
        sum += of.all[first + i];
        if (offs && first + i < experts) offs[first + i] = sum;
    }
    warp_barrier();
}

// Called by one warp: writes the places of the choices from `begin` to `end`, the block's own. Those of one expert have
// consecutive places, in the order of the lanes; the first one's lane then moves the expert's next place.
template <int EXPERTS, int PLACES, class Id>
DEVICE void place_choices(Experts<EXPERTS>& of, int (&places)[PLACES], const Id* ids, int begin, int end, int experts,
                          int* inverse) {
    for (int first = begin; first < end; first += WARP) {
        const int choice = first + (int)lane();
        const Id given = choice < end ? ids[choice] : ~Id(0);
        const bool known = given < Id(experts);
        const int expert = known ? (int)given : 0;
        const Lanes same = lanes_of_same<bits_below(EXPERTS)>(expert, known);
        const int before = count_lanes(same & lanes_before());
        const int place = known ? of.next[expert] + before : -1;
        warp_barrier();
        if (known && before == 0) of.next[expert] += count_lanes(same);
        warp_barrier();
        if (choice < end) {
            places[choice - begin] = place;
            if (inverse) inverse[choice] = place;
        }
    }
}

template <int EXPERTS, class Id, int VECTOR, class Scale, int PLACES, int ACROSS, int THREADS>
DEVICE void permute_tokens(const Id* ids, int each, int experts, const int* counts, int chunk_tokens, const byte* x,
                           long long x_stride, const Scale* scale, long long scale_row_stride,
                           long long scale_col_stride, byte* rows, Scale* row_scale, long long row_scale_row_stride,
                           long long row_scale_col_stride, int* offs, int* inverse, int tokens, int block_tokens,
                           int row_bytes, int scale_cols, int column_tiles) {
    constexpr int DOWN = THREADS / ACROSS;
    SHARED Experts<EXPERTS> of;
    SHARED int places[PLACES];
    const int block = (int)block_x() / column_tiles, column_tile = (int)block_x() % column_tiles;
    const int token = block * block_tokens, count = tokens - token < block_tokens ? tokens - token : block_tokens;
    const int at = (column_tile * ACROSS + (int)thread_x() % ACROSS) * VECTOR, valid = row_bytes - at;
    for (int i = (int)thread_x(); i < EXPERTS; i += THREADS) of.all[i] = of.next[i] = 0;
    grid_dependency_launch();
    grid_dependency_wait();

    // The first row is on its way while choices are counted, and each further one while the one before is stored.
    const auto load = [&](Words<VECTOR>& values, int row) {
        if (row < count && valid > 0) values.template load<1>(x + (token + row) * x_stride + at, valid);
    };
    Words<VECTOR> values, after;
    load(values, (int)thread_x() / ACROSS);

    block_barrier();
    const int chunks = (tokens + chunk_tokens - 1) / chunk_tokens, chunk = token / chunk_tokens;
    const int last = tokens - chunk * chunk_tokens < chunk_tokens ? tokens : (chunk + 1) * chunk_tokens;
    const int begin = chunk * chunk_tokens * each, own = token * each;
    count_others<EXPERTS, THREADS>(of, ids, counts, chunks, chunk, begin, own, last * each, experts);
    block_barrier();
    if (thread_x() < WARP) {
        find_places(of, experts, block_x() == 0 ? offs : nullptr);
        place_choices(of, places, ids, own, own + count * each, experts, column_tile == 0 ? inverse : nullptr);
    }
    block_barrier();
    for (int row = (int)thread_x() / ACROSS; row < count; row += DOWN, values = after) {
        load(after, row + DOWN);
        for (int i = 0; i < each && valid > 0; ++i) {
            const int place = places[row * each + i];
            if (place >= 0) values.template store<1>(rows + (long long)place * row_bytes + at, valid);
        }
    }
    if (column_tile > 0) return;
    for (int i = (int)thread_x(); i < count * scale_cols; i += THREADS) {
        const int row = i / scale_cols, column = i % scale_cols;
        const Scale value = scale[(token + row) * scale_row_stride + column * scale_col_stride];
        for (int j = 0; j < each; ++j) {
            const int place = places[row * each + j];
            if (place >= 0) row_scale[place * row_scale_row_stride + column * row_scale_col_stride] = value;
        }
    }
}

KERNEL(FP8_THREADS)
permute(const void* topk_ids, int each, int experts, const int* counts, int chunk_tokens, const byte* x,
        long long x_stride, const FP8_SCALE* scale, long long scale_row_stride, long long scale_col_stride, byte* rows,
        FP8_SCALE* row_scale, long long row_scale_row_stride, long long row_scale_col_stride, int* offs, int* inverse,
        int tokens, int block_tokens, int row_bytes, int scale_cols, int column_tiles) {
    permute_tokens<FP8_EXPERTS, FP8_ID, FP8_VECTOR, FP8_SCALE, FP8_PLACES, FP8_ACROSS, FP8_THREADS>(
        static_cast<const FP8_ID*>(topk_ids), each, experts, counts, chunk_tokens, x, x_stride, scale, scale_row_stride,
        scale_col_stride, rows, row_scale, row_scale_row_stride, row_scale_col_stride, offs, inverse, tokens,
        block_tokens, row_bytes, scale_cols, column_tiles);
}
