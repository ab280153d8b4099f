// Codes of the rows of a matrix at any address and stride, 16 neighbours along k at a time. Loads are of aligned words;
// bytes before the matrix and behind a row are never read.
#pragma once

constexpr int PIECE = 16;

DEVICE unsigned off_word(const byte* p) { return static_cast<unsigned>(reinterpret_cast<word64>(p)) % PIECE; }

// COUNT pieces of 16 codes next to each other, on their way from memory: as they lie there, in words of 16 bytes.
template <bool ALIGNED, int COUNT>
struct Pieces {
    static constexpr int WORDS = ALIGNED ? COUNT : COUNT + 1;
    Vector16 words[WORDS];

    // From the first code on, of which the first `left` belong to the row and the others count as zeros; `first` is the
    // matrix's first code. The caller owes: where ALIGNED, a whole number of pieces; unless CAREFUL, that left is
    // at least 16 * (COUNT + 1), and that the matrix begins at least 15 bytes earlier.
    template <bool CAREFUL>
    DEVICE void load(const byte* from, int left, const byte* first) {
        const byte* const begin = ALIGNED ? from : from - off_word(from);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const byte* const word = begin + i * PIECE;
            if constexpr (!CAREFUL) words[i] = load16(word);
            else if constexpr (ALIGNED) words[i] = i * PIECE < left ? load16(word) : Vector16{0, 0, 0, 0};
            else words[i] = careful_word(word, first, from + left);
        }
    }

    // What of an aligned word lies from `first` on and before `end`; the rest is zero.
    DEVICE static Vector16 careful_word(const byte* word, const byte* first, const byte* end) {
        unsigned parts[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const byte* const at = word + 4 * i;
            parts[i] = 0;
            if (at >= first && at + 4 <= end) {
                parts[i] = load4(at);
            } else if (at + 4 > first && at < end) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (at + j >= first && at + j < end) parts[i] |= unsigned(at[j]) << 8 * j;
            }
        }
        return {parts[0], parts[1], parts[2], parts[3]};
    }

    // The i-th piece; `from` is the address of the first code.
    DEVICE Vector16 codes(int i, const byte* from) const {
        if constexpr (ALIGNED) return words[i];
        const unsigned off = static_cast<unsigned>(reinterpret_cast<word64>(from));
        const Vector16 low = words[i], high = words[WORDS == 1 ? 0 : i + 1];
        unsigned parts[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        // (A choice between elements of an array would keep it in memory.)
        const auto choose = [](bool first, unsigned a, unsigned b) { return first ? a : b; };
#pragma unroll
        for (int j = 0; j < 6; ++j) parts[j] = choose(off & 8, parts[j + 2], parts[j]);
#pragma unroll
        for (int j = 0; j < 5; ++j) parts[j] = choose(off & 4, parts[j + 1], parts[j]);
        const unsigned shift = off % 4 * 8;
#pragma unroll
        for (int j = 0; j < 4; ++j)
            parts[j] = static_cast<unsigned>((static_cast<word64>(parts[j + 1]) << 32 | parts[j]) >> shift);
        return {parts[0], parts[1], parts[2], parts[3]};
    }
};

// Whether `depth` codes of every row from `at` on have to be loaded carefully; whether a row is the matrix's first.
template <bool ALIGNED>
DEVICE bool careful(int at, int depth, int k, bool with_first_row) {
    if constexpr (ALIGNED) return at + depth > k;
    return (at == 0 && with_first_row) || at + depth + PIECE > k;
}
