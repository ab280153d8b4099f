// Loads codes from the rows of a matrix at any address and stride, 16 neighbours along k at a time. It loads aligned
// words, and never reads bytes before the matrix or after it.
#pragma once

constexpr int VECTOR_BYTES = 16;

DEVICE unsigned off_word(const byte* p) { return static_cast<unsigned>(reinterpret_cast<word64>(p)) % VECTOR_BYTES; }

// 16 bytes out of two vectors that are consecutive in memory, from byte `off` of the first one.
DEVICE Vector16 joined(Vector16 low, Vector16 high, unsigned off) {
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

// COUNT consecutive vectors of 16 codes in flight from memory, as the aligned 16-byte words that contain them.
template <bool ALIGNED, int COUNT>
struct CodeVectors {
    static constexpr int WORDS = ALIGNED ? COUNT : COUNT + 1;
    Vector16 words[WORDS];

    // Loads the vectors from the first code on, of which `left` belong to the row. CAREFUL: some words may begin before
    // `first` or end after `last`, the bounds of the matrix. The caller owes: none does, unless CAREFUL.
    template <bool CAREFUL>
    DEVICE void load(const byte* from, int left, const byte* first, const byte* last) {
        const byte* const begin = ALIGNED ? from : from - off_word(from);
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const byte* const word = begin + i * VECTOR_BYTES;
            if (!CAREFUL) words[i] = load16(word);
            else if (ALIGNED) words[i] = i * VECTOR_BYTES < left ? load16(word) : Vector16{0, 0, 0, 0};
            else if (word >= first && word + VECTOR_BYTES <= last) words[i] = load16(word);
            else words[i] = part_of_word(word, first, last);
        }
    }

    // The bytes of an aligned word that are in [first, end); the others are zero.
    DEVICE static Vector16 part_of_word(const byte* word, const byte* first, const byte* end) {
        unsigned parts[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const byte* const at = word + 4 * i;
            parts[i] = at >= first && at + 4 <= end ? load4(at) : 0;
        }
        // Four bytes that begin before `first` or end after `end` contain one of both. (In a loop, as compilers take
        // most of their time for what is unrolled here.)
        const byte* edge = first;
#pragma unroll 1
        for (int side = 0; side < 2; ++side, edge = end) {
            const byte* const at = edge - off_word(edge) % 4;
            if (at < word || at >= word + VECTOR_BYTES) continue;
            unsigned bytes = 0;
#pragma unroll
            for (int j = 0; j < 4; ++j)
                if (at + j >= first && at + j < end) bytes |= unsigned(at[j]) << 8 * j;
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (at == word + 4 * i) parts[i] = bytes;
        }
        return {parts[0], parts[1], parts[2], parts[3]};
    }

    // The i-th vector. `from` is the address of the first code; from there on `left` codes belong to the row, and those
    // past it become zeros.
    DEVICE Vector16 codes(int i, const byte* from, int left) const {
        if constexpr (ALIGNED) return words[i];
        const Vector16 whole = joined(words[i], words[WORDS == 1 ? 0 : i + 1], off_word(from));
        unsigned parts[4] = {whole.x, whole.y, whole.z, whole.w};
        if (left < VECTOR_BYTES * (i + 1)) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int valid = left - VECTOR_BYTES * i - 4 * j;
                parts[j] = valid <= 0 ? 0 : valid >= 4 ? parts[j] : parts[j] & ((1u << 8 * valid) - 1);
            }
        }
        return {parts[0], parts[1], parts[2], parts[3]};
    }
};

// Whether the words of `depth` codes of a row, from `at` on, may extend past the matrix.
template <bool ALIGNED>
DEVICE bool careful(int at, int depth, int k) {
    return (!ALIGNED && at == 0) || at + depth + (ALIGNED ? 0 : VECTOR_BYTES) > k;
}

// The end of a matrix of codes.
DEVICE const byte* end_of(const byte* codes, long long stride, int rows, int k) {
    return codes + (rows - 1) * stride + k;
}
