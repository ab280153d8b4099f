// Tile schedulers: which tiles of a result a block makes, and in which order.
#pragma once

DEVICE int min_int(int x, int y) { return x < y ? x : y; }

// The first row and the first column of a tile.
struct TileOrigin {
    int row, column;
};

// Dense: one block per tile; the tiles of the same columns follow each other.
template <int rows, int columns>
DEVICE TileOrigin dense_tile(int row_tiles) {
    return {int(block_x() % row_tiles) * rows, int(block_x() / row_tiles) * columns};
}

// Persistent: a block takes every grid_x()-th tile. `row_group` tiles of rows come before the next columns, so that
// concurrent tiles share rows and columns in L2. The tiles of the last rows are moved up, to the first multiple of 4
// from which they reach to the last row or up to 3 rows past it. Rows that two tiles have get equal bits from both, and
// TMA need not fill rows outside of the tensor with zeros, which takes longer than loading them. Tiles that must stay
// `disjoint`, because each result may be added to only once, are not moved.
//
// The blocks of a cluster have tiles of the same columns. A block for which there are no more rows makes the last rows'
// tile once more, to the same bits. Or `split` consecutive blocks have the same tile.
template <int rows, int columns, int row_group, bool disjoint = false, int cluster = 1, int split = 1>
struct PersistentTiles {
    static constexpr int together = cluster * split;  // consecutive blocks
    static_assert(cluster == 1 || !disjoint, "a cluster makes some tiles twice");
    int row_clusters, column_tiles, last_row, at;  // at counts clusters, too

    DEVICE PersistentTiles(int m, int n)
        : row_clusters((m + cluster * rows - 1) / (cluster * rows)),
          column_tiles((n + columns - 1) / columns),
          last_row(m > rows ? (disjoint ? m : (m - rows + 3) & ~3) : 0),
          at((int)block_x() / together) {}
    DEVICE bool more() const { return at < row_clusters * column_tiles; }
    DEVICE void next() { at += (int)grid_x() / together; }
    // How many tiles this block has left.
    DEVICE int count() const {
        const int step = (int)grid_x() / together;
        return (row_clusters * column_tiles - at + step - 1) / step;
    }
    // This block's rank in its cluster.
    DEVICE static int rank() { return (int)block_x() % cluster; }
    DEVICE TileOrigin origin() const {
        constexpr int group = row_group / cluster;
        const int first = at / (group * column_tiles) * group;
        const int height = min_int(group, row_clusters - first), within = at - first * column_tiles;
        return {min_int(((first + within % height) * cluster + rank()) * rows, last_row), within / height * columns};
    }
};

// A block's part of the k-blocks of its tiles, of which `ranks` consecutive blocks have a part each.
struct KPart {
    int first, count;

    DEVICE KPart(int all, int rank, int ranks) : first(all * rank / ranks), count(all * (rank + 1) / ranks - first) {}
};

// Split k, persistent: `ranks` consecutive blocks share a tile, each with a part of its k-blocks, and take every
// (grid_x() / ranks)-th tile. The iterator gives a block's k-blocks in the order in which they pass through its rings.
struct KBlockIterator {
    KPart part;
    int tile, k_block, left;  // the position
    int tiles, step;          // all tiles; the step between the block's tiles

    DEVICE KBlockIterator(int all_tiles, int all_k_blocks, int rank, int ranks) : part(all_k_blocks, rank, ranks) {
        tiles = all_tiles;
        step = (int)grid_x() / ranks;
        tile = (int)block_x() / ranks;
        begin();
    }
    DEVICE void begin() {
        left = part.count;
        k_block = part.first;
    }
    DEVICE bool more() const { return tile < tiles; }
    DEVICE void next() {
        ++k_block;
        if (--left == 0) {
            tile += step;
            begin();
        }
    }
};
