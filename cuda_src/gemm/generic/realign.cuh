// Copies between rows at any address and aligned rows, around a product that needs aligned ones.
#pragma once
#include "codes.cuh"

// The bytes of an aligned word that are in [first, end), loaded concurrently; the others are zero.
DEVICE Vector16 edge_word(const byte* word, const byte* first, const byte* end) {
    unsigned bytes[PIECE], parts[4];
#pragma unroll
    for (int i = 0; i < PIECE; ++i) bytes[i] = word + i >= first && word + i < end ? word[i] : 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
        parts[i] = bytes[4 * i] | bytes[4 * i + 1] << 8 | bytes[4 * i + 2] << 16 | bytes[4 * i + 3] << 24;
    return {parts[0], parts[1], parts[2], parts[3]};
}

// [rows, k] codes at any address and stride, and their copy, aligned to 16: rows of `ld` codes, padded with zeros.
struct Realigned {
    const byte* codes;
    long long stride;
    byte* out;
    int rows;

    // Copies the unit-th 16 codes of the aligned rows.
    DEVICE void copy(unsigned unit, unsigned across, int k) const {
        const unsigned row = unit / across, piece = unit - row * across;
        const byte* const from = codes + row * stride + piece * PIECE;
        const int left = k - int(piece) * PIECE;
        const byte *const end = end_of(codes, stride, rows, k), *const word = from - off_word(from);
        Pieces<false, 1> pieces;
        if (word >= codes && word + 2 * PIECE <= end) pieces.load<false>(from, left, codes, end);
        else pieces = {edge_word(word, codes, end), edge_word(word + PIECE, codes, end)};
        store16(out + static_cast<long long>(unit) * PIECE, pieces.codes(0, from, left));
    }
};

// Copies a and b; an operand that need not be copied has 0 rows. Also sets the amax `cleared`, if not null, to 0 for
// the product that finds it. The caller owes: fewer than 2**31 pieces of 16 codes together.
KERNEL(256)
realign_codes(const byte* a, long long lda, byte* out_a, int m, const byte* b, long long ldb, byte* out_b, int n, int k,
              int ld, float* cleared) {
    grid_dependency_launch();
    grid_dependency_wait();
    if (cleared && block_x() == 0 && thread_x() == 0) *cleared = 0.0f;
    const Realigned first{a, lda, out_a, m}, second{b, ldb, out_b, n};
    const unsigned across = unsigned(ld) / PIECE, middle = unsigned(m) * across, all = middle + unsigned(n) * across;
    for (unsigned i = block_x() * 256 + thread_x(); i < all; i += grid_x() * 256)
        if (i < middle) first.copy(i, across, k);
        else second.copy(i - middle, across, k);
}

template <int BYTES>
struct Unsigned {
    using Type = unsigned;
};
template <>
struct Unsigned<2> {
    using Type = unsigned short;
};
template <>
struct Unsigned<1> {
    using Type = byte;
};

// Copies rows of `columns` elements of FP8_BYTES bytes from one stride to another; strides are in elements. A block
// takes 256 * 4 columns of four rows at a time, and of every (grid_x() / column_tiles)-th four rows.
KERNEL(256)
copy_rows(const void* source, long long stride, void* to, long long to_stride, int rows, int columns,
          int column_tiles) {
    using Element = Unsigned<FP8_BYTES>::Type;
    constexpr int FOUR = 4;
    grid_dependency_launch();
    grid_dependency_wait();
    const int first = int(block_x() % column_tiles) * (256 * FOUR) + int(thread_x());
    const int step = int(grid_x() / column_tiles) * FOUR;
    for (int row = int(block_x() / column_tiles) * FOUR; row < rows; row += step) {
        Element values[FOUR][FOUR];
#pragma unroll
        for (int i = 0; i < FOUR; ++i)
#pragma unroll
            for (int j = 0; j < FOUR; ++j)
                if (row + i < rows && first + 256 * j < columns)
                    values[i][j] = static_cast<const Element*>(source)[(row + i) * stride + first + 256 * j];
#pragma unroll
        for (int i = 0; i < FOUR; ++i)
#pragma unroll
            for (int j = 0; j < FOUR; ++j)
                if (row + i < rows && first + 256 * j < columns)
                    static_cast<Element*>(to)[(row + i) * to_stride + first + 256 * j] = values[i][j];
    }
}
