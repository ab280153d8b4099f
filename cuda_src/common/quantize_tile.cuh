// A team of threads quantizes a tile that shares one scale: a token, a group of one, a block of a group.
// scale = formula(max |tile|), data = encode(tile / scale); or with MODE STATIC data = encode(tile * (1 / scale)).
//
// The tile stays in registers between the two: every element is read once and written once. Octets of a tile are
// dealt to its TEAM threads in turn, VECTORS a thread; a team handles REPEAT tiles, TEAMS_X apart along the columns.
// All loads are issued before the first is used. Rows from `rows` to `rows_padded` become zero bytes, and tiles of such
// rows alone scale 1.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS TEAM VECTORS REPEAT TEAMS_X ALIGNMENT, and
//   TILE_ROWS, TILE_OCTETS  the tile, of a token as much as the team can hold; MODE STATIC: a piece of a row;
//   EDGE                    0: cols is a multiple of what a block spans; 1: of 8; 2: of neither;
//   GROUP_ROWS, GROUP_COLS  of a given scale (MODE STATIC), -1 for all.
// The caller owes: TEAM is THREADS (then REPEAT is 1), or a power of two up to WARP, or MODE is STATIC;
// TEAM * VECTORS >= TILE_ROWS * TILE_OCTETS; columns of tiles and of given scales' groups are multiples of 8 or all;
// addresses and strides of rows are multiples of ALIGNMENT; the grid is (tile rows / teams along the rows, tile columns
// / (TEAMS_X * REPEAT)), both rounded up.
#pragma once
#include "quantize_octet.cuh"
#include "reduce.cuh"

KERNEL(THREADS)
quantize_tile(QUANTIZE_PARAMETERS) {
    constexpr int TEAMS_Y = THREADS / TEAM / TEAMS_X, ITEM = ITEM_BYTES[INPUT];
    constexpr bool FULL = TEAM * VECTORS == TILE_ROWS * TILE_OCTETS;
    const unsigned team = thread_x() / TEAM, member = thread_x() % TEAM;
    const long long tile_row = static_cast<long long>(block_x()) * TEAMS_Y + team / TEAMS_X;
    const int first_tile = block_y() * (TEAMS_X * REPEAT) + team % TEAMS_X;
    const long long first_row = tile_row * TILE_ROWS;

    // Where octet v of tile r lies: its row and column, and how many of its elements are columns of the tile.
    auto row_of = [&](int v) { return first_row + (TILE_ROWS == 1 ? 0u : (member + v * TEAM) / TILE_OCTETS); };
    auto col_of = [&](int r, int v) {
        const unsigned octet = member + v * TEAM;
        const int inside = static_cast<int>(TILE_ROWS == 1 ? octet : octet % TILE_OCTETS);
        return ((first_tile + r * TEAMS_X) * TILE_OCTETS + inside) * 8;
    };
    auto count_of = [&](int r, int v) {
        if (!FULL && member + v * TEAM >= TILE_ROWS * TILE_OCTETS) return 0;
        if (EDGE == 0) return 8;
        const int left = static_cast<int>(cols) - col_of(r, v);
        return left <= 0 ? 0 : left < 8 ? left : 8;
    };

    grid_dependency_launch();
    grid_dependency_wait();

    Octet<INPUT> octets[REPEAT][VECTORS];
#pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = row_of(v) < rows ? count_of(r, v) : 0;
            const byte* const p = x + (row_of(v) * x_stride + col_of(r, v)) * ITEM;
            octets[r][v] = empty_octet<INPUT>();
            if (EDGE < 2 ? count > 0 : count == 8) octets[r][v] = load_octet<INPUT, ALIGNMENT>(p);
            if (EDGE == 2 && count > 0 && count < 8) octets[r][v] = load_octet_part<INPUT>(p, count);
        }
    }

    float upper = upper_value;
    if (MODE == TOKEN && upper_address) upper = minimum(upper, *upper_address);

#pragma unroll
    for (int r = 0; r < REPEAT; ++r) {
        Divisor divisor;
        const long long scale_row = MODE != STATIC ? tile_row : GROUP_ROWS < 0 ? 0 : tile_row / GROUP_ROWS;
        void* const row_scales = static_cast<byte*>(scales) + scale_row * scale_row_stride * SCALE_BYTES<SCALE_FORMAT>;
        if constexpr (MODE == STATIC) {
            if (GROUP_COLS < 0 && tile_row < rows) divisor = prepared<MODE>(load_scale<SCALE_FORMAT>(row_scales, 0));
        } else {
            Largest<INPUT> largest;
#pragma unroll
            for (int v = 0; v < VECTORS; ++v) largest.see(octets[r][v]);
            unsigned amax_bits;
            if constexpr (TEAM <= WARP) {
                amax_bits = team_max<TEAM>(largest.bits());
            } else {
                amax_bits = block_max<THREADS>(largest.bits());
            }
            const float scale = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, eps));
            divisor = prepared<MODE>(scale, MODE == TOKEN && upper < float_of(amax_bits));
            const int tile_col = first_tile + r * TEAMS_X;
            const bool in_cols = MODE == TOKEN || EDGE == 0 || tile_col * TILE_OCTETS * 8 < cols;
            if (member == 0 && first_row < rows_padded && in_cols) {
                store_scale<SCALE_FORMAT>(row_scales, tile_col * scale_col_stride, first_row < rows ? scale : 1.0f);
            }
        }
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const int count = row_of(v) < rows_padded ? count_of(r, v) : 0;
            byte* const p = data + row_of(v) * data_stride + col_of(r, v);
            if (count == 0) continue;
            Vector8 codes = {0, 0};
            if (row_of(v) < rows) {
                if constexpr (MODE == STATIC && GROUP_COLS >= 0) {
                    const long long index = col_of(r, v) / GROUP_COLS * scale_col_stride;
                    divisor = prepared<MODE>(load_scale<SCALE_FORMAT>(row_scales, index));
                }
                codes = encode_octet<INPUT, FORMAT, MODE>(octets[r][v], divisor);
            }
            if (EDGE < 2 || count == 8) {
                store_octet<ALIGNMENT>(p, codes);
            } else {
                store_octet_part(p, codes, count);
            }
        }
    }
}
