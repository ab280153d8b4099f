// The tiles of a grouped product: consecutive rows of a and out belong to groups, each with a weight of its own, and no
// tile has rows of two groups. Where the groups end is read from memory, so only the device knows how many tiles there
// are.
#pragma once
#include "epilogue.cuh"
#include "scheduler.cuh"
#include "../common/scan.cuh"

// The parameters of a grouped product: GroupArgs of fp8core/kernels/grouped/args.py. The rows of group i end before
// offs[i]; strides are in elements, from group to group.
#define GROUP_PARAMETERS \
    const int *offs, int groups, long long weight_stride, long long scale_stride, long long bias_stride

// A tile of a group, whose first row is `begin`. The rows from `end` on are of the next group, or of the next tile.
struct GroupTile : TileOrigin {
    int begin, end, group;
};

// The bias from an element on; null if there is none.
template <int bias_type>
DEVICE const void* bias_from(const void* bias, long long element) {
    return static_cast<const byte*>(bias) + (bias_type < 0 ? 0 : bias_type == FLOAT32 ? 4 : 2) * element;
}

// In shared memory: the first row and the first tile of each group; after the last group, the ends of both.
template <int capacity>
struct GroupTable {
    int first_row[capacity + 1], first_tile[capacity + 1];
};

// Called by one warp: fills the table for tiles of `rows` rows, `column_tiles` side by side. An end beyond the last
// row counts as the last row, one before an earlier end as that end: such groups are empty, and no two share a row. The
// first tile of a group begins at a multiple of `multiple` rows, at or before the group's first row.
template <int rows, int multiple, int capacity>
DEVICE void find_groups(GroupTable<capacity>& table, const int* offs, int groups, int m, int column_tiles) {
    constexpr int each = capacity / WARP;  // consecutive groups of a lane
    const int first = (int)lane() * each;
    int ends[each], last = 0;
#pragma unroll
    for (int i = 0; i < each; ++i) ends[i] = first + i < groups ? offs[first + i] : 0;
#pragma unroll
    for (int i = 0; i < each; ++i) ends[i] = last = max_int(last, min_int(ends[i], m));
    const int before = scan_warp_before(last, max_int);
    const auto tiles_of = [&](int start, int end) {
        return end == start ? 0 : (end - start / multiple * multiple + rows - 1) / rows * column_tiles;
    };
    int tiles = 0;
#pragma unroll
    for (int i = 0, start = before; i < each; start = ends[i++]) {
        ends[i] = max_int(ends[i], before);
        tiles += tiles_of(start, ends[i]);
    }
    int tile = scan_warp_before(tiles, sum_int);
#pragma unroll
    for (int i = 0, start = before; i < each; start = ends[i++]) {
        table.first_row[first + i] = start;
        table.first_tile[first + i] = tile;
        tile += tiles_of(start, ends[i]);
    }
    if ((int)lane() == WARP - 1) {
        table.first_row[capacity] = ends[each - 1];
        table.first_tile[capacity] = tile;
    }
}

// A block takes every grid_x()-th tile, as `PersistentTiles` does, group by group. Within a group `row_group` tiles of
// rows come before the next columns. Which of them is the first changes with every round of all blocks: the last rows
// of a group are few and take less time, and always the same blocks would have them. A cluster takes tiles of the same
// rows, side by side. Of tiles with three slices of 64 rows, those of a group have equally many, or one more: 256 rows
// are two and two, as one alone takes more than half as long as two.
template <int rows, int columns, int row_group, int capacity, int multiple = 1, int cluster = 1>
struct GroupedTiles {
    static constexpr int slices_of_tile = rows / 64;
    GroupTable<capacity>& table;
    const int* offs;
    int groups, m, n, column_tiles, at;   // column_tiles and at count clusters
    long long scale_stride, bias_stride;  // from group to group

    DEVICE GroupedTiles(GroupTable<capacity>& table, const int* offs, int groups, int m, int n, long long scale_stride,
                        long long bias_stride)
        : table(table),
          offs(offs),
          groups(groups),
          m(m),
          n(n),
          column_tiles((n + cluster * columns - 1) / (cluster * columns)),
          at((int)block_x() / cluster),
          scale_stride(scale_stride),
          bias_stride(bias_stride) {}
    // Called by one warp, before all others.
    DEVICE void find() const { find_groups<rows, multiple>(table, offs, groups, m, column_tiles); }
    DEVICE bool more() const { return at < table.first_tile[capacity]; }
    DEVICE static int clusters() { return (int)grid_x() / cluster; }
    DEVICE void next() { at += clusters(); }
    // How many tiles this block has left.
    DEVICE int count() const { return (table.first_tile[capacity] - at + clusters() - 1) / clusters(); }
    // This block's rank in its cluster.
    DEVICE static int rank() { return (int)block_x() % cluster; }
    DEVICE GroupTile origin() const {
        int group = 0;  // the last one whose first tile is not after `at`: groups before it without rows have the same
#pragma unroll
        for (int step = capacity / 2; step > 0; step /= 2)
            if (table.first_tile[group + step] <= at) group += step;
        const int start = table.first_row[group], end = table.first_row[group + 1];
        const int first_row = start / multiple * multiple, place = at - table.first_tile[group];
        // After the last tile there is a next one, too, which nobody makes: without rows.
        const int row_tiles = max_int(1, (end - first_row + rows - 1) / rows);
        const int first = place / (row_group * column_tiles) * row_group;
        const int height = max_int(1, min_int(row_group, row_tiles - first)), within = place - first * column_tiles;
        const int row = within % height, round = (at - row) / clusters(), tile = first + (row + round) % height;
        const int column = (within / height * cluster + rank()) * columns;
        if constexpr (slices_of_tile < 3) return {{first_row + tile * rows, column}, start, end, group};
        const int slices = (end - first_row + 63) / 64, each = slices / row_tiles, more = slices % row_tiles;
        const int top = first_row + (tile * each + min_int(tile, more)) * 64;
        return {{top, column}, start, min_int(end, top + (each + (tile < more)) * 64), group};
    }
};
