// The end of a product whose warps divide k: it adds their sums of a tile, [WARPS][ROWS][PITCH] in shared memory.
#pragma once
#include "scheduler.cuh"

// Calls end(acc, row, column) for each result of the tile at `origin` that is inside an [m, n] matrix; acc adds the
// warps' sums in their order. The threads of a block divide the results among them.
template <int WARPS, int ROWS, int COLUMNS, int PITCH, class End>
DEVICE void for_each_sum(const float* sums, TileOrigin origin, int m, int n, End end) {
    for (int i = int(thread_x()); i < ROWS * COLUMNS; i += WARPS * WARP) {
        const int row = i / COLUMNS, col = i % COLUMNS;
        const long long y = origin.row + row, x = origin.column + col;
        if (y >= m) break;
        if (x >= n) continue;
        float acc = sums[row * PITCH + col];
#pragma unroll
        for (int from = 1; from < WARPS; ++from) acc += sums[(from * ROWS + row) * PITCH + col];
        end(acc, y, x);
    }
}
