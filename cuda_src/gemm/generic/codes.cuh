// Codes of the rows of a matrix at any address and stride, 16 neighbours along k at a time. Loads are of aligned words;
// bytes before the matrix and behind a row are never read.
#pragma once

constexpr int PIECE = 16;

// 16 codes on their way from memory: aligned, or somewhere in two words of 16 bytes.
template <bool ALIGNED>
struct Piece {
    Vector16 whole;

    DEVICE Vector16 codes(const byte*) const { return whole; }
};
template <>
struct Piece<false> {
    Vector16 low, high;

    // `from` is the address of the first code.
    DEVICE Vector16 codes(const byte* from) const {
        const unsigned off = static_cast<unsigned>(reinterpret_cast<word64>(from));
        unsigned words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        // (A choice between elements of an array would keep it in memory.)
        const auto choose = [](bool first, unsigned a, unsigned b) { return first ? a : b; };
#pragma unroll
        for (int i = 0; i < 6; ++i) words[i] = choose(off & 8, words[i + 2], words[i]);
#pragma unroll
        for (int i = 0; i < 5; ++i) words[i] = choose(off & 4, words[i + 1], words[i]);
        const unsigned shift = off % 4 * 8;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            words[i] = static_cast<unsigned>((static_cast<word64>(words[i + 1]) << 32 | words[i]) >> shift);
        return {words[0], words[1], words[2], words[3]};
    }
};

// Loads the 16 codes from `from` on, of which the first `left` belong to the row and the others count as zeros.
// `first` is the matrix's first code. Not CAREFUL: left >= 32, and the matrix begins at least 15 bytes earlier.
template <bool CAREFUL, bool ALIGNED>
DEVICE void load_piece(Piece<ALIGNED>& piece, const byte* from, int left, const byte* first) {
    if constexpr (ALIGNED) {  // and left is divisible by 16
        if (!CAREFUL || left > 0) piece.whole = load16(from);
        else piece.whole = Vector16{0, 0, 0, 0};
    } else {
        const unsigned off = static_cast<unsigned>(reinterpret_cast<word64>(from)) % PIECE;
        const byte* const word = from - off;
        if constexpr (!CAREFUL) {
            piece.low = load16(word);
            piece.high = load16(word + PIECE);
        } else {
            unsigned words[8];
            const byte* const end = from + left;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const byte* const at = word + 4 * i;
                words[i] = 0;
                if (at >= first && at + 4 <= end) {
                    words[i] = load4(at);
                } else if (at + 4 > first && at < end) {
#pragma unroll
                    for (int j = 0; j < 4; ++j)
                        if (at + j >= first && at + j < end) words[i] |= unsigned(at[j]) << 8 * j;
                }
            }
            piece.low = {words[0], words[1], words[2], words[3]};
            piece.high = {words[4], words[5], words[6], words[7]};
        }
    }
}

// Whether `depth` codes of every row from `at` on have to be loaded carefully; whether a row is the matrix's first.
template <bool ALIGNED>
DEVICE bool careful(int at, int depth, int k, bool with_first_row) {
    if constexpr (ALIGNED) return at + depth > k;
    return (at == 0 && with_first_row) || at + depth + PIECE > k;
}
