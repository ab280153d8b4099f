// The rows of a where they begin at any address: aligned by the threads that multiply them, as TMA would store them.
#pragma once
#include "quantize_rows.cuh"
#include "../generic/codes.cuh"

// Words of 16 bytes that have any of the ``left`` codes from the first on: read whole, as TMA reads the weight's.
DEVICE void load_words(Pieces<false, 1>& pieces, const byte* from, int left) {
    const int off = off_word(from);
    pieces.words[0] = left > 0 ? load16(from - off) : Vector16{0, 0, 0, 0};
    pieces.words[1] = left > PIECE - off ? load16(from - off + PIECE) : Vector16{0, 0, 0, 0};
}

// A block multiplies ``k_blocks`` k-blocks from ``first`` on: THREADS threads load their codes at once, and make them tiles
// of SIDE rows x 128 columns, columns past the rows' end zero; rows past the last stay as they are. ``from.vecs`` counts
// the codes of a row. ``scales`` receives one a row if any are ``given``. A thread has the codes of BATCH words on their way.
template <int THREADS, int SIDE, int BATCH>
DEVICE void align_rows(char* tiles, float* scales, const WideRows& from, int first, int k_blocks, const float* given,
                       long long given_stride) {
    if (given && threadIdx.x < SIDE) scales[threadIdx.x] = given[least((int)threadIdx.x, from.rows - 1) * given_stride];
    const unsigned across = unsigned(k_blocks) * (BLOCK_K / PIECE), all = across * from.rows;
    const int skipped = first * BLOCK_K;
#pragma unroll 1
    for (unsigned begin = threadIdx.x; begin < all; begin += BATCH * THREADS) {
        Pieces<false, 1> pieces[BATCH];
        unsigned rows[BATCH] = {};
        const auto column = [&](int i) { return int(begin + i * THREADS - rows[i] * across); };
        const auto code = [&](int i) { return from.x + rows[i] * from.stride + skipped + column(i) * PIECE; };
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            rows[i] = (begin + i * THREADS) / across;
            if (begin + i * THREADS < all) load_words(pieces[i], code(i), from.vecs - skipped - column(i) * PIECE);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            if (begin + i * THREADS >= all) break;
            const int at = column(i), unit = (at ^ rows[i]) & 7;  // of 16 bytes, as the swizzle moves it
            store16(tiles + (at / 8 * SIDE + rows[i]) * BLOCK_K + unit * PIECE,
                    pieces[i].codes(0, code(i), from.vecs - skipped - at * PIECE));
        }
    }
    accesses_fence();
    threads_sync(2, THREADS);
}
