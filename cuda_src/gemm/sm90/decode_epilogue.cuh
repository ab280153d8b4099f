// The split-K reduction and the stores of a warp's sums.
//
// A warp of sm90_decode has 16 channels x width rows: sums[4 * j + 2 * half + {0, 1}] of a lane are of channel lane / 4
// + 8 * half and of rows 8 * j + lane % 4 * 2 + {0, 1}.
#pragma once
#include "decode_block.cuh"
#include "../../ptx/transpose.cuh"
#include "../epilogue.cuh"

// A lane's sums of a unit, 8 channels x width rows, in the packets that the reduction sends and adds.
template <int width>
struct UnitOf {
    using Packet = float4;
    static constexpr int packets = width / 16;
    DEVICE static Packet get(const float (&sums)[width / 2], int half, int i) {
        const int at = 8 * i + 2 * half;
        return make_float4(sums[at], sums[at + 1], sums[at + 4], sums[at + 5]);
    }
    DEVICE static void add(float (&sums)[width / 2], int half, int i, Packet other) {
        const int at = 8 * i + 2 * half;
        sums[at] += other.x;
        sums[at + 1] += other.y;
        sums[at + 4] += other.z;
        sums[at + 5] += other.w;
    }
};
template <>
struct UnitOf<8> {
    using Packet = float2;
    static constexpr int packets = 1;
    DEVICE static Packet get(const float (&sums)[4], int half, int) {
        return make_float2(sums[2 * half], sums[2 * half + 1]);
    }
    DEVICE static void add(float (&sums)[4], int half, int, Packet other) {
        sums[2 * half] += other.x;
        sums[2 * half + 1] += other.y;
    }
};

// A warp's part of a tile: two units, of channels lane / 4 and lane / 4 + 8, each of which one block completes.
template <class C>
struct WarpUnits {
    static constexpr int ranks = C::split_k, units = C::units / ranks;  // units of a tile that a block completes
    static constexpr int storing_warps = units > 1 ? units / 2 : 1;     // of a block
    using Part = UnitOf<C::width>;
    using Packet = typename Part::Packet;

    const DecodeBlock<C>& block;
    int m_warpgroup, k_warpgroup, unit;
    int owners[2];
    bool owned[2];

    DEVICE explicit WarpUnits(const DecodeBlock<C>& of) : block(of) {
        const int warpgroup = C::warpgroups > 1 ? block.warp / 4 : 0;
        m_warpgroup = warpgroup / C::k_warpgroups;
        k_warpgroup = warpgroup % C::k_warpgroups;
        unit = m_warpgroup * 8 + block.warp % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            owners[half] = (unit + half) / units;
            owned[half] = owners[half] == block.rank;
        }
    }
    DEVICE int channel(int tile, int half) const { return channel(tile, half, block.lane); }
    DEVICE int channel(int tile, int half, int lane) const {
        return C::Tile::channel(tile, unit * 8 + lane / 4 + 8 * half);
    }
    // Which of the tile's scales of the weight, of a k-block, is that of the lane's channel.
    DEVICE int scale(int half) const {
        const int place = (unit + half) * 8 + block.lane / 4;
        return C::scale_rows > 1 ? C::Tile::row(place) * C::Tile::phases / C::scale_rows : place;
    }
    // Whether the warp completes a unit, or either of the two.
    DEVICE bool completes(int half) const { return k_warpgroup == 0 && owned[half]; }
    DEVICE bool completes() const { return k_warpgroup == 0 && (owned[0] || owned[1]); }

    // One thread of the warps that complete units sets the bytes that the other blocks will send.
    DEVICE void expect_others() const {
        if (ranks > 1 && unit == (block.rank * units & ~1) && block.lane == 0)
            barrier_expect(block.reduce_full, (ranks - 1) * C::k_warpgroups * units * C::unit_bytes);
    }

    // Stores the warp's sums into the buffers of the blocks that complete them, and adds to the units that it completes
    // the sums of all other blocks and warpgroups, in the order of their numbers. Returns whether it completes any
    // unit. `parity` is that of the tile.
    DEVICE bool reduce(float (&sums)[C::sums], int parity) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (completes(half)) continue;
            const int owner = owners[half], source = block.rank * C::k_warpgroups + k_warpgroup;
            const int place = source - (source > owner * C::k_warpgroups);
            const int slot =
                (place * units + unit + half - owner * units) * C::unit_bytes + block.lane * (int)sizeof(Packet);
            if (owned[half]) {
#pragma unroll
                for (int i = 0; i < Part::packets; ++i)
                    ((Packet*)(block.reduce_buf + slot))[32 * i] = Part::get(sums, half, i);
            } else {
                const unsigned remote = cluster_address(shared_address(block.reduce_buf) + slot, block.first + owner);
                const unsigned barrier = cluster_address(block.reduce_full, block.first + owner);
#pragma unroll
                for (int i = 0; i < Part::packets; ++i)
                    remote_store(remote + i * 32 * (int)sizeof(Packet), Part::get(sums, half, i), barrier);
            }
        }
        if (C::k_warpgroups > 1 && k_warpgroup != 0) threads_arrive(3 + m_warpgroup, 128 * C::k_warpgroups);
        if (k_warpgroup != 0) return false;
        if (C::k_warpgroups > 1) threads_sync(3 + m_warpgroup, 128 * C::k_warpgroups);
        if (!completes()) return false;

        if (ranks > 1) barrier_wait(block.reduce_full, parity);
#pragma unroll(C::width > 16 ? 1 : 16)
        for (int place = 0; place < ranks * C::k_warpgroups - 1; ++place) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (!owned[half]) continue;
                const int from = place * units + unit + half - block.rank * units;
                const Packet* slot = (const Packet*)(block.reduce_buf + from * C::unit_bytes) + block.lane;
#pragma unroll
                for (int i = 0; i < Part::packets; ++i) Part::add(sums, half, i, slot[32 * i]);
            }
        }
        __syncwarp();
        const KBlockIterator& k_iter = block.k_iter;
        if (k_iter.tile + k_iter.step < k_iter.tiles && block.lane < ranks) {
            if (ranks > 1) remote_arrive(cluster_address(block.reduce_empty, block.first + block.lane));
            else barrier_arrive(block.reduce_empty);
        }
        return true;
    }
};

// Returns x, but hides that from the compiler: what depends on it is computed here, and not kept in registers from an
// earlier computation with x.
DEVICE long long opaque(long long x) {
    asm volatile("" : "+l"(x));
    return x;
}
DEVICE int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Stores 16 bytes of a result. `keeps`: with a hint to keep them in L2 for their reader, as a streaming weight evicts
// other lines.
template <bool keeps>
DEVICE void store_result(void* to, uint4 v) {
    if constexpr (keeps)
        asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y),
                     "r"(v.z), "r"(v.w), "l"(EVICT_LAST)
                     : "memory");
    else *(uint4*)to = v;
}

// Returns a number whose divisors are the common alignments, in bytes, of rows at `to` that are `ldo` 16-bit
// elements apart: if 16 divides it, 16-byte vectors may be stored.
DEVICE unsigned alignment_of(const void* to, long long ldo) { return (unsigned)(size_t)to | 2 * (unsigned)ldo; }

// Calls visit(i, index, exists) for each sum i of a lane: the index of its element in the result, and whether the
// result has that element and the warp `owned` its unit. `first` is the lane's channel of the first unit, and that
// of the second is `unit_stride` further. Additions instead of products give the rows' indices.
template <class C, class Visit>
DEVICE void each_element(const bool (&owned)[2], long long ldo, int first, int unit_stride, int m, int n, int lane,
                         const Visit& visit) {
    long long index = lane % 4 * 2 * ldo + first;
    int left = m - lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < C::width / 8; ++j, index += 8 * ldo, left -= 8)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            visit(4 * j + i, index + i % 2 * ldo + i / 2 * unit_stride,
                  owned[i / 2] && i % 2 < left && first + i / 2 * unit_stride < n);
}

// Stores the `owned` units of a warp one result at a time, as float32, rounded to 16 bits, or encoded to FP8.
// `first`: as above.
//
// With two residues a lane has neighbouring channels. Pairs of lanes exchange results, so that each store of theirs
// writes neighbours, which share a sector.
template <class C>
DEVICE void store_each(float (&sums)[C::sums], const bool (&owned)[2], void* to, long long ldo, int first, int m, int n,
                       int lane) {
    int unit_stride = C::Tile::unit_stride;
    if (C::Tile::residues > 1 && WarpUnits<C>::units > 1) {  // else the units of a warp have different owners
        const bool odd = lane & 4;
#pragma unroll
        for (int i = 0; i < C::sums; ++i) {
            if (i & 2) continue;
            const float other = __shfl_xor_sync(0xffffffffu, odd ? sums[i] : sums[i + 2], 4);
            (odd ? sums[i] : sums[i + 2]) = other;
        }
        if (odd) first += 1 - C::Tile::phases;  // the second residue of the other lane's row
        unit_stride = C::Tile::phases;          // to the row of the odd lane
    }
    each_element<C>(owned, ldo, first, unit_stride, m, n, lane, [&](int i, long long index, bool exists) {
        if constexpr (C::out_type <= BFLOAT16) {
            if (exists) store_element<C::out_type>(to, index, sums[i]);
        } else {
            const byte code = encode<C::out_type - 3>(sums[i]);
            if (exists) static_cast<byte*>(to)[index] = code;
        }
    });
}

// Stores the `owned` units of a warp, 16 neighbouring channels from `base` on, rounded to 16 bits.
template <class C>
DEVICE void store_pairs(const float (&sums)[C::sums], const bool (&owned)[2], void* to, long long ldo, int base, int m,
                        int n, int lane) {
    using Out = typename Result<C::out_type>::Element;
    Out* const out = static_cast<Out*>(to);
    unsigned pairs[C::sums / 2];
#pragma unroll
    for (int i = 0; i < C::sums / 2; ++i)
        pairs[i] = warp_transpose(hardware_round_pair<C::out_type>(sums[2 * i], sums[2 * i + 1]));
    const bool whole = base + 16 <= n;
    const unsigned alignment = alignment_of(to, ldo);
    if (C::width > 8 && whole && alignment % 16 == 0 && owned[0] && owned[1]) {
        // Four threads hold a row of four 8x8 matrices: after the transposition each stores a whole row of one.
#pragma unroll
        for (int i = 0; i < C::sums / 2; i += 4) {
            quad_transpose(pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3], lane);
            const int row = i / 2 * 8 + lane % 4 / 2 * 8 + lane / 4;
            if (row < m)
                store_result<C::keeps_result>(out + row * ldo + base + lane % 2 * 8,
                                              make_uint4(pairs[i], pairs[i + 1], pairs[i + 2], pairs[i + 3]));
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

// For sm90_decode_rows: rounds and stores a warp's results of `count` units, from `channel` on. A lane has of each
// unit two channels of `row` and of `row` + 8.
template <class C, int count>
DEVICE void store_units(const float (&values)[4 * count], void* to, long long ldo, int row, int channel, int m, int n,
                        int lane) {
    using Out = typename Result<C::out_type>::Element;
    Out* const out = static_cast<Out*>(to);
    if constexpr (C::out_type == FLOAT32) {
#pragma unroll
        for (int i = 0; i < 4 * count; ++i) {
            const int at_row = row + i / 2 % 2 * 8, at_column = channel + i / 4 * 8 + lane % 4 * 2 + i % 2;
            if (at_row < m && at_column < n) out[at_row * ldo + at_column] = values[i];
        }
    } else {
        unsigned pairs[2 * count];
#pragma unroll
        for (int i = 0; i < 2 * count; ++i)
            pairs[i] = hardware_round_pair<C::out_type>(values[2 * i], values[2 * i + 1]);
        const unsigned alignment = alignment_of(to, ldo);
        if constexpr (count == 2) {
            if (channel + 16 <= n && alignment % 16 == 0) {
                // Each of four neighbouring lanes stores the eight channels of one row and unit.
                quad_transpose(pairs[0], pairs[1], pairs[2], pairs[3], lane);
                const int at_row = row + lane % 2 * 8;
                if (at_row < m)
                    store_result<C::keeps_result>(out + at_row * ldo + channel + lane % 4 / 2 * 8,
                                                  make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
                return;
            }
        }
#pragma unroll
        for (int unit = 0; unit < count; ++unit) {
            const unsigned upper = pairs[2 * unit], lower = pairs[2 * unit + 1];
            const int begin = channel + 8 * unit;
            if (begin + 8 <= n && alignment % 8 == 0) {
                // Of two neighbouring lanes one stores four channels of the first row, the other four of the second.
                const bool odd = lane & 1;
                const unsigned other = __shfl_xor_sync(0xffffffffu, odd ? upper : lower, 1);
                const int at_row = row + 8 * odd;
                if (at_row < m)
                    *(uint2*)(out + at_row * ldo + begin + lane % 4 / 2 * 4) =
                        odd ? make_uint2(other, lower) : make_uint2(upper, other);
                continue;
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = begin + lane % 4 * 2, at_row = row + 8 * half;
                if (at_row < m && first < n) out[at_row * ldo + first] = (Out)pairs[2 * unit + half];
                if (at_row < m && first + 1 < n) out[at_row * ldo + first + 1] = (Out)(pairs[2 * unit + half] >> 16);
            }
        }
    }
}
