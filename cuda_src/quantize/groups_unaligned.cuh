// quantize_rowwise_unaligned for groups of a row, if elements are so few that latencies and instructions count.
//
// Vectors of 8 are aligned to the codes' addresses; a group has as many as if rows were aligned. Its first one begins
// up to 7 elements after the group's first element, so its last one reaches as far into the next group. There it
// contains that group's head, and that group's first thread loads it once more. So each thread has VECTORS vectors, and
// the first of a team has one more. Before the preceding kernel has ended, addresses are computed, and inputs and
// outputs are prefetched into L2.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS TEAM VECTORS, and
//   ACROSS  groups side by side, of which the last one has the remaining columns; blocks side by side have TEAMS rows.
// The caller owes: TEAM is a power of two up to WARP; groups have TEAM * VECTORS * 8 columns; elements of x are at
// multiples of their size; the grid is that of rowwise_unaligned.cuh.
#pragma once
constexpr int ACROSS = FP8_ACROSS, FORMAT = FP8_FORMAT, GROUP_COLS = FP8_GROUP_COLS, GROUP_ROWS = FP8_GROUP_ROWS,
              INPUT = FP8_INPUT, MODE = FP8_MODE, SCALE_FORMAT = FP8_SCALE_FORMAT, TEAM = FP8_TEAM,
              THREADS = FP8_THREADS, VECTORS = FP8_VECTORS;
#include "../common/tail.cuh"
#include "../common/reduce.cuh"

KERNEL(THREADS)
quantize_groups_unaligned(QUANTIZE_PARAMETERS) {
    grid_dependency_launch();
    constexpr int BYTES = 8 * SIZE_OF<INPUT>, TEAMS = THREADS / TEAM, WIDTH = TEAM * VECTORS * 8;
    const unsigned member = thread_x() % TEAM, place = block_x() * TEAMS + thread_x() / TEAM;
    const int tile = place % ACROSS, left = static_cast<int>(cols) - tile * WIDTH;
    const long long row = (static_cast<long long>(block_z()) * grid_y() + block_y()) * TEAMS + place / ACROSS;
    const bool reads = row < rows;
    const int width = row < rows_padded ? left < WIDTH ? left : WIDTH : 0;
    const byte* const group = data + row * data_stride + tile * WIDTH;
    const int ahead = static_cast<int>(0 - reinterpret_cast<word64>(group)) & 7;
    const long long first = tile * WIDTH + ahead + member * 8;
    const byte* const from = pin_register(x + (row * x_stride + first) * SIZE_OF<INPUT>);
    byte* const to = pin_register(data + row * data_stride + first);
    byte* const scale_to = pin_register(static_cast<byte*>(scales) +
                                        (row * scale_row_stride + tile * scale_col_stride) * SCALE_BYTES<SCALE_FORMAT>);
    const Bounds bounds = {x, x + ((rows - 1) * x_stride + cols) * SIZE_OF<INPUT>};
    // How many elements of vector v, from its first on, are of the group; and which of the vector before the first one.
    const int rest = width - ahead - static_cast<int>(member) * 8;
    const auto count_of = [&](int v) {
        const int count = rest - v * (TEAM * 8);
        return count < 8 ? count : 8;
    };
    const Slice head = {8 - ahead, 8 - (member != 0 ? ahead : ahead > width ? ahead - width : 0)};
    // Whether this thread can load all its vectors as whole 16-byte words, within the bounds.
    const byte* const begin = head.any() ? from - BYTES : from;
    const int span = (count_of(VECTORS - 1) > 0 ? VECTORS - 1 : (rest - 1) / (TEAM * 8)) * (TEAM * BYTES) + BYTES;
    const bool simple = pin_register(off_of(from) == 0 && begin >= bounds.begin && from + span <= bounds.end) != 0;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (count_of(v) <= 0) continue;
        prefetch_to_l2(to + v * (TEAM * 8));
        if (reads) prefetch_to_l2(from + v * (TEAM * BYTES));
    }
    grid_dependency_wait();

    Vec8<INPUT> vecs[VECTORS], head_vec = empty_vec8<INPUT>();
    const auto load = [&](auto load_one) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) {
            vecs[v] = empty_vec8<INPUT>();
            if (reads && count_of(v) > 0) vecs[v] = load_one(from + v * (TEAM * BYTES), Slice{0, count_of(v)});
        }
        if (reads && head.any()) head_vec = load_one(from - BYTES, head);
    };
    if (simple) load([](const byte* p, const Slice&) { return load_vec8<INPUT, 16>(p); });
    else load([&](const byte* p, const Slice& slice) { return load_slice<INPUT>(p, slice, bounds); });

    AbsMax<INPUT> largest;
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (count_of(v) < 8) cut<INPUT>(vecs[v], {0, count_of(v)});
        largest.update(vecs[v]);
    }
    if (head.any()) {
        if (__builtin_expect(head.end < 8, 0)) cut<INPUT>(head_vec, head);
        else cut_before<INPUT>(head_vec, head.begin);
        largest.update(head_vec);
    }
    unsigned amax_bits;
    if constexpr (WARP_MAX_IS_FAST && 2 * TEAM >= WARP) amax_bits = wide_team_max<TEAM>(largest.bits());
    else amax_bits = team_max<TEAM>(largest.bits());
    Divisor divisor;
    const bool quick = ordinary_divisor<FORMAT, MODE, SCALE_FORMAT>(float_of(amax_bits), eps, divisor);
    if (__builtin_expect(!quick, 0))
        divisor.scale = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits, 0.0f, eps));
    if (member == 0 && width > 0) store_scale<SCALE_FORMAT>(scale_to, 0, reads ? divisor.scale : 1.0f);

    const bool heads = !warp_all(!head.any());
    Vector8 codes[VECTORS], head_codes = {0, 0};
    const auto encode = [&](auto encode_one) {
#pragma unroll
        for (int v = 0; v < VECTORS; ++v) codes[v] = encode_one(vecs[v]);
        if (heads) head_codes = encode_one(head_vec);
    };
    if (__builtin_expect(quick, 1))
        encode([&](const Vec8<INPUT>& vec) { return encode_vec8_by<INPUT, FORMAT, MODE, false>(vec, divisor); });
    else encode([&](const Vec8<INPUT>& vec) { return encode_vec8_by<INPUT, FORMAT, MODE, true>(vec, divisor); });
#pragma unroll
    for (int v = 0; v < VECTORS; ++v) {
        if (count_of(v) > 0) store_first(to + v * (TEAM * 8), codes[v], count_of(v));
    }
    if (head.any() && head.end == 8) store_last(to - 8, head_codes, ahead);
    else if (head.any()) store_slice(to - 8, head_codes, head);
}
