// What quantize_tile does, for rows that begin anywhere.
//
// Octets lie at multiples of 8 of the codes' addresses, so that they are stored at once; where rows of x lie as those
// of the codes do, they are loaded at once, too. A row of a tile is some whole octets, and two edges: parts of the
// octet before them and of the one behind them. Whole octets are dealt to the TEAM threads in turn, VECTORS a thread,
// edges on their own: so no whole one is masked. Where tiles lie side by side, the rear edge of one and the front edge
// of the next are parts of one octet: if both teams are in one warp, the next one's stores it.
//
// Tiles are dealt to teams row after row, wherever in a block a row ends: ACROSS blocks side by side have TEAMS rows.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS TEAM VECTORS, and
//   TILE_ROWS, TILE_OCTETS  the tile, of a token as much as the team can hold; MODE STATIC: a piece of a row;
//   ACROSS                  tiles side by side, of which the last one has what is left;
//   GROUP_ROWS, GROUP_COLS  of a given scale (MODE STATIC), -1 for all.
// The caller owes: TEAM is THREADS or a power of two up to WARP; TEAM * VECTORS is at least TILE_ROWS * TILE_OCTETS;
// elements of x lie at multiples of their size; the group of a given scale is a tile, or has all columns; the grid is
// (ACROSS, tile rows / TEAMS rounded up, over y and z), and where y * z is 1 no more over x than the tiles need.
#pragma once
#include "octet_part.cuh"
#include "reduce.cuh"

KERNEL(THREADS)
quantize_anywhere(QUANTIZE_PARAMETERS) {
    constexpr int ITEM = ITEM_BYTES[INPUT], TEAMS = THREADS / TEAM, WIDTH = TILE_OCTETS * 8;
    constexpr int EDGES = (2 * TILE_ROWS + TEAM - 1) / TEAM;
    constexpr bool SHARES = TILE_ROWS == 1 && ACROSS > 1 && TEAM > 1 && TEAM < WARP;
    const unsigned member = thread_x() % TEAM, place = block_x() * TEAMS + thread_x() / TEAM;
    const int tile = place % ACROSS, tile_col = tile * WIDTH;
    const long long rows_before = (static_cast<long long>(block_z()) * grid_y() + block_y()) * TEAMS;
    const long long tile_row = rows_before + place / ACROSS, first_row = tile_row * TILE_ROWS;
    const Bounds bounds = {x, x + ((rows - 1) * x_stride + cols) * ITEM};

    struct Run {  // A row of the tile:
        const byte* x;
        byte* data;   // its first whole octet,
        Part front;   // of the octet before that one,
        int octets;   // how many whole ones,
        int behind;   // and elements behind them.
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
    const Run only = run_of(0);

    struct Spot {  // Where an octet lies, and what of it is the tile's.
        const byte* x;
        byte* data;
        Part part;
        bool reads;  // Its row is one of x, and not only of the codes.
    };
    const auto octet_at = [&](int v) -> Spot {
        if constexpr (TILE_ROWS == 1) {
            // Octets of a thread are a constant apart.
            const bool any = v * TEAM < only.octets - static_cast<int>(member);
            return {only.x + member * (8 * ITEM) + v * (TEAM * 8 * ITEM), only.data + member * 8 + v * (TEAM * 8),
                    {0, any ? 8 : 0}, first_row < rows};
        } else {
            const int number = member + v * TEAM, r = number / TILE_OCTETS, at = number % TILE_OCTETS;
            const Run run = run_of(r);
            const bool any = r < TILE_ROWS && at < run.octets;
            return {run.x + at * (8 * ITEM), run.data + at * 8, {0, any ? 8 : 0}, first_row + r < rows};
        }
    };
    const auto edge_at = [&](int e) -> Spot {
        const int number = member + e * TEAM, r = number / 2, rear = number % 2;
        const Run run = TILE_ROWS == 1 ? only : run_of(r);
        const int at = rear ? run.octets : -1;
        const Part part = rear ? Part{0, run.behind} : run.front;
        return {run.x + at * (8 * ITEM), run.data + at * 8, r < TILE_ROWS ? part : Part{0, 0}, first_row + r < rows};
    };

    grid_dependency_launch();
    grid_dependency_wait();

    Octet<INPUT> octets[VECTORS], edges[EDGES];
    const auto load_octets = [&](auto load) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            const Spot spot = octet_at(v);
            octets[v] = empty_octet<INPUT>();
            if (spot.reads && spot.part.any()) octets[v] = load(spot.x);
        }
    };
    if (TILE_ROWS == 1 && off_of(only.x) == 0) {
        load_octets([](const byte* p) { return load_octet<INPUT, 16>(p); });
    } else {
        load_octets([&](const byte* p) { return load_part<INPUT>(p, {0, 8}, bounds); });
    }
    // (After the octets: what is waited for here, they do not wait for.)
#pragma unroll
    for (int e = 0; e < EDGES; ++e) {
        const Spot spot = edge_at(e);
        edges[e] = empty_octet<INPUT>();
        if (spot.reads && spot.part.any()) edges[e] = load_part<INPUT>(spot.x, spot.part, bounds);
    }

    const long long scale_row = MODE != STATIC ? tile_row : GROUP_ROWS < 0 ? 0 : tile_row / GROUP_ROWS;
    const long long scale_col = GROUP_COLS < 0 ? 0 : tile * scale_col_stride;
    void* const row_scales = static_cast<byte*>(scales) + scale_row * scale_row_stride * SCALE_BYTES<SCALE_FORMAT>;
    float scale = 1.0f;  // of rows that pad
    bool bounded = false;
    if constexpr (MODE == STATIC) {
        if (first_row < rows) scale = load_scale<SCALE_FORMAT>(row_scales, scale_col);
    } else {
        float upper = upper_value;
        if (MODE == TOKEN && upper_address) upper = minimum(upper, *upper_address);
        Largest<INPUT> largest;
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) largest.see(octets[v]);
#pragma unroll
        for (int e = 0; e < EDGES; ++e) {
            const Part part = edge_at(e).part;
            if (part.any()) cut<INPUT>(edges[e], part);
            largest.see(edges[e]);
        }
        unsigned amax_bits;
        if constexpr (TEAM <= WARP) {
            amax_bits = team_max<TEAM>(largest.bits());
        } else {
            amax_bits = block_max<THREADS>(largest.bits());
        }
        if (first_row < rows) scale = settled<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, upper, eps));
        bounded = MODE == TOKEN && upper < float_of(amax_bits);
        if (member == 0 && first_row < rows_padded) store_scale<SCALE_FORMAT>(row_scales, scale_col, scale);
    }
    const Divisor divisor = prepared<MODE>(scale, bounded);

    Vector8 codes[VECTORS];
    encode_octets<INPUT, FORMAT, MODE>(octets, divisor, codes);
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        const Spot spot = octet_at(v);
        if (TILE_ROWS > 1 && !spot.reads) codes[v] = {0, 0};
        if (spot.part.any()) store8(spot.data, codes[v]);
    }
#pragma unroll
    for (int e = 0; e < EDGES; ++e) {
        Spot spot = edge_at(e);
        Vector8 edge = {0, 0};
        const bool wanted = TEAM <= WARP || spot.part.any();  // Most warps of a block have no edge.
        if (wanted && (TILE_ROWS == 1 || spot.reads)) edge = encode_octet<INPUT, FORMAT, MODE>(edges[e], divisor);
        if constexpr (SHARES) {
            // Member 0 has the front, member 1 the rear.
            const Vector8 before = from_lanes_before<TEAM - 1>(edge);
            if (member == 0 && tile > 0 && lane() > 0 && spot.part.any()) {
                edge = joined(before, edge, spot.part.begin);
                spot.part.begin = 0;
            }
            if (member == 1 && tile < ACROSS - 1 && lane() + TEAM <= WARP) spot.part.end = 0;
        }
        if (spot.part.any()) store_part(spot.data, edge, spot.part);
    }
}
