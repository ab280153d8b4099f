// Tile schedulers: which tiles of a result a block makes, and in which order.
#pragma once

DEVICE int least(int x, int y) { return x < y ? x : y; }

// The first row and the first column of a tile.
struct TileOrigin {
    int row, column;
};

// Dense: one block per tile; the tiles of the same columns follow each other.
template <int rows, int columns>
DEVICE TileOrigin dense_tile(int row_tiles) {
    return {int(block_x() % row_tiles) * rows, int(block_x() / row_tiles) * columns};
}

// Persistent: a block takes every grid_x()-th tile. `abreast` tiles of rows come before the next columns, so that
// concurrent tiles share rows and columns in L2. The tiles of the last rows are moved up, to the first multiple of 4
// from which they reach to the last row or up to 3 rows past it. Rows that two tiles have get equal bits from both, and
// TMA need not fill rows outside of the tensor with zeros, which takes longer than loading them. Tiles that must stay
// `apart`, because each result may be added to only once, are not moved.
//
// The blocks of a cluster have tiles of the same columns. A block for which there are no more rows makes the last rows'
// tile once more, to the same bits.
template <int rows, int columns, int abreast, bool apart = false, int cluster = 1>
struct PersistentTiles {
    static_assert(cluster == 1 || !apart, "a cluster makes some tiles twice");
    int down, across, last_row, at;  // down and at count clusters

    DEVICE PersistentTiles(int m, int n)
        : down((m + cluster * rows - 1) / (cluster * rows)),
          across((n + columns - 1) / columns),
          last_row(m > rows ? (apart ? m : (m - rows + 3) & ~3) : 0),
          at((int)block_x() / cluster) {}
    DEVICE bool more() const { return at < down * across; }
    DEVICE void next() { at += (int)grid_x() / cluster; }
    // How many tiles this block has left.
    DEVICE int count() const {
        const int step = (int)grid_x() / cluster;
        return (down * across - at + step - 1) / step;
    }
    // This block's rank in its cluster.
    DEVICE static int rank() { return (int)block_x() % cluster; }
    DEVICE TileOrigin origin() const {
        constexpr int together = abreast / cluster;
        const int first = at / (together * across) * together;
        const int high = least(together, down - first), within = at - first * across;
        return {least(((first + within % high) * cluster + rank()) * rows, last_row), within / high * columns};
    }
};

// Split k, persistent: `ranks` consecutive blocks share a tile, each with a part of its k-blocks, and take every
// (grid_x() / ranks)-th tile. The iterator gives a block's k-blocks in the order in which they pass through its rings.
struct KBlockIterator {
    int tile, k_block, left;                   // the position
    int first_k_block, k_blocks, tiles, step;  // the block's part of k; all tiles; the step between its tiles

    DEVICE KBlockIterator(int all_tiles, int all_k_blocks, int rank, int ranks) {
        first_k_block = all_k_blocks * rank / ranks;
        k_blocks = all_k_blocks * (rank + 1) / ranks - first_k_block;
        tiles = all_tiles;
        step = (int)grid_x() / ranks;
        tile = (int)block_x() / ranks;
        begin();
    }
    DEVICE void begin() {
        left = k_blocks;
        k_block = first_k_block;
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
