// out[row, col] = round(float(q[row, col]) * scale[row / GROUP_ROWS, col / GROUP_COLS]): the product in fp32, then one
// rounding to OUT. A group of -1 spans its axis. Scales are fp32 or e8m0 bytes.
//
// A block has ACROSS x (THREADS / ACROSS) threads with VECTOR codes each, and handles DEQUANTIZE_ROWS rows per row of
// threads. Block b has column tile b % column_tiles of row tile b / column_tiles. Any number of columns.
// The caller owes: rows of q and of out aligned to VECTOR elements.
#pragma once
#include "../common/values.cuh"

constexpr int DEQUANTIZE_ROWS = 2;

template <int FORMAT, int OUT, int VECTOR, int GROUP_ROWS, int GROUP_COLS, int SCALE_FORMAT, int ACROSS, int THREADS>
DEVICE void dequantize_rows(const byte* q, long long q_stride, const void* scale, long long scale_row_stride,
                            long long scale_col_stride, void* out, long long out_stride, long long rows, int cols,
                            int column_tiles) {
    constexpr int DOWN = THREADS / ACROSS;
    constexpr int SCALES = GROUP_COLS < 0 || GROUP_COLS % VECTOR == 0 ? 1 : VECTOR;
    const int col = (int(block_x() % column_tiles) * ACROSS + int(thread_x() % ACROSS)) * VECTOR;
    const long long first = (long long)(block_x() / column_tiles) * (DOWN * DEQUANTIZE_ROWS) + thread_x() / ACROSS;
    const int valid = cols - col;
    grid_dependency_launch();
    grid_dependency_wait();
    if (valid <= 0) return;

    Codes<FORMAT, VECTOR> codes[DEQUANTIZE_ROWS];
    float scales[DEQUANTIZE_ROWS][SCALES];
#pragma unroll
    for (int i = 0; i < DEQUANTIZE_ROWS; ++i) {
        const long long row = first + i * DOWN;
        if (row >= rows) break;
        codes[i].load_from(q + row * q_stride + col, valid);
        const long long scale_row = (GROUP_ROWS < 0 ? 0 : row / (GROUP_ROWS < 0 ? 1 : GROUP_ROWS)) * scale_row_stride;
#pragma unroll
        for (int j = 0; j < SCALES; ++j) {
            const int scale_col = GROUP_COLS < 0 ? 0 : (j < valid ? col + j : col) / (GROUP_COLS < 0 ? 1 : GROUP_COLS);
            scales[i][j] = load_scale<SCALE_FORMAT>(scale, scale_row + scale_col * scale_col_stride);
        }
    }
#pragma unroll
    for (int i = 0; i < DEQUANTIZE_ROWS; ++i) {
        const long long row = first + i * DOWN;
        if (row >= rows) break;
        float values[VECTOR];
        codes[i].get(values);
#pragma unroll
        for (int j = 0; j < VECTOR; ++j) values[j] = multiply_exact(values[j], scales[i][SCALES == 1 ? 0 : j]);
        Values<OUT, VECTOR>::rounded(values).store_to(out, row * out_stride + col, valid);
    }
}

KERNEL(FP8_THREADS)
dequantize(const byte* q, long long q_stride, const void* scale, long long scale_row_stride, long long scale_col_stride,
           void* out, long long out_stride, long long rows, int cols, int column_tiles) {
    dequantize_rows<FP8_FORMAT, FP8_OUT, FP8_VECTOR, FP8_GROUP_ROWS, FP8_GROUP_COLS, FP8_SCALE_FORMAT, FP8_ACROSS,
                    FP8_THREADS>(q, q_stride, scale, scale_row_stride, scale_col_stride, out, out_stride, rows, cols,
                                 column_tiles);
}
