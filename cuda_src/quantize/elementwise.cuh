// The fallback that quantizes one element at a time: any group shape, stride and alignment.
//
// A block handles a panel of HEIGHT rows (-1: all) x WIDTH columns (0: all): whole groups side by side. It reads the
// panel once for the groups' largest magnitudes and again to encode it. With MODE STATIC a panel is any piece of x.
//
// Constants: INPUT FORMAT MODE SCALE_FORMAT THREADS HEIGHT WIDTH, and
//   GROUPS                  groups of a panel;
//   GROUP_ROWS, GROUP_COLS  of a group, -1 for all.
// The caller owes, unless MODE is STATIC: WIDTH is GROUPS * GROUP_COLS, at most THREADS or of one group, and HEIGHT is
// GROUP_ROWS. The grid is (rows_padded / HEIGHT rounded up, or 1; any number of blocks: panels are dealt round-robin).
#pragma once
constexpr int FORMAT = FP8_FORMAT, GROUPS = FP8_GROUPS, GROUP_COLS = FP8_GROUP_COLS, GROUP_ROWS = FP8_GROUP_ROWS,
              HEIGHT = FP8_HEIGHT, INPUT = FP8_INPUT, MODE = FP8_MODE, SCALE_FORMAT = FP8_SCALE_FORMAT,
              THREADS = FP8_THREADS, WIDTH = FP8_WIDTH;
#include "../common/vec8.cuh"
#include "../common/reduce.cuh"

struct Rectangle {
    long long row, past_row, col, past_col;
};
// Visits a thread's elements of a panel, `unroll` at a time: in a narrow panel every row_step-th of one column,
// otherwise every THREADS-th of each row.
template <bool narrow, int row_step, int unroll, class Action>
DEVICE void each_element(const Rectangle& part, Action action) {
    if constexpr (narrow) {
        if (part.col >= part.past_col) return;
#pragma unroll unroll
        for (long long row = part.row; row < part.past_row; row += row_step) action(row, part.col);
    } else {
        for (long long row = part.row; row < part.past_row; ++row) {
#pragma unroll unroll
            for (long long col = part.col; col < part.past_col; col += THREADS) action(row, col);
        }
    }
}

KERNEL(THREADS)
quantize_elementwise(QUANTIZE_PARAMETERS) {
    SHARED unsigned amax_bits[GROUPS];
    SHARED float group_scale[GROUPS];
    constexpr bool NARROW = WIDTH > 0 && WIDTH <= THREADS;  // a thread stays in one column
    constexpr int ROW_STEP = NARROW ? THREADS / WIDTH : 1;
    // Threads past the last whole row of a narrow panel have nothing to do: they begin past its last row.
    const int rest = NARROW ? THREADS / WIDTH * WIDTH : THREADS;
    const long long row_start = thread_x() >= rest ? rows_padded : NARROW ? thread_x() / WIDTH : 0;
    const int col_start = NARROW ? thread_x() % WIDTH : thread_x();
    const int group = GROUPS == 1 ? 0 : col_start / GROUP_COLS;
    const long long width = WIDTH > 0 ? WIDTH : cols;
    const long long height = HEIGHT < 0 ? rows_padded : HEIGHT, first_row = block_x() * height;
    const long long past_row = first_row + height < rows_padded ? first_row + height : rows_padded;

    grid_dependency_launch();
    grid_dependency_wait();

    // (Groups of all columns have scales even if there are no columns.)
    const auto has_groups = [&](long long panel) { return panel * width < cols || (WIDTH == 0 && panel == 0); };
    for (long long panel = block_y(); has_groups(panel); panel += grid_y()) {
        const long long first_col = panel * width, past_col = first_col + width < cols ? first_col + width : cols;
        const Rectangle part = {first_row + row_start, past_row, first_col + col_start, past_col};
        float upper = upper_value;
        if (MODE == TOKEN && upper_address) upper = minimum(upper, *upper_address);
        Divisor divisor = {};
        if constexpr (MODE != STATIC) {
            block_barrier();
            for (int i = thread_x(); i < GROUPS; i += THREADS) amax_bits[i] = 0;
            block_barrier();
            float amax = 0.0f;
            each_element<NARROW, ROW_STEP, 4>(part, [&](long long row, long long col) {
                if (row < rows) amax = maximum(amax, magnitude(load_element<INPUT>(x, row * x_stride + col)));
            });
            if constexpr (GROUPS == 1) {
                const unsigned largest = warp_max(bits_of(amax));
                if (lane() == 0) atomic_max(&amax_bits[0], largest);
            } else {
                if (amax > 0.0f) atomic_max(&amax_bits[group], bits_of(amax));
            }
            block_barrier();
            for (int i = thread_x(); i < GROUPS; i += THREADS) {
                group_scale[i] = rounded_scale<SCALE_FORMAT>(scale_of<MODE, FORMAT>(amax_bits[i], upper, eps));
                const bool padding = MODE != TENSOR && first_row >= rows && rows_padded > rows;
                if (GROUPS == 1 || first_col + i * GROUP_COLS < cols) {
                    const long long index = block_x() * scale_row_stride + (panel * GROUPS + i) * scale_col_stride;
                    store_scale<SCALE_FORMAT>(scales, index, padding ? 1.0f : group_scale[i]);
                }
            }
            block_barrier();
            divisor = prepared<MODE>(group_scale[group]);
        }
        each_element<NARROW, ROW_STEP, 1>(part, [&](long long row, long long col) {
            byte code = 0;
            if (row < rows) {
                const float element = load_element<INPUT>(x, row * x_stride + col);
                if constexpr (MODE == STATIC) {
                    const long long group_row = GROUP_ROWS < 0 ? 0 : row / GROUP_ROWS;
                    const long long group_col = GROUP_COLS < 0 ? 0 : col / GROUP_COLS;
                    const long long index = group_row * scale_row_stride + group_col * scale_col_stride;
                    divisor = prepared<MODE>(load_scale<SCALE_FORMAT>(scales, index));
                }
                code = encode<FORMAT>(value_of<MODE, true>(element, divisor));
            }
            data[row * data_stride + col] = code;
        });
    }
}
