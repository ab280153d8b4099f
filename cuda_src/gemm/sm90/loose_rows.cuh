// Rows of a that begin at any address: the consumer threads load and align them, and store them as TMA would.
#pragma once
#include "quantize_rows.cuh"
#include "../generic/codes.cuh"

// Loads the aligned 16-byte words that hold the first 16 of `left` codes. Words are read whole, as by TMA.
DEVICE void load_words(CodeVectors<false, 1>& vectors, const byte* from, int left) {
    const int off = off_word(from);
    vectors.words[0] = left > 0 ? load16(from - off) : Vector16{0, 0, 0, 0};
    vectors.words[1] = left > VECTOR_BYTES - off ? load16(from - off + VECTOR_BYTES) : Vector16{0, 0, 0, 0};
}

// THREADS threads load the codes of the `k_blocks` k-blocks that their block multiplies, from `first` on, into
// tiles of SIDE rows x 128 columns, with zeros in columns past the end of a row; rows past the last keep what they
// have. `from.vecs` counts the codes of a row. A thread keeps the loads of BATCH words in flight.
//
// There are three steps, so that a thread can do other work while its loads are in flight: `begin` computes the
// addresses, before a may be read, `request` issues the first loads, and `store` writes the tiles.
template <int THREADS, int SIDE, int BATCH>
class LooseRows {
    const WideRows& from;
    const int skipped;
    const unsigned across, all;
    long long at[BATCH];  // of a word's first code, from the first row's first code on
    int left[BATCH];      // codes of its row from there on
    unsigned to[BATCH];   // the word's place in the tiles
    CodeVectors<false, 1> vectors[BATCH];
    float scale;

    DEVICE void place(unsigned begin) {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const unsigned word = begin + i * THREADS, row = word / across, column = word - row * across;
            at[i] = row * from.stride + skipped + column * VECTOR_BYTES;
            left[i] = word < all ? from.vecs - skipped - int(column) * VECTOR_BYTES : -VECTOR_BYTES;
            to[i] = (column / 8 * SIDE + row) * BLOCK_K + ((column ^ row) & 7) * VECTOR_BYTES;  // swizzled
        }
    }
    DEVICE void load() {
#pragma unroll
        for (int i = 0; i < BATCH; ++i) load_words(vectors[i], from.x + at[i], left[i]);
    }

public:
    DEVICE LooseRows(const WideRows& from, int first, int k_blocks)
        : from(from),
          skipped(first * BLOCK_K),
          across(unsigned(k_blocks) * (BLOCK_K / VECTOR_BYTES)),
          all(across * from.rows),
          scale(1.0f) {}

    DEVICE void begin() {
        place(threadIdx.x);
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {  // keeps the compiler from moving this behind the wait that follows
            at[i] = opaque(at[i]);
            left[i] = opaque(left[i]);
            to[i] = (unsigned)opaque((int)to[i]);
        }
    }

    // `scales`: of the rows, `stride` apart, or null.
    DEVICE void request(const float* scales, long long stride) {
        load();
        if (scales && threadIdx.x < SIDE) scale = scales[min_int((int)threadIdx.x, from.rows - 1) * stride];
    }

    // `scales` receives a scale per row.
    DEVICE void store(char* tiles, float* scales) {
        if (threadIdx.x < SIDE) scales[threadIdx.x] = scale;
#pragma unroll 1
        for (unsigned begin = threadIdx.x; begin < all;) {
#pragma unroll
            for (int i = 0; i < BATCH; ++i)
                if (begin + i * THREADS < all) store16(tiles + to[i], vectors[i].codes(0, from.x + at[i], left[i]));
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
