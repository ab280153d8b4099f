// Rows of a that begin at any address: the consumer threads load and align them, and store them as TMA would.
#pragma once
#include "quantize_rows.cuh"
#include "../generic/codes.cuh"

// Loads the aligned 16-byte words that hold the first 16 of ``left`` codes. Words are read whole, as by TMA.
DEVICE void load_words(Pieces<false, 1>& pieces, const byte* from, int left) {
    const int off = off_word(from);
    pieces.words[0] = left > 0 ? load16(from - off) : Vector16{0, 0, 0, 0};
    pieces.words[1] = left > PIECE - off ? load16(from - off + PIECE) : Vector16{0, 0, 0, 0};
}

// THREADS threads load the codes of the ``k_blocks`` k-blocks that their block multiplies, from ``first`` on, into
// tiles of SIDE rows x 128 columns, with zeros in columns past the end of a row; rows past the last keep what they
// have. ``from.vecs`` counts the codes of a row. ``scales`` receives a scale per row if any are ``given``. A thread
// keeps the loads of BATCH words in flight.
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
