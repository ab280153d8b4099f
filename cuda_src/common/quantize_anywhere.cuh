// Octets of rows that begin anywhere. They lie at multiples of 8 of the codes' addresses, so that all of a row but its
// first and its last octet are stored at once; of those, a part, [begin, end), is the row's. Where rows of x are as far
// apart as those of the codes, octets of x are aligned, too, and loaded at once.
#pragma once
#include "quantize_octet.cuh"

struct Part {
    int begin, end;

    DEVICE bool any() const { return begin < end; }
    DEVICE bool whole() const { return begin == 0 && end >= 8; }
    // Bit i is set if element i is in the part.
    DEVICE unsigned mask() const { return (0xffu >> (end < 8 ? 8 - end : 0)) & (0xffu << begin); }
};

// Elements outside the part become zeros.
template <int input>
DEVICE void cut(Octet<input>& octet, const Part& part) {
    const unsigned mask = part.mask();
    for (int i = 0; i < 8; ++i) {
        if (mask >> i & 1) continue;
        if constexpr (input == FLOAT32) {
            octet.words[i] = 0;
        } else {
            octet.words[i / 2] &= i % 2 ? 0xffffu : 0xffff0000u;
        }
    }
}

// The part's elements one by one, zeros beside them.
template <int input>
DEVICE Octet<input> load_part(const byte* p, const Part& part) {
    Octet<input> octet = empty_octet<input>();
    const unsigned mask = part.mask();
    for (int i = 0; i < 8; ++i) {
        if (!(mask >> i & 1)) continue;
        if constexpr (input == FLOAT32) {
            octet.words[i] = load4(p + 4 * i);
        } else {
            octet.words[i / 2] |= static_cast<unsigned>(reinterpret_cast<const unsigned short*>(p)[i]) << 16 * (i % 2);
        }
    }
    return octet;
}

// Eight elements at any address, out of whole 16-byte pieces: `off` bytes of the first are not asked for.
template <int input>
DEVICE Octet<input> load_shifted(const byte* p, unsigned off) {
    constexpr int WORDS = Octet<input>::WORDS;
    unsigned words[WORDS + 4];
    for (int i = 0; i < WORDS + 4; i += 4) {
        const Vector16 v = load16(p - off + 4 * i);
        words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
    }
    // (A choice between elements of an array would keep it in memory.)
    const auto choose = [](bool first, unsigned a, unsigned b) { return first ? a : b; };
    for (int i = 0; i < WORDS + 2; ++i) words[i] = choose(off & 8, words[i + 2], words[i]);
    for (int i = 0; i < WORDS + 1; ++i) words[i] = choose(off & 4, words[i + 1], words[i]);
    Octet<input> octet;
    for (int i = 0; i < WORDS; ++i) {
        const word64 two = static_cast<word64>(words[i + 1]) << 32 | words[i];
        octet.words[i] = static_cast<unsigned>(two >> off % 4 * 8);
    }
    return octet;
}

// Beside the part's elements come others of the matrix, or zeros. amid: 16 elements before and behind the row are the
// matrix's, too.
template <int input>
DEVICE Octet<input> load_anywhere(const byte* p, const Part& part, bool amid) {
    const unsigned off = static_cast<unsigned>(reinterpret_cast<word64>(p)) % 16;
    if (off == 0 && (amid || part.whole())) return load_octet<input, 16>(p);
    return amid ? load_shifted<input>(p, off) : load_part<input>(p, part);
}

// p is a multiple of 8.
DEVICE void store_anywhere(byte* p, Vector8 codes, const Part& part) {
    if (part.whole()) return store8(p, codes);
    const unsigned mask = part.mask();
    for (int i = 0; i < 8; ++i) {
        if (mask >> i & 1) p[i] = static_cast<byte>((i < 4 ? codes.x : codes.y) >> 8 * (i % 4));
    }
}

// The lane's `distance` before this one, where there is such a lane. Every lane of the warp calls it.
template <int distance>
DEVICE Vector8 from_lanes_before(Vector8 codes) {
    const unsigned source = lane() >= distance ? lane() - distance : lane();
    return {shuffle_from(codes.x, source), shuffle_from(codes.y, source)};
}

// The first `count` codes, 1 to 7, and the others of `behind`.
DEVICE Vector8 joined(Vector8 front, Vector8 behind, int count) {
    const word64 mask = (1ull << 8 * count) - 1;
    const unsigned x = static_cast<unsigned>(mask), y = static_cast<unsigned>(mask >> 32);
    return {(front.x & x) | (behind.x & ~x), (front.y & y) | (behind.y & ~y)};
}
