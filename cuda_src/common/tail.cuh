// Slices of vectors: heads and tails of rows that begin at any element, and vectors of x that straddle 16-byte words.
#pragma once
#include "vec8.cuh"

// Elements [begin, end) of a vector.
struct Slice {
    int begin, end;

    DEVICE bool any() const { return begin < end; }
    DEVICE bool whole() const { return begin == 0 && end == 8; }
    DEVICE bool has(int i) const { return begin <= i && i < end; }
};

// Sets the elements before `begin` (1 to 7) to zero.
template <int input>
DEVICE void cut_before(Vec8<input>& vec, int begin) {
    if constexpr (input == FLOAT32) {
        for (int i = 0; i < 7; ++i) vec.words[i] = i < begin ? 0u : vec.words[i];
    } else {
        const unsigned odd = begin % 2 ? 0xffff0000u : ~0u;
        for (int i = 0; i < 4; ++i) vec.words[i] &= i < begin / 2 ? 0u : i == begin / 2 ? odd : ~0u;
    }
}

// The memory that may be read.
struct Bounds {
    const byte *begin, *end;

    DEVICE bool contain(const byte* p, int bytes) const { return p >= begin && p + bytes <= end; }
};

// Sets the elements outside the slice to zero.
template <int input>
DEVICE void cut(Vec8<input>& vec, const Slice& slice) {
    for (int i = 0; i < 8; ++i) {
        if (slice.has(i)) continue;
        if constexpr (input == FLOAT32) {
            vec.words[i] = 0;
        } else {
            vec.words[i / 2] &= i % 2 ? 0xffffu : 0xffff0000u;
        }
    }
}

// Loads eight elements at any address as whole 16-byte words, of whose first `off` bytes are skipped.
template <int input>
DEVICE Vec8<input> load_shifted(const byte* p, unsigned off) {
    constexpr int WORDS = Vec8<input>::WORDS;
    unsigned words[WORDS + 4];
    for (int i = 0; i < WORDS + 4; i += 4) {
        const Vector16 v = load16(p - off + 4 * i);
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
    // (A choice between elements of an array would keep it in memory.)
    const auto choose = [](bool first, unsigned a, unsigned b) { return first ? a : b; };
    for (int i = 0; i < WORDS + 2; ++i) words[i] = choose(off & 8, words[i + 2], words[i]);
    for (int i = 0; i < WORDS + 1; ++i) words[i] = choose(off & 4, words[i + 1], words[i]);
    Vec8<input> vec;
    for (int i = 0; i < WORDS; ++i) {
        const word64 two = static_cast<word64>(words[i + 1]) << 32 | words[i];
        vec.words[i] = static_cast<unsigned>(two >> off % 4 * 8);
    }
    return vec;
}

DEVICE unsigned off_of(const byte* p) { return static_cast<unsigned>(reinterpret_cast<word64>(p)) % 16; }

// Loads the slice's elements, and whatever memory has beside them; near the bounds, only elements of the slice.
template <int input>
DEVICE Vec8<input> load_slice(const byte* p, const Slice& slice, const Bounds& bounds) {
    constexpr int BYTES = 8 * SIZE_OF<input>;
    const unsigned off = off_of(p);
    if (off == 0 && bounds.contain(p, BYTES)) return load_vec8<input, 16>(p);
    if (off != 0 && bounds.contain(p - off, BYTES + 16)) return load_shifted<input>(p, off);
    Vec8<input> vec = empty_vec8<input>();
    for (int i = 0; i < 8; ++i) {
        // Every load has a valid address and no condition, so all are in flight together.
        const int at = i < slice.begin ? slice.begin : i < slice.end ? i : slice.end - 1;
        if constexpr (input == FLOAT32) {
            vec.words[i] = load4(p + 4 * at);
        } else {
            vec.words[i / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(p)[at]) << 16 * (i % 2);
        }
    }
    return vec;
}

// p is a multiple of 8.
DEVICE void store_slice(byte* p, Vector8 codes, const Slice& slice) {
    if (slice.whole()) return store8(p, codes);
    for (int i = 0; i < 8; ++i) {
        if (slice.has(i)) p[i] = static_cast<byte>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}

// Stores the first `count` codes (1 to 8), in stores of 8, 4, 2 and 1 of them.
DEVICE void store_first(byte* p, Vector8 codes, int count) {
    if (count == 8) return store8(p, codes);
    if (count & 4) store4(p, codes.x);
    unsigned rest = count & 4 ? codes.y : codes.x;
    byte* const after = p + (count & 4);
    if (count & 2) {
        *reinterpret_cast<unsigned short*>(after) = static_cast<unsigned short>(rest);
        rest >>= 16;
    }
    if (count & 1) after[count & 2] = static_cast<byte>(rest);
}

// Stores the last `count` codes (1 to 7) of a vector at their places; the vector begins at p.
DEVICE void store_last(byte* p, Vector8 codes, int count) {
    const unsigned upper = count & 4 ? codes.x : codes.y;  // the word before that of the store of 4
    byte* const half = p + (count & 4 ? 0 : 4);
    if (count & 4) store4(p + 4, codes.y);
    if (count & 2) *reinterpret_cast<unsigned short*>(half + 2) = static_cast<unsigned short>(upper >> 16);
    const int at = count & 2 ? 1 : 3;
    if (count & 1) half[at] = static_cast<byte>(upper >> 8 * at);
}

// Returns the codes of the lane `distance` before this one, if there is one. Every lane of the warp calls it.
template <int distance>
DEVICE Vector8 from_lanes_before(Vector8 codes) {
    const unsigned source = lane() >= distance ? lane() - distance : lane();
    return {shuffle_from(codes.x, source), shuffle_from(codes.y, source)};
}

// The first `count` codes (1 to 7) of `head`, and the others of `rest`.
DEVICE Vector8 joined(Vector8 head, Vector8 rest, int count) {
    const word64 mask = (1ull << 8 * count) - 1;
    const unsigned x = static_cast<unsigned>(mask), y = static_cast<unsigned>(mask >> 32);
    return {(head.x & x) | (rest.x & ~x), (head.y & y) | (rest.y & ~y)};
}
