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

// A block multiplies ``k_blocks`` k-blocks from ``first`` on: THREADS threads load their codes, and make them tiles of
// SIDE rows x 128 columns, columns past the rows' end zero; rows past the last stay as they are. ``from.vecs`` counts
// the codes of a row. A thread has the codes of BATCH words on their way at a time.
//
// In three steps, so that a thread does other things while its words are on their way: `begin` finds where they are, before
// a may be read; `request`; `store`.
template <int THREADS, int SIDE, int BATCH>
class LooseRows {
    const WideRows& from;
    const int skipped;
    const unsigned across, all;
    const byte* codes[BATCH];
    int left[BATCH];     // codes of the row, from those on
    unsigned to[BATCH];  // in the tiles
    Pieces<false, 1> pieces[BATCH];
    float scale;

    DEVICE void place(unsigned begin) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const unsigned at = begin + i * THREADS, row = at / across, column = at - row * across;
            codes[i] = from.x + row * from.stride + skipped + column * PIECE;
            left[i] = at < all ? from.vecs - skipped - int(column) * PIECE : -PIECE;
            to[i] = (column / 8 * SIDE + row) * BLOCK_K + ((column ^ row) & 7) * PIECE;  // as the swizzle moves it
        }
    }
    DEVICE void load() {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) load_words(pieces[i], codes[i], left[i]);
    }

  public:
    DEVICE LooseRows(const WideRows& from, int first, int k_blocks)
        : from(from),
          skipped(first * BLOCK_K),
          across(unsigned(k_blocks) * (BLOCK_K / PIECE)),
          all(across * from.rows),
          scale(1.0f) {}

    DEVICE void begin() {
        place(threadIdx.x);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {  // here, not behind the wait that follows
            codes[i] = (const byte*)computed_anew((long long)codes[i]);
            left[i] = computed_anew(left[i]);
            to[i] = computed_anew((int)to[i]);
        }
    }

    // ``scales`` has one a row if any are `given`.
    DEVICE void request(const float* scales, long long stride) {
        load();
        if (scales && threadIdx.x < SIDE) scale = scales[least((int)threadIdx.x, from.rows - 1) * stride];
    }

    // ``scales`` receives one a row.
    DEVICE void store(char* tiles, float* scales) {
        if (threadIdx.x < SIDE) scales[threadIdx.x] = scale;
#pragma unroll 1
        for (unsigned begin = threadIdx.x; begin < all;) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (begin + i * THREADS < all) store16(tiles + to[i], pieces[i].codes(0, codes[i], left[i]));
            begin += BATCH * THREADS;
            if (begin < all) {
                place(begin);
                load();
            }
        }
        accesses_fence();
        threads_sync(2, THREADS);
    }
};
