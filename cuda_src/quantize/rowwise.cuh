// A team of threads quantizes a tile with one scale: a token, a group of a token, or a block of rows and columns.
// scale = formula(max |tile|), data = encode(tile / scale); or with MODE STATIC data = encode(tile * (1 / scale)).
//
// The tile stays in registers between the two steps: every element is read once and written once. Vectors of 8 of a
// tile are dealt to its TEAM threads round-robin, VECTORS per thread. A team handles REPEAT tiles, TEAMS_X apart along
// the columns. All loads are issued before the first one is used. Rows from `rows` to `rows_padded` become zero bytes,
// and tiles with such rows alone get the scale 1.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS TEAM VECTORS REPEAT TEAMS_X ALIGNMENT, and
//   CLUSTER                 blocks of a cluster that shares a token, to spread it over more multiprocessors; else 1;
//   TILE_ROWS, TILE_VECS    the tile; of a token as much as the team can hold; MODE STATIC: a piece of a row;
//   DOWN                    1: neighbouring teams are below each other, in the order of scales; 0: side by side;
//   EARLY                   1: addresses are computed before the wait for the preceding kernel, for so few elements
//                           that the time from the wait to the loads counts;
//   TAIL                    0: cols is a multiple of a block's columns; 1: of 8; 2: of neither;
//   GROUP_ROWS, GROUP_COLS  of a given scale (MODE STATIC), -1 for all.
// The caller owes: TEAM is THREADS * CLUSTER (then REPEAT is 1), or a power of two up to WARP, or MODE is STATIC;
// TEAM * VECTORS holds a tile; columns of tiles and of given scales' groups are multiples of 8 or all; addresses and
// strides of rows are multiples of ALIGNMENT, 8 or 16 (else rowwise_unaligned.cuh); the grid is (tile columns /
// (TEAMS_X * REPEAT), tile rows / teams along the rows), both rounded up, the rows' over y and z.
#pragma once
constexpr int ALIGNMENT = FP8_ALIGNMENT, CLUSTER = FP8_CLUSTER, DOWN = FP8_DOWN, EARLY = FP8_EARLY, FORMAT = FP8_FORMAT,
              GROUP_COLS = FP8_GROUP_COLS, GROUP_ROWS = FP8_GROUP_ROWS, INPUT = FP8_INPUT, MODE = FP8_MODE,
              REPEAT = FP8_REPEAT, SCALE_FORMAT = FP8_SCALE_FORMAT, TAIL = FP8_TAIL, TEAM = FP8_TEAM,
              TEAMS_X = FP8_TEAMS_X, THREADS = FP8_THREADS, TILE_ROWS = FP8_TILE_ROWS, TILE_VECS = FP8_TILE_VECS,
              VECTORS = FP8_VECTORS;
#include "../common/vec8.cuh"
#include "../common/cluster_reduce.cuh"

KERNEL(THREADS)
quantize_rowwise(QUANTIZE_PARAMETERS) {
    grid_dependency_launch();
    constexpr int TEAMS_Y = THREADS * CLUSTER / TEAM / TEAMS_X, ITEM = SIZE_OF<INPUT>;
    constexpr bool FULL = TEAM * VECTORS == TILE_ROWS * TILE_VECS;
    const unsigned thread = block_x() % CLUSTER * THREADS + thread_x(), team = thread / TEAM, member = thread % TEAM;
    const unsigned team_row = DOWN ? team % TEAMS_Y : team / TEAMS_X;
    const unsigned team_col = DOWN ? team / TEAMS_Y : team % TEAMS_X;
    const long long tile_row = (static_cast<long long>(block_z()) * grid_y() + block_y()) * TEAMS_Y + team_row;
    const int first_tile = block_x() / CLUSTER * (TEAMS_X * REPEAT) + static_cast<int>(team_col);
    const long long first_row = tile_row * TILE_ROWS;

    // The position of vector v of tile r, and how many of its elements are columns (none: 0 or less).
    auto row_of = [&](int v) { return first_row + (TILE_ROWS == 1 ? 0u : (member + v * TEAM) / TILE_VECS); };
    auto slot_of = [&](int v) {
        const unsigned vec = member + v * TEAM;
        return static_cast<int>(TILE_ROWS == 1 ? vec : vec % TILE_VECS);
    };
    auto tile_col = [&](int r) { return (first_tile + r * TEAMS_X) * (TILE_VECS * 8); };
    auto col_of = [&](int r, int v) { return tile_col(r) + slot_of(v) * 8; };
    auto count_of = [&](int r, int v) {
        if (!FULL && member + v * TEAM >= TILE_ROWS * TILE_VECS) return 0;
        if (TAIL == 0) return 8;
        const int left = static_cast<int>(cols) - tile_col(r) - slot_of(v) * 8;
        return left < 8 ? left : 8;
    };
    // In a tile of one row, the vectors of a thread are a constant apart, from these addresses on.
    const byte* from[REPEAT];
    byte *into[REPEAT], *scale_to[REPEAT];
    const long long scale_row = MODE != STATIC ? tile_row : GROUP_ROWS < 0 ? 0 : tile_row / GROUP_ROWS;
    byte* const row_scales = static_cast<byte*>(scales) + scale_row * scale_row_stride * SCALE_BYTES<SCALE_FORMAT>;
#pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
        from[r] = x + (first_row * x_stride + col_of(r, 0)) * ITEM;
        into[r] = data + first_row * data_stride + col_of(r, 0);
        scale_to[r] = row_scales + (first_tile + r * TEAMS_X) * scale_col_stride * SCALE_BYTES<SCALE_FORMAT>;
        if constexpr (EARLY && TILE_ROWS == 1) {
            from[r] = computed_here(from[r]), into[r] = computed_here(into[r]);
            if (MODE != STATIC) scale_to[r] = computed_here(scale_to[r]);
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) {
                if (first_row < rows && count_of(r, v) > 0)
                    prefetch_to_l2(from[r] + v * (TEAM * 8 * ITEM)), prefetch_to_l2(into[r] + v * (TEAM * 8));
            }
        }
    }
    auto load_from = [&](int r, int v) {
        return TILE_ROWS == 1 ? from[r] + v * (TEAM * 8 * ITEM) : x + (row_of(v) * x_stride + col_of(r, v)) * ITEM;
    };
    auto store_to = [&](int r, int v) {
        return TILE_ROWS == 1 ? into[r] + v * (TEAM * 8) : data + row_of(v) * data_stride + col_of(r, v);
    };

    RowTeam<(TEAM > WARP ? THREADS : WARP), CLUSTER> row_team;
    if constexpr (CLUSTER > 1) row_team.start();
    grid_dependency_wait();

    Vec8<INPUT> vecs[REPEAT][VECTORS];
#pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = row_of(v) < rows ? count_of(r, v) : 0;
            const byte* const p = load_from(r, v);
            vecs[r][v] = empty_vec8<INPUT>();
            if (count <= 0) continue;
            if (TAIL < 2 || count == 8) vecs[r][v] = load_vec8<INPUT, ALIGNMENT>(p);
            if (TAIL == 2 && count < 8) vecs[r][v] = load_vec8_head<INPUT>(p, count);
        }
    }

    float upper = upper_value;
    if (MODE == TOKEN && upper_address) upper = minimum(upper, *upper_address);

#pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
        Divisor divisor;
        if constexpr (MODE == STATIC) {
            if (GROUP_COLS < 0 && tile_row < rows) divisor = prepared<MODE>(load_scale<SCALE_FORMAT>(row_scales, 0));
        } else {
            AbsMax<INPUT> largest;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) largest.update(vecs[r][v]);
            unsigned amax_bits;
            if constexpr (TEAM <= WARP) {
                amax_bits = team_max<TEAM>(largest.bits());
            } else {
                amax_bits = row_max(row_team, largest.bits());
            }
            const float scale = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, eps));
            divisor = prepared<MODE>(scale, MODE == TOKEN && upper < float_of(amax_bits));
            const bool in_cols = MODE == TOKEN || TAIL == 0 || tile_col(r) < cols;
            if (member == 0 && first_row < rows_padded && in_cols)
                store_scale<SCALE_FORMAT>(scale_to[r], 0, first_row < rows ? scale : 1.0f);
        }
        Vector8 codes[VECTORS];
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            codes[v] = {0, 0};
            const int count = row_of(v) < rows ? count_of(r, v) : 0;
            if (count <= 0) continue;
            if constexpr (MODE == STATIC && GROUP_COLS >= 0) {
                const long long index = col_of(r, v) / GROUP_COLS * scale_col_stride;
                divisor = prepared<MODE>(load_scale<SCALE_FORMAT>(row_scales, index));
            }
            codes[v] = encode_vec8<INPUT, FORMAT, MODE>(vecs[r][v], divisor);
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = row_of(v) < rows_padded ? count_of(r, v) : 0;
            if (count <= 0) continue;
            byte* const p = store_to(r, v);
            if (TAIL < 2 || count == 8) {
                store_vec8<ALIGNMENT>(p, codes[v]);
            } else {
                store_vec8_head(p, codes[v], count);
            }
        }
    }
}
