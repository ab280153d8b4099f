// The epilogue's stores: a warpgroup rounds its rows of a tile into its staging buffers in shared memory, and stores
// them from there. If the kernel accumulates, the addends from the result's memory are loaded into these buffers
// before: with STORE_TILES by TMA, while the tile is multiplied.
#pragma once
#include "../../ptx/transpose.cuh"
#include "tiled_layout.cuh"
#include "../generic/codes.cuh"

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
    using Out = typename ElementOf<C::element_bytes>::Type;
    const TensorMap* map;
    void* out;
    long long ldo;
    int m, n;
    int barrier, warp, lane;  // of this warpgroup
    unsigned buffers;
    unsigned addend_full = 0;  // this warpgroup's mbarrier of addends, if the kernel accumulates
    int addend_parity = 0;

    DEVICE unsigned buffer_of(int piece) const { return buffers + piece % C::buffers * C::buffer_bytes; }
    // The offset in a buffer of 16 bytes of a row, in the swizzle of TMA.
    DEVICE static unsigned place(int row, int vector) {
        constexpr int vectors = C::piece_bytes / 16;
        return row * C::piece_bytes + ((vector ^ (row * C::piece_bytes / 128)) % vectors) * 16;
    }

    // The numbers of one of the four pairs that `matrices_load` loads.
    DEVICE static float2 pair_of(unsigned pair) {
        if constexpr (C::out_type == BFLOAT16) return make_float2(float_of(pair << 16), float_of(pair & 0xffff0000u));
        else return make_float2(half_to_float((unsigned short)pair), half_to_float((unsigned short)(pair >> 16)));
    }

    // Rounds this warp's 16 rows of a piece into ``buffer``; a thread's sums of them begin with ``first``. The buffer
    // holds the addends at the places of the results.
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
            } else if constexpr (C::element_bytes == 1) {
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

    // ---- results at any address: threads store them, and load their addends

    DEVICE static Vector16 loaded(unsigned at) {
        Vector16 v;
        asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                     : "r"(at)
                     : "memory");
        return v;
    }
    DEVICE static unsigned loaded_element(unsigned at) {
        unsigned element;
        unsigned short half;
        if constexpr (C::element_bytes == 4) {
            asm volatile("ld.shared.u32 %0, [%1];" : "=r"(element) : "r"(at) : "memory");
        } else if constexpr (C::element_bytes == 2) {
            asm volatile("ld.shared.u16 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
            element = half;
        } else {
            asm volatile("ld.shared.u8 %0, [%1];" : "=h"(half) : "r"(at) : "memory");
            element = half;
        }
        return element;
    }

    // Vectors of a row of a piece, one per lane, and the rows that a warp has at once.
    static constexpr int vectors = C::piece_bytes / 16, rows_at_once = 32 / vectors;
    DEVICE byte* row_of(int row, int column) const {
        return static_cast<byte*>(out) + (row * ldo + column) * C::element_bytes;
    }
    DEVICE int bytes_from(int column) const { return min_int(n - column, C::piece_columns) * C::element_bytes; }

    // Stores this warp's 16 rows of a piece from ``row`` and ``column`` on, in vectors that are aligned in the result,
    // each joined from two of the buffer; a lane has those of several rows at a time. What is left of a row, less than
    // a vector before these and less than one after them, together one unless the result ends in the piece, is stored
    // by elements.
    DEVICE void store_rows(unsigned buffer, int row, int column) const {
        constexpr int steps = 16 / rows_at_once, most = C::scales == SCALES_GROUP ? 1 : 2;
        constexpr int batch = steps < most ? steps : most;
        const int vector = lane % vectors, bytes = bytes_from(column);
        if (bytes <= 0) return;
#pragma unroll 1
        for (int begin = 0; begin < steps; begin += batch) {
            Vector16 low[batch], high[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int down = (begin + i) * rows_at_once + lane / vectors;
                low[i] = loaded(buffer + place(down, vector));
                high[i] = loaded(buffer + place(down, min_int(vector + 1, vectors - 1)));
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int at = row + (begin + i) * rows_at_once + lane / vectors;
                byte* const to = row_of(at, column);
                const int ahead = -(int)off_word(to) & 15;
                if (at < m && ahead + 16 * vector + 16 <= bytes)
                    store16(to + ahead + 16 * vector, joined(low[i], high[i], ahead));
            }
        }
        constexpr int each = 16 / C::element_bytes, edges = 16 * each / 32, of_edges = edges < 4 ? edges : 4;
#pragma unroll 1
        for (int begin = 0; begin < (bytes < C::piece_bytes ? 2 : 1) * edges; begin += of_edges) {
            unsigned elements[of_edges];
            byte* to[of_edges];
#pragma unroll
            for (int i = 0; i < of_edges; ++i) {
                const int number = (begin + i) * 32 + lane, down = number / each % 16;
                byte* const first = row_of(row + down, column);
                const int head = min_int(-(int)off_word(first) & 15, bytes);
                int at = (number / (16 * each) * each + number % each) * C::element_bytes;
                if (at >= head) at += (bytes - head) & ~15;
                to[i] = row + down < m && at < bytes ? first + at : nullptr;
                if (to[i]) elements[i] = loaded_element(buffer + place(down, at / 16) + at % 16);
            }
#pragma unroll
            for (int i = 0; i < of_edges; ++i)
                if (to[i]) *(Out*)to[i] = (Out)elements[i];
        }
    }

    // Loads the addends of this warp's 16 rows of a piece: each vector of the buffer from the two aligned vectors of
    // the result's memory that contain it; by elements at the result's beginning and end. Nothing outside is read.
    DEVICE void load_rows(unsigned buffer, int row, int column) const {
        constexpr int steps = 16 / rows_at_once, most = C::pingpong || C::sums * C::m_slices > 64 ? 1 : 2;
        constexpr int batch = steps < most ? steps : most;
        const int vector = lane % vectors, bytes = bytes_from(column), last = min_int(row + 15, m - 1);
        if ((row * ldo + column) * C::element_bytes < 15 ||
            ((m - 1 - last) * ldo + n - column) * C::element_bytes < bytes + 15) {
            load_elements(buffer, row, column);
            return;
        }
#pragma unroll 1
        for (int begin = 0; begin < steps; begin += batch) {
            Vector16 low[batch], high[batch];
            unsigned off[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const byte* const from =
                    row_of(min_int(row + (begin + i) * rows_at_once + lane / vectors, last), column) + 16 * vector;
                off[i] = off_word(from);
                low[i] = high[i] = Vector16{0, 0, 0, 0};
                if (16 * vector < bytes) low[i] = load16(from - off[i]);
                if (off[i] && 16 * vector + 16 - (int)off[i] < bytes) high[i] = load16(from - off[i] + 16);
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const Vector16 v = joined(low[i], high[i], off[i]);
                asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(
                                 buffer + place((begin + i) * rows_at_once + lane / vectors, vector)),
                             "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                             : "memory");
            }
        }
    }

    // The same by elements; zeros where the result has none.
    DEVICE void load_elements(unsigned buffer, int row, int column) const {
        // Elements of a lane, and those in flight: ping-pong tiles of 192 columns have no registers for more.
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
                    const unsigned at =
                        buffer + place(down, across * C::element_bytes / 16) + across * C::element_bytes % 16;
                    if (pass == 0) {
                        elements[i] = 0;
                        if (row + down < m && column + across < n)
                            elements[i] = static_cast<const Out*>(out)[(row + down) * ldo + column + across];
                    } else if constexpr (C::element_bytes == 4)
                        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(elements[i]) : "memory");
                    else asm volatile("st.shared.u16 [%0], %1;" ::"r"(at), "h"((unsigned short)elements[i]) : "memory");
                }
        }
    }

    // Loads the addends of the round that begins at piece ``round`` of the warpgroup's slices into the buffers, once
    // the stores before have read these.
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
                else tile_load(buffers + i * C::buffer_bytes, map, column * C::element_bytes, row, addend_full);
            }
        }
    }

    // With a split k each warp stores its rows by itself, as the others of its warpgroup may belong to other blocks.
    DEVICE bool leads() const { return lane == 0 && (C::split_k > 1 || warp == 0); }
    DEVICE void together() const {
        if constexpr (C::split_k > 1) __syncwarp();
        else threads_sync(barrier, 128);
    }

    // Stores pieces FIRST to END of the warpgroup's slices, which are ``slice_step`` rows apart from ``first_row`` on,
    // in rounds of as many pieces as there are buffers. The next round with the same buffers, which may be of another
    // tile, waits for the stores of a round. A kernel that accumulates stores all pieces in one call, and has called
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
                        const unsigned to = buffers + i * C::buffer_bytes + warp * (16 * C::piece_bytes);
                        if constexpr (C::pingpong && C::columns > 128) load_elements(to, row, column);  // registers
                        else load_rows(to, row, column);
                    }
                    __syncwarp();
                }
            } else if (C::store_tiles) {
                if (leads()) stores_read<C::buffers / many - 1>();
                together();
            }
#pragma unroll
            for (int i = 0; i < many; ++i) {
                const int slice = (round + i) / C::pieces, piece = (round + i) % C::pieces;
                stage(buffer_of(round + i) + warp * (16 * C::piece_bytes), value, slice, piece * C::piece_columns / 2);
            }
            if (C::store_tiles) {
                accesses_fence();
                together();
            } else {
                __syncwarp();
            }
#pragma unroll
            for (int i = 0; i < many; ++i) {
                const int row = first_row + (round + i) / C::pieces * slice_step;
                const int column = first_column + (round + i) % C::pieces * C::piece_columns;
                const unsigned buffer = buffer_of(round + i);
                const int below = C::split_k > 1 ? warp * 16 : 0;
                if (!C::store_tiles) store_rows(buffer + warp * (16 * C::piece_bytes), row + warp * 16, column);
                else if (leads() && row + below < m && column < n)
                    tile_store(map, buffer + below * C::piece_bytes, column * C::element_bytes, row + below);
            }
            if (!C::store_tiles) __syncwarp();
            else if (leads()) stores_commit();
        }
    }
};
