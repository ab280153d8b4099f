// The sums of a warp, 16 channels x width rows: how they are exchanged between blocks and stored.
//
// A lane has of row 8 * j + lane % 4 * 2 + {0, 1} the channels lane / 4 + 8 * half in sums[4 * j + 2 * half + {0, 1}].
#pragma once
#include "../../ptx/transpose.cuh"
#include "../epilogue.cuh"

// What a lane has of 8 channels x width rows, in pieces that are sent and added at a time.
template <int width>
struct UnitOf {
    using Piece = float4;
    static constexpr int pieces = width / 16;
    DEVICE static Piece get(const float (&sums)[width / 2], int half, int i) {
        const int at = 8 * i + 2 * half;
        return make_float4(sums[at], sums[at + 1], sums[at + 4], sums[at + 5]);
    }
    DEVICE static void add(float (&sums)[width / 2], int half, int i, Piece other) {
        const int at = 8 * i + 2 * half;
        sums[at] += other.x;
        sums[at + 1] += other.y;
        sums[at + 4] += other.z;
        sums[at + 5] += other.w;
    }
};
template <>
struct UnitOf<8> {
    using Piece = float2;
    static constexpr int pieces = 1;
    DEVICE static Piece get(const float (&sums)[4], int half, int) {
        return make_float2(sums[2 * half], sums[2 * half + 1]);
    }
    DEVICE static void add(float (&sums)[4], int half, int, Piece other) {
        sums[2 * half] += other.x;
        sums[2 * half + 1] += other.y;
    }
};

// Rows that begin at ``to``, ``ldo`` elements of 16 bits apart, by what the places of all have in common: vectors of
// some bytes may be stored where the number is divisible by as many.
DEVICE unsigned alignment_of(const void* to, long long ldo) { return (unsigned)(size_t)to | 2 * (unsigned)ldo; }

// Rounds and stores the 16 channels at a place of a tile, of each eight only if they are ``owned``.
template <class C>
DEVICE void store_part(const float (&sums)[C::sums], const bool (&owned)[2], void* to, long long ldo, int tile,
                       int place, int m, int n, int lane) {
    using Out = typename Result<C::out_type>::Element;
    Out* const out = static_cast<Out*>(to);
    if constexpr (C::out_type == FLOAT32 || C::phases > 0) {
#pragma unroll
        for (int i = 0; i < C::sums; ++i) {
            const int row = i / 4 * 8 + lane % 4 * 2 + i % 2, half = i / 2 % 2;
            const int channel = C::Tile::channel(tile, place + lane / 4 + 8 * half);
            if (owned[half] && row < m && channel < n) store_element<C::out_type>(to, row * ldo + channel, sums[i]);
        }
        return;
    }
    const int base = C::Tile::channel(tile, place);
    unsigned pairs[C::sums / 2];
#pragma unroll
    for (int i = 0; i < C::sums / 2; ++i)
        pairs[i] = warp_transpose(hardware_round_pair<C::out_type>(sums[2 * i], sums[2 * i + 1]));
    const bool whole = base + 16 <= n;
    const unsigned alignment = alignment_of(to, ldo);
    if (C::width > 8 && whole && alignment % 16 == 0 && owned[0] && owned[1]) {
        // Four threads have a row's channels of four matrices: each passes three on and stores one whole.
#pragma unroll
        for (int i = 0; i < C::sums / 2; i += 4) {
            quad_transpose(pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3], lane);
            const int row = i / 2 * 8 + lane % 4 / 2 * 8 + lane / 4;
            if (row < m)
                *(uint4*)(out + row * ldo + base + lane % 2 * 8) =
                    make_uint4(pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]);
        }
        return;
    }
    const int first = base + lane % 4 * 2;
    const bool even = whole && alignment % 4 == 0;
#pragma unroll
    for (int i = 0; i < C::sums / 2; ++i) {
        const int row = i / 2 * 8 + lane / 4, half = i % 2, past = n - first - 8 * half;
        Out* here = out + row * ldo + first + 8 * half;
        if (!owned[half] || row >= m) continue;
        if (even) *(unsigned*)here = pairs[i];
        else {
            if (past > 0) here[0] = (Out)pairs[i];
            if (past > 1) here[1] = (Out)(pairs[i] >> 16);
        }
    }
}
