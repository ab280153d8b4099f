// The results of a tile: a warpgroup rounds its rows into buffers of its own in shared memory, and stores them from
// there. What is added to them of the result's memory comes into these buffers before: by TMA while the tile is multiplied.
#pragma once
#include "../../ptx/transpose.cuh"
#include "tiled_layout.cuh"

template <int bytes>
struct ElementOf {
    using Type = unsigned short;
};
template <>
struct ElementOf<1> {
    using Type = byte;
};
template <>
struct ElementOf<4> {
    using Type = unsigned;
};

template <class C>
struct TileStore {
    using Out = typename ElementOf<C::item>::Type;
    const TensorMap* map;
    void* out;
    long long ldo;
    int m, n;
    int barrier, warp, lane;  // of this warpgroup
    unsigned buffers;
    unsigned addend_full = 0;  // a barrier of this warpgroup, where the kernel accumulates
    int addend_parity = 0;

    DEVICE unsigned buffer_of(int piece) const { return buffers + piece % C::buffers * C::buffer_bytes; }
    // Where 16 bytes of a row of a buffer are: swizzled as TMA has them.
    DEVICE static unsigned place(int row, int vector) {
        constexpr int vectors = C::piece_bytes / 16;
        return row * C::piece_bytes + ((vector ^ (row * C::piece_bytes / 128)) % vectors) * 16;
    }

    // A thread's pair of numbers among those of four matrices that `matrices_load` loaded.
    DEVICE static float2 pair_of(unsigned pair) {
        if constexpr (C::out_type == BFLOAT16) return make_float2(float_of(pair << 16), float_of(pair & 0xffff0000u));
        else return make_float2(half_to_float((unsigned short)pair), half_to_float((unsigned short)(pair >> 16)));
    }

    // Rounds this warp's 16 rows of a piece, of whose sums a thread has those from ``first`` on. A buffer holds what is
    // to be added where the results will be.
    template <class Value>
    DEVICE void stage(unsigned buffer, const Value& value, int slice, int first) const {
#pragma unroll
        for (int j = 0; j < C::piece_columns / 8; j += 2) {
            const int i = first + 4 * j;
            if constexpr (C::out_type == FLOAT32) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = lane / 4 + part % 2 * 8, vector = 2 * (j + part / 2) + lane % 4 / 2;
                    const unsigned at = buffer + place(row, vector) + lane % 2 * 8;
                    float2 addend = {};
                    if constexpr (C::accumulates)
                        asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                                     : "=f"(addend.x), "=f"(addend.y)
                                     : "r"(at)
                                     : "memory");
                    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at),
                                 "f"(value(slice, i + 2 * part, addend.x)),
                                 "f"(value(slice, i + 2 * part + 1, addend.y))
                                 : "memory");
                }
            } else if constexpr (C::item == 1) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = lane / 4 + part % 2 * 8;
                    const unsigned short codes = encode_pair<C::out_type - 3>(value(slice, i + 2 * part, 0.0f),
                                                                              value(slice, i + 2 * part + 1, 0.0f));
                    asm volatile(
                        "st.shared.u16 [%0], %1;" ::"r"(buffer + place(row, j / 2) + part / 2 * 8 + lane % 4 * 2),
                        "h"(codes)
                        : "memory");
                }
            } else {
                unsigned pairs[4];
                if constexpr (C::accumulates)
                    matrices_load(buffer + place(lane % 16, j + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    float2 addend = {};
                    if constexpr (C::accumulates) addend = pair_of(pairs[part]);
                    pairs[part] = hardware_round_pair<C::out_type>(value(slice, i + 2 * part, addend.x),
                                                                   value(slice, i + 2 * part + 1, addend.y));
                }
                matrices_store(buffer + place(lane % 16, j + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    DEVICE static unsigned loaded(unsigned at) {
        unsigned word;
        asm volatile("ld.shared.u32 %0, [%1];" : "=r"(word) : "r"(at) : "memory");
        return word;
    }

    // Stores those bytes of a word, whose first is the at-th of a row, that are among its ``bytes``.
    DEVICE static void store_word(byte* to, unsigned word, int at, int bytes) {
        if (at >= 0 && at + 4 <= bytes) {
            *(unsigned*)to = word;
            return;
        }
#pragma unroll
        for (int i = 0; i < 4; i += C::item)
            if (at + i >= 0 && at + i < bytes) *(Out*)(to + i) = (Out)(word >> 8 * i);
    }

    // Stores this warp's 16 rows of a piece from ``row`` and ``column`` on, at any address: a lane has a word of several
    // rows on their way, and joins the words of two lanes to one that is aligned in the result.
    DEVICE void store_words(unsigned buffer, int row, int column) const {
        constexpr int words = C::piece_bytes / 4, down = 32 / words, each = 16 / down;
        constexpr int batch = C::scales == SCALES_GROUP ? 2 : 4;
        const int word = lane % words, bytes = least(n - column, C::piece_columns) * C::item;
#pragma unroll 1
        for (int begin = 0; begin < each; begin += batch) {
            unsigned here[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i)
                here[i] = loaded(buffer + place((begin + i) * down + lane / words, word / 4) + word % 4 * 4);
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int at = row + (begin + i) * down + lane / words;
                byte* const to = static_cast<byte*>(out) + (at * ldo + column) * C::item;
                if constexpr (C::item == 4) {
                    if (at < m) store_word(to + 4 * word, here[i], 4 * word, bytes);
                } else {
                    const int off = (int)(size_t)to & 3;
                    const unsigned before = __shfl_up_sync(0xffffffffu, here[i], 1, words),
                                   last = __shfl_sync(0xffffffffu, here[i], words - 1, words);
                    if (at >= m) continue;
                    store_word(to - off + 4 * word, __funnelshift_l(before, here[i], 8 * off), 4 * word - off, bytes);
                    if (off && word == 0)
                        store_word(to - off + C::piece_bytes, last >> (32 - 8 * off), C::piece_bytes - off, bytes);
                }
            }
        }
    }

    // Loads the elements of the result that this warp's 16 rows of a piece are added to.
    DEVICE void load_elements(unsigned buffer, int row, int column) const {
        // Of a lane; on their way. Ping-pong tiles of 192 columns leave registers for no more.
        constexpr int each = 16 * C::piece_columns / 32, most = C::pingpong ? 4 : 8, batch = each < most ? each : most;
#pragma unroll 1
        for (int begin = 0; begin < each; begin += batch) {
            unsigned elements[batch];
#pragma unroll
            for (int pass = 0; pass < 2; ++pass)
#pragma unroll
                for (int i = 0; i < batch; ++i) {
                    const int number = (begin + i) * 32 + lane;
                    const int down = number / C::piece_columns, across = number % C::piece_columns;
                    if (row + down >= m || column + across >= n) continue;
                    const unsigned at = buffer + place(down, across * C::item / 16) + across * C::item % 16;
                    if (pass == 0) elements[i] = static_cast<const Out*>(out)[(row + down) * ldo + column + across];
                    else if constexpr (C::item == 4)
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(elements[i]) : "memory");
                    else asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((unsigned short)elements[i]) : "memory");
                }
        }
    }

    // Of a round that begins at piece ``round`` of the warpgroup's slices: what is to be added comes into the buffers
    // once the stores before have read them.
    DEVICE void load_round(int round, int first_row, int slice_step, int first_column) const {
        if (!C::store_tiles || warp != 0 || lane != 0) return;
        stores_read<0>();
        int bytes = 0;
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            if (pass == 1) barrier_expect(addend_full, bytes);
#pragma unroll
            for (int i = 0; i < C::buffers; ++i) {
                const int row = first_row + (round + i) / C::pieces * slice_step;
                const int column = first_column + (round + i) % C::pieces * C::piece_columns;
                if (row >= m || column >= n) continue;
                if (pass == 0) bytes += C::buffer_bytes;
                else tile_load(buffers + i * C::buffer_bytes, map, column * C::item, row, addend_full);
            }
        }
    }

    // Pieces FIRST to END of the warpgroup's slices, which are ``slice_step`` rows apart from ``first_row`` on, in
    // rounds of as many pieces as there are buffers. The stores of a round are awaited by the next that has its
    // buffers, which may be that of another tile. A kernel that accumulates stores all pieces at once, and has called
    // `load_round` for the first of them.
    template <int FIRST = 0, int END = C::m_slices * C::pieces, class Value>
    DEVICE void tile(const Value& value, int first_row, int slice_step, int first_column) {
        constexpr int many = END - FIRST < C::buffers ? END - FIRST : C::buffers;
        static_assert((END - FIRST) % many == 0 && C::buffers % many == 0, "a round has the same buffers in each tile");
        static_assert(!C::accumulates || many == C::buffers, "all buffers are loaded at a time");
#pragma unroll
        for (int round = FIRST; round < END; round += many) {
            if constexpr (C::accumulates) {
                if (C::store_tiles) {
                    if (round > 0) load_round(round, first_row, slice_step, first_column);
                    barrier_wait(addend_full, addend_parity);
                    addend_parity ^= 1;
                } else {
#pragma unroll
                    for (int i = 0; i < C::buffers; ++i) {
                        const int row = first_row + (round + i) / C::pieces * slice_step + warp * 16;
                        const int column = first_column + (round + i) % C::pieces * C::piece_columns;
                        load_elements(buffers + i * C::buffer_bytes + warp * (16 * C::piece_bytes), row, column);
                    }
                    __syncwarp();
                }
            } else if (C::store_tiles) {
                if (warp == 0 && lane == 0) stores_read<C::buffers / many - 1>();
                threads_sync(barrier, 128);
            }
#pragma unroll
            for (int i = 0; i < many; ++i) {
                const int slice = (round + i) / C::pieces, piece = (round + i) % C::pieces;
                stage(buffer_of(round + i) + warp * (16 * C::piece_bytes), value, slice, piece * C::piece_columns / 2);
            }
            if (C::store_tiles) {
                writes_fence();
                threads_sync(barrier, 128);
            } else {
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < many; ++i) {
                const int row = first_row + (round + i) / C::pieces * slice_step;
                const int column = first_column + (round + i) % C::pieces * C::piece_columns;
                const unsigned buffer = buffer_of(round + i);
                if (!C::store_tiles) store_words(buffer + warp * (16 * C::piece_bytes), row + warp * 16, column);
                else if (warp == 0 && lane == 0 && row < m && column < n)
                    tile_store(map, buffer, column * C::item, row);
            }
            if (!C::store_tiles) __syncwarp();
            else if (warp == 0 && lane == 0) stores_commit();
        }
    }
};
