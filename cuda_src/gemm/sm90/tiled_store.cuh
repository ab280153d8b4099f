// The epilogue's stores: a warpgroup rounds its rows of a tile into its staging buffers in shared memory, and stores
// them from there. If the kernel accumulates, the addends from the result's memory are loaded into these buffers
// before: with STORE_TILES by TMA, while the tile is multiplied.
#pragma once
#include "../../ptx/transpose.cuh"
#include "tiled_rows.cuh"

template <class C>
struct TileStore {
    using Rows = TileRows<C>;
    const TensorMap* map;
    Rows rows;
    int barrier, warp;  // of this warpgroup
    unsigned buffers;
    unsigned addend_full = 0;  // this warpgroup's mbarrier of addends, if the kernel accumulates
    int addend_parity = 0;

    DEVICE unsigned buffer_of(int piece) const { return buffers + piece % C::buffers * C::buffer_bytes; }

    // The numbers of one of the four pairs that `matrices_load` loads.
    DEVICE static float2 pair_of(unsigned pair) {
        if constexpr (C::out_type == BFLOAT16) return make_float2(float_of(pair << 16), float_of(pair & 0xffff0000u));
        else return make_float2(half_to_float((unsigned short)pair), half_to_float((unsigned short)(pair >> 16)));
    }

    // Rounds this warp's 16 rows of a piece into `buffer`; a thread's sums of them begin with `first`. The buffer
    // holds the addends at the places of the results.
    template <class Value>
    DEVICE void stage(unsigned buffer, const Value& value, int slice, int first) const {
        const int lane = rows.lane;
#pragma unroll
        for (int j = 0; j < C::piece_columns / 8; j += 2) {
            const int i = first + 4 * j;
            if constexpr (C::out_type == FLOAT32) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = lane / 4 + part % 2 * 8, vector = 2 * (j + part / 2) + lane % 4 / 2;
                    const unsigned at = buffer + Rows::place(row, vector) + lane % 2 * 8;
                    float2 addend = {};
                    if constexpr (C::accumulates) addend = shared_load_floats(at);
                    shared_store_floats(at, value(slice, i + 2 * part, addend.x),
                                        value(slice, i + 2 * part + 1, addend.y));
                }
            } else if constexpr (C::element_bytes == 1) {
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    const int row = lane / 4 + part % 2 * 8;
                    const unsigned short codes = encode_pair<C::out_type - 3>(value(slice, i + 2 * part, 0.0f),
                                                                              value(slice, i + 2 * part + 1, 0.0f));
                    shared_store_element<2>(buffer + Rows::place(row, j / 2) + part / 2 * 8 + lane % 4 * 2, codes);
                }
            } else {
                unsigned pairs[4];
                if constexpr (C::accumulates)
                    matrices_load(buffer + Rows::place(lane % 16, j + lane / 16), pairs[0], pairs[1], pairs[2],
                                  pairs[3]);
#pragma unroll
                for (int part = 0; part < 4; ++part) {
                    float2 addend = {};
                    if constexpr (C::accumulates) addend = pair_of(pairs[part]);
                    pairs[part] = hardware_round_pair<C::out_type>(value(slice, i + 2 * part, addend.x),
                                                                   value(slice, i + 2 * part + 1, addend.y));
                }
                matrices_store(buffer + Rows::place(lane % 16, j + lane / 16), pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }

    // Loads the addends of the round that begins at piece `round` of the warpgroup's slices into the buffers, once
    // the stores before have read these.
    DEVICE void load_round(int round, int first_row, int slice_step, int first_column) const {
        if (!C::store_tiles || warp != 0 || rows.lane != 0) return;
        stores_read<0>();
        int bytes = 0;
#pragma unroll
        for (int pass = 0; pass < 2; ++pass) {
            if (pass == 1) barrier_expect(addend_full, bytes);
#pragma unroll
            for (int i = 0; i < C::buffers; ++i) {
                const int row = first_row + (round + i) / C::pieces * slice_step;
                const int column = first_column + (round + i) % C::pieces * C::piece_columns;
                if (row >= rows.m || column >= rows.n) continue;
                if (pass == 0) bytes += C::buffer_bytes;
                else tile_load(buffers + i * C::buffer_bytes, map, column * C::element_bytes, row, addend_full);
            }
        }
    }

    // With a split k each warp stores its rows by itself, as the others of its warpgroup may belong to other blocks.
    DEVICE bool leads() const { return rows.lane == 0 && (C::split_k > 1 || warp == 0); }
    DEVICE void together() const {
        if constexpr (C::split_k > 1) __syncwarp();
        else threads_sync(barrier, 128);
    }

    // Stores pieces FIRST to END of the warpgroup's slices, which are `slice_step` rows apart from `first_row` on,
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
                        if constexpr (C::pingpong && C::columns > 128)
                            rows.load_elements(to, row, column);  // registers
                        else rows.load(to, row, column);
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
                if (!C::store_tiles) rows.store(buffer + warp * (16 * C::piece_bytes), row + warp * 16, column);
                else if (C::grouped && (row < rows.first || row + 64 > rows.m))  // TMA would store rows of others, too
                    rows.store_aligned(buffer + warp * (16 * C::piece_bytes), row + warp * 16, column);
                else if (leads() && row + below < rows.m && column < rows.n)
                    tile_store(map, buffer + below * C::piece_bytes, column * C::element_bytes, row + below);
            }
            if (!C::store_tiles) __syncwarp();
            else if (leads()) stores_commit();
        }
    }
};
