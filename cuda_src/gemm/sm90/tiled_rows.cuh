// Rows of results at any address: threads store them from the staging buffers of `TileStore`, and load their addends.
#pragma once
#include "../../ptx/shared.cuh"
#include "../generic/codes.cuh"
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
struct TileRows {
    using Out = typename ElementOf<C::element_bytes>::Type;
    void* out;
    long long ldo;
    int first, m, n, lane;  // rows from `first` to m are stored

    DEVICE void only(int from, int end) {
        first = from;
        m = end;
    }
    DEVICE bool has(int row) const { return row < m && (!C::grouped || row >= first); }

    // The offset in a buffer of 16 bytes of a row, in the swizzle of TMA.
    DEVICE static unsigned place(int row, int vector) {
        constexpr int vectors = C::piece_bytes / 16;
        return row * C::piece_bytes + ((vector ^ (row * C::piece_bytes / 128)) % vectors) * 16;
    }

    // Vectors of a row of a piece, one per lane, and the rows that a warp has at once.
    static constexpr int vectors = C::piece_bytes / 16, rows_at_once = 32 / vectors;
    DEVICE byte* row_of(int row, int column) const {
        return static_cast<byte*>(out) + (row * ldo + column) * C::element_bytes;
    }
    DEVICE int bytes_from(int column) const { return min_int(n - column, C::piece_columns) * C::element_bytes; }

    // Stores this warp's 16 rows of a piece from `row` and `column` on, in vectors that are aligned in the result,
    // each joined from two of the buffer; a lane has those of several rows at a time. What is left of a row, less than
    // a vector before these and less than one after them, together one unless the result ends in the piece, is stored
    // by elements.
    DEVICE void store(unsigned buffer, int row, int column) const {
        constexpr int steps = 16 / rows_at_once, most = C::scales == SCALES_GROUP ? 1 : 2;
        constexpr int batch = steps < most ? steps : most;
        const int vector = lane % vectors, bytes = bytes_from(column);
        if (bytes <= 0 || (C::grouped && row >= m)) return;
#pragma unroll 1
        for (int begin = 0; begin < steps; begin += batch) {
            Vector16 low[batch], high[batch];
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int down = (begin + i) * rows_at_once + lane / vectors;
                low[i] = shared_load16(buffer + place(down, vector));
                high[i] = shared_load16(buffer + place(down, min_int(vector + 1, vectors - 1)));
            }
#pragma unroll
            for (int i = 0; i < batch; ++i) {
                const int at = row + (begin + i) * rows_at_once + lane / vectors;
                byte* const to = row_of(at, column);
                const int ahead = -(int)off_word(to) & 15;
                if (has(at) && ahead + 16 * vector + 16 <= bytes)
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
                byte* const begin = row_of(row + down, column);
                const int head = min_int(-(int)off_word(begin) & 15, bytes);
                int at = (number / (16 * each) * each + number % each) * C::element_bytes;
                if (at >= head) at += (bytes - head) & ~15;
                to[i] = has(row + down) && at < bytes ? begin + at : nullptr;
                if (to[i]) elements[i] = shared_load_element<C::element_bytes>(buffer + place(down, at / 16) + at % 16);
            }
#pragma unroll
            for (int i = 0; i < of_edges; ++i)
                if (to[i]) *(Out*)to[i] = (Out)elements[i];
        }
    }

    // The same for rows that begin at multiples of 16 bytes, as those that TMA stores do: a vector a lane and row. Only
    // one that the result ends in is stored by elements.
    DEVICE void store_aligned(unsigned buffer, int row, int column) const {
        constexpr int batch = C::scales == SCALES_GROUP ? 1 : 4;  // registers
        const int at = 16 * (lane % vectors), bytes = bytes_from(column);
        if (at >= bytes || row >= m) return;
#pragma unroll batch
        for (int begin = 0; begin < 16; begin += rows_at_once) {
            const int down = begin + lane / vectors;
            if (!has(row + down)) continue;
            const unsigned from = buffer + place(down, lane % vectors);
            byte* const to = row_of(row + down, column) + at;
            if (at + 16 <= bytes) store16(to, shared_load16(from));
            else
#pragma unroll 1
                for (int i = 0; i < bytes - at; i += C::element_bytes)
                    *(Out*)(to + i) = (Out)shared_load_element<C::element_bytes>(from + i);
        }
    }

    // Loads the addends of this warp's 16 rows of a piece: each vector of the buffer from the two aligned vectors of
    // the result's memory that contain it; by elements at the result's beginning and end. Nothing outside is read.
    DEVICE void load(unsigned buffer, int row, int column) const {
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
                shared_store16(buffer + place((begin + i) * rows_at_once + lane / vectors, vector), v);
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
                    } else {
                        shared_store_element<C::element_bytes>(at, elements[i]);
                    }
                }
        }
    }
};
