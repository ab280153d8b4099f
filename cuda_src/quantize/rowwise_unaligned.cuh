// quantize_rowwise for rows that begin at any element.
//
// Vectors of 8 are at multiples of 8 of the codes' addresses, so that one store writes each of them; if rows of x have
// the same alignment, one load reads each, too. A row of a tile is some whole vectors and two ends: the head, a slice
// of the vector before them, and the tail, a slice of the vector after them. Whole vectors are dealt to the TEAM
// threads round-robin, VECTORS per thread, and ends separately, so that no whole vector is masked. If tiles are side by
// side, the tail of one and the head of the next are slices of the same vector: if both teams are in one warp, the next
// tile's team stores it.
//
// Tiles are dealt to teams row after row, wherever in a block a row ends: ACROSS blocks side by side have TEAMS rows.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS TEAM VECTORS, and
//   TILE_ROWS, TILE_VECS    the tile; of a token as much as the team can hold; MODE STATIC: a piece of a row;
//   ACROSS                  tiles side by side, of which the last one has the remaining columns;
//   EARLY                   as in rowwise.cuh; and warps without an end skip it;
//   GROUP_ROWS, GROUP_COLS  of a given scale (MODE STATIC), -1 for all.
// The caller owes: TEAM is THREADS or a power of two up to WARP; TEAM * VECTORS is at least TILE_ROWS * TILE_VECS;
// elements of x are at multiples of their size; the group of a given scale is a tile, or has all columns; the grid is
// (ACROSS, tile rows / TEAMS rounded up, over y and z), and where y * z is 1 no more over x than the tiles need.
#pragma once
constexpr int ACROSS = FP8_ACROSS, EARLY = FP8_EARLY, FORMAT = FP8_FORMAT, GROUP_COLS = FP8_GROUP_COLS,
              GROUP_ROWS = FP8_GROUP_ROWS, INPUT = FP8_INPUT, MODE = FP8_MODE, SCALE_FORMAT = FP8_SCALE_FORMAT,
              TEAM = FP8_TEAM, THREADS = FP8_THREADS, TILE_ROWS = FP8_TILE_ROWS, TILE_VECS = FP8_TILE_VECS,
              VECTORS = FP8_VECTORS;
#include "../common/tail.cuh"
#include "../common/reduce.cuh"

KERNEL(THREADS)
quantize_rowwise_unaligned(QUANTIZE_PARAMETERS) {
    grid_dependency_launch();
    constexpr int ITEM = SIZE_OF<INPUT>, TEAMS = THREADS / TEAM, WIDTH = TILE_VECS * 8;
    constexpr int ENDS = (2 * TILE_ROWS + TEAM - 1) / TEAM;
    constexpr bool SHARES = TILE_ROWS == 1 && ACROSS > 1 && TEAM > 1 && TEAM < WARP;
    const unsigned member = thread_x() % TEAM, place = block_x() * TEAMS + thread_x() / TEAM;
    const int tile = place % ACROSS, tile_col = tile * WIDTH;
    const long long rows_before = (static_cast<long long>(block_z()) * grid_y() + block_y()) * TEAMS;
    const long long tile_row = rows_before + place / ACROSS, first_row = tile_row * TILE_ROWS;
    Bounds bounds = {x, x + ((rows - 1) * x_stride + cols) * ITEM};

    struct Run {  // A row of the tile:
        const byte* x;
        byte* data;      // its first whole vector, in x and in data,
        Slice head;      // its slice of the vector before that one,
        int vecs;        // the number of whole vectors,
        int rest_after;  // and the number of elements after them.
    };
    const auto run_of = [&](int r) -> Run {
        const long long row = first_row + r;
        const int left = row < rows_padded ? static_cast<int>(cols) - tile_col : 0;
        const int width = tile == ACROSS - 1 || left < WIDTH ? left : WIDTH;
        byte* const codes = data + row * data_stride + tile_col;
        const int ahead = static_cast<int>(0 - reinterpret_cast<word64>(codes)) & 7;
        const int rest = width > ahead ? width - ahead : 0, end = 8 - ahead + width;
        const byte* const source = x + (row * x_stride + tile_col + ahead) * ITEM;
        return {source, codes + ahead, {8 - ahead, end < 8 ? end : 8}, rest / 8, rest % 8};
    };
    Run only = run_of(0);
    // In a tile of one row: how many vectors there are to load, from this thread's first one on.
    int to_load = first_row < rows ? only.vecs - static_cast<int>(member) : 0;
    if constexpr (EARLY && TILE_ROWS == 1) {
        only.x = pin_register(only.x), only.data = pin_register(only.data);
        bounds.end = pin_register(bounds.end);
        to_load = static_cast<int>(pin_register(static_cast<unsigned>(to_load)));
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int at = member + v * TEAM;
            if (v * TEAM < to_load) prefetch_to_l2(only.x + at * (8 * ITEM)), prefetch_to_l2(only.data + at * 8);
        }
    }

    struct TileVector {  // The addresses of a vector, and which of its elements are of the tile.
        const byte* x;
        byte* data;
        Slice slice;
        bool reads;  // Its row is a row of x, not padding.
    };
    const auto vec_at = [&](int v) -> TileVector {
        if constexpr (TILE_ROWS == 1) {
            // Vectors of 8 of a thread are a constant apart.
            const bool any = v * TEAM < only.vecs - static_cast<int>(member);
            return {only.x + member * (8 * ITEM) + v * (TEAM * 8 * ITEM),
                    only.data + member * 8 + v * (TEAM * 8),
                    {0, any ? 8 : 0},
                    first_row < rows};
        } else {
            const int number = member + v * TEAM, r = number / TILE_VECS, at = number % TILE_VECS;
            const Run run = run_of(r);
            const bool any = r < TILE_ROWS && at < run.vecs;
            return {run.x + at * (8 * ITEM), run.data + at * 8, {0, any ? 8 : 0}, first_row + r < rows};
        }
    };
    const auto end_at = [&](int e) -> TileVector {
        const int number = member + e * TEAM, r = number / 2, is_tail = number % 2;
        const Run run = TILE_ROWS == 1 ? only : run_of(r);
        const int at = is_tail ? run.vecs : -1;
        const Slice slice = is_tail ? Slice{0, run.rest_after} : run.head;
        return {run.x + at * (8 * ITEM), run.data + at * 8, r < TILE_ROWS ? slice : Slice{0, 0}, first_row + r < rows};
    };

    const long long scale_row = MODE != STATIC ? tile_row : GROUP_ROWS < 0 ? 0 : tile_row / GROUP_ROWS;
    const long long scale_col = GROUP_COLS < 0 ? 0 : tile * scale_col_stride;
    void* const row_scales = static_cast<byte*>(scales) + scale_row * scale_row_stride * SCALE_BYTES<SCALE_FORMAT>;
    grid_dependency_wait();

    // (Before the vectors: after a row's last whole vector, the compiler may wait for a load where it is issued.)
    float scale = 1.0f;  // of padding rows
    float upper = upper_value;
    if (MODE == STATIC && first_row < rows) scale = load_scale<SCALE_FORMAT>(row_scales, scale_col);
    if (MODE == TOKEN && upper_address) upper = minimum(upper, *upper_address);

    Vec8<INPUT> vecs[VECTORS], ends[ENDS];
    const auto load_vecs = [&](auto load) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const TileVector vector = vec_at(v);
            vecs[v] = empty_vec8<INPUT>();
            if (TILE_ROWS == 1 ? v * TEAM < to_load : vector.reads && vector.slice.any()) vecs[v] = load(vector.x);
        }
    };
    if (TILE_ROWS == 1 && off_of(only.x) == 0) {
        load_vecs([](const byte* p) { return load_vec8<INPUT, 16>(p); });
    } else {
        load_vecs([&](const byte* p) { return load_slice<INPUT>(p, {0, 8}, bounds); });
    }
    // (After the vectors, which need not wait for these.)
#pragma unroll
    for (int e = 0; e < ENDS; ++e) {
        const TileVector vector = end_at(e);
        ends[e] = empty_vec8<INPUT>();
        if (vector.reads && vector.slice.any()) ends[e] = load_slice<INPUT>(vector.x, vector.slice, bounds);
    }

    bool bounded = false;
    if constexpr (MODE != STATIC) {
        AbsMax<INPUT> largest;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) largest.update(vecs[v]);
#pragma unroll
        for (int e = 0; e < ENDS; ++e) {
            const Slice slice = end_at(e).slice;
            if (slice.any()) cut<INPUT>(ends[e], slice);
            largest.update(ends[e]);
        }
        unsigned amax_bits;
        if constexpr (TEAM <= WARP) {
            amax_bits = team_max<TEAM>(largest.bits());
        } else {
            amax_bits = block_max<THREADS>(largest.bits());
        }
        if (first_row < rows) scale = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, eps));
        bounded = MODE == TOKEN && upper < float_of(amax_bits);
        if (member == 0 && first_row < rows_padded) store_scale<SCALE_FORMAT>(row_scales, scale_col, scale);
    }
    const Divisor divisor = prepared<MODE>(scale, bounded);

    Vector8 codes[VECTORS];
    encode_vec8s<INPUT, FORMAT, MODE>(vecs, divisor, codes);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const TileVector vector = vec_at(v);
        if (TILE_ROWS > 1 && !vector.reads) codes[v] = {0, 0};
        if (vector.slice.any()) store8(vector.data, codes[v]);
    }
#pragma unroll
    for (int e = 0; e < ENDS; ++e) {
        TileVector vector = end_at(e);
        // With few elements, many warps have no end.
        if (EARLY && TEAM <= WARP && warp_all(!vector.slice.any())) continue;
        Vector8 end_codes = {0, 0};
        const bool wanted = TEAM <= WARP || vector.slice.any();  // most warps of a block have no end
        if (wanted && (TILE_ROWS == 1 || vector.reads)) end_codes = encode_vec8<INPUT, FORMAT, MODE>(ends[e], divisor);
        if constexpr (SHARES) {
            // Member 0 has the head, member 1 the tail.
            const Vector8 before = from_lanes_before<TEAM - 1>(end_codes);
            if (member == 0 && tile > 0 && lane() > 0 && vector.slice.any()) {
                end_codes = joined(before, end_codes, vector.slice.begin);
                vector.slice.begin = 0;
            }
            if (member == 1 && tile < ACROSS - 1 && lane() + TEAM <= WARP) vector.slice.end = 0;
        }
        if (vector.slice.any()) store_slice(vector.data, end_codes, vector.slice);
    }
}
