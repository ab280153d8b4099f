// Which tiles of a result a block makes, and in which order.
#pragma once

DEVICE int least(int x, int y) { return x < y ? x : y; }

// The first row and the first column of a tile.
struct TileOrigin {
    int row, column;
};

// Dense: a block for every tile, those of the same columns after each other.
template <int rows, int columns>
DEVICE TileOrigin dense_tile(int row_tiles) {
    return {int(block_x() % row_tiles) * rows, int(block_x() / row_tiles) * columns};
}

// Persistent: a block takes every grid_x()-th tile. `abreast` tiles of rows come before the next columns, so that the
// tiles that are computed at a time share rows and columns in L2. The last rows' tiles begin where they end with the
// last row, or up to 3 later, at a multiple of 4: rows that two tiles have get equal bits from both, and TMA is spared
// rows outside of a tensor, which it takes longer to fill with zeros than to load. Not so if tiles are to be `apart`, as
// what is added to a result is to be added once.
//
// A cluster of blocks has tiles of the same columns. Where the result has no more rows for one of them, it makes the
// last rows' tile once more, to the same bits.
template <int rows, int columns, int abreast, bool apart = false, int cluster = 1>
struct PersistentTiles {
    static_assert(cluster == 1 || !apart, "a cluster makes some tiles twice");
    int down, across, last_row, at;  // down and at in clusters

    DEVICE PersistentTiles(int m, int n)
        : down((m + cluster * rows - 1) / (cluster * rows)),
          across((n + columns - 1) / columns),
          last_row(m > rows ? (apart ? m : (m - rows + 3) & ~3) : 0),
          at((int)block_x() / cluster) {}
    DEVICE bool more() const { return at < down * across; }
    DEVICE void next() { at += (int)grid_x() / cluster; }
    // How many are left.
    DEVICE int count() const {
        const int step = (int)grid_x() / cluster;
        return (down * across - at + step - 1) / step;
    }
    // This block's place in a cluster.
    DEVICE static int rank() { return (int)block_x() % cluster; }
    DEVICE TileOrigin origin() const {
        constexpr int together = abreast / cluster;
        const int first = at / (together * across) * together;
        const int high = least(together, down - first), within = at - first * across;
        return {least(((first + within % high) * cluster + rank()) * rows, last_row), within / high * columns};
    }
};

// Split k, persistent: `ranks` consecutive blocks share a tile, each a part of its k-blocks, and take every
// (grid_x() / ranks)-th tile. The iterator gives a block's k-blocks in the order in which they pass through its rings.
struct KBlockIterator {
    int tile, k_block, left;                   // the position
    int first_k_block, k_blocks, tiles, step;  // the block's part of k; all tiles; from one of its tiles to the next

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
