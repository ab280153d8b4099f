"""Launch configurations of quantization: the division of rows among teams of threads, and of a tensor among blocks.

experiments/2026-11-quantize has the sweeps and measurements for the numbers.
"""

from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div, power_of_two, round_up
from fp8core.problem import PER_TOKEN, Quantize

VEC8: Final = 8
"""Elements that a thread loads, holds and encodes at a time."""
TEAMS_THREADS: Final = 256
"""The most threads of a block of several teams."""
UNALIGNED_THREADS: Final = 128
"""Threads of a block of several teams if rows begin at any element."""
SMALL: Final = 1 << 19
"""Elements up to which half as many threads are faster, for groups of a power of two."""
TEAMS_X: Final = 4
"""Teams side by side in a block, with many rows of groups: 8 groups, or 1,024 columns with groups of 128."""
WARP_TEAM: Final = 32
WARP_TEAM_VECS: Final = 4
"""A tile of up to 1,024 elements belongs to a warp or a part of one, which needs no barrier."""
STATIC_VECS: Final = 512
"""With a given scale a block need not have whole rows: it gets pieces of 4,096 columns."""
MOST_THREADS: Final = 1024
FEW_ROWS: Final = 16
FEW: Final = 1 << 21
"""Elements up to which more threads with less work each are faster, as a part of the device is idle."""
MANY_ROWS: Final = 1 << 62
SHARED_ROWS: Final = 64
"""Up to so many tokens, but more than `FEW_ROWS`, the blocks of a cluster share each token."""
SHARED_THREADS: Final = 128
"""Threads of such a block: so few registers let it be co-resident with a running product, and ready when that ends."""
SHARED_VECS: Final = 1024
"""The most vectors of a token that two blocks share; four share a longer one."""
LONG_VECS: Final = 2048
"""Vectors of a token beyond which blocks share it with up to `FEW_ROWS` rows, too. A block of `MOST_THREADS` would have
to wait until a product has left a whole multiprocessor."""
LONG_CLUSTERS: Final = (4, SHARED_THREADS), (8, SHARED_THREADS)
"""Blocks that share a long token, and their threads; the first that hold it are used
(experiments/2026-11-results-in-l2)."""


class Tile(NamedTuple):
    """Elements with one scale, or with a given scale a piece of a row: rows, and vectors of 8 per row."""

    rows: int
    vecs: int


class RowwiseConfig(NamedTuple):
    """The division of a block into teams of threads, with a tile each, and a thread's part of the tile."""

    threads: int
    team: int
    vecs: int
    """Vectors of 8 of a tile that a thread holds."""
    repeat: int
    """Tiles of a team, one after another along the columns."""
    teams_x: int
    """Teams side by side; the others are below them."""
    blocks: int = 1
    """Blocks of a cluster that is one team."""


def unaligned(problem: Quantize) -> bool:
    """Return whether rows may begin at any element: then the vectors at both ends of a row are only partly its own."""
    return problem.alignment < VEC8


def vecs_of(problem: Quantize, tile: Tile) -> int:
    """Return the vectors of 8 of a tile, including those at the ends of its rows if several begin at any element."""
    return tile.rows * (tile.vecs + (2 if unaligned(problem) and tile.rows > 1 else 0))


def most_vecs(problem: Quantize) -> int:
    """Return how many vectors a thread of the largest block (1,024 threads of 64 registers) holds without spills."""
    most = 4 if problem.x == "float32" else 8
    return most * 3 // 4 if unaligned(problem) else most


def tile_of(problem: Quantize, rows: int = MANY_ROWS) -> Tile:
    """Return the tile of ``problem`` with up to ``rows`` rows: a group, or as much of a row as there is."""
    group = problem.group_shape
    row = max(problem.cols // VEC8 if unaligned(problem) else ceil_div(problem.cols, VEC8), 1)
    if problem.static and unaligned(problem) and group.cols > 0:
        return Tile(1, group.cols // VEC8)
    if problem.static:
        return Tile(1, ceil_div(row, ceil_div(row, STATIC_VECS)))
    height = min(group.rows, FEW_ROWS) if rows <= FEW_ROWS else group.rows
    return Tile(height, row if group.cols < 0 else group.cols // VEC8)


def has_groups(problem: Quantize) -> bool:
    """Return whether scales are found for parts of rows."""
    return not problem.static and problem.group_shape.rows == 1 and problem.group_shape.cols > 0


def few(problem: Quantize, rows: int) -> bool:
    """Return whether up to ``rows`` rows leave a part of the device idle, so that latencies count."""
    return rows * problem.cols <= FEW


def rowwise_config(problem: Quantize, tile: Tile, rows: int = MANY_ROWS) -> RowwiseConfig:
    """Return the block for ``tile`` with up to ``rows`` rows, according to sweeps on an H200."""
    total, idle = vecs_of(problem, tile), few(problem, rows)
    if unaligned(problem):
        return _unaligned(problem, tile, total, rows)
    shared = cluster_config(problem, total, rows) if rows == SHARED_ROWS or total > LONG_VECS else None
    if shared:
        return shared
    each = 1 if idle else WARP_TEAM_VECS
    if total <= WARP_TEAM * each:
        return _teams(problem, tile, total, min(each, 2), idle)
    if idle and (tile.rows == 1 or rows <= FEW_ROWS):
        slim = tile.rows > 1 or (rows > FEW_ROWS and total > 512)
        vecs = max(1 if slim else 2, ceil_div(total, MOST_THREADS))
    elif tile.rows > 1:
        vecs = 8
    else:
        vecs = 2 if total <= 512 else 4 if total <= 2048 else 8
    return _block(problem, total, vecs)


def _unaligned(problem: Quantize, tile: Tile, total: int, rows: int) -> RowwiseConfig:
    """Return the block for rows that begin at any element: a thread holds enough vectors that ends cost little.

    With few rows, which have few ends, it holds one if that was measured to be faster.
    """
    narrow = total <= WARP_TEAM * WARP_TEAM_VECS
    slim = narrow or (problem.static and rows <= FEW_ROWS and ITEMSIZE[problem.x] == 2)
    if slim and tile.rows == 1 and total > WARP_TEAM and few(problem, rows):
        return _block(problem, total, max(1, ceil_div(total, MOST_THREADS)))
    if narrow:
        whole = has_groups(problem) and total == power_of_two(total)
        early = few(problem, rows) and (whole or (has_groups(problem) and rows <= FEW_ROWS))
        team = min(power_of_two(ceil_div(total, 1 if early else WARP_TEAM_VECS)), WARP_TEAM)
        threads = UNALIGNED_THREADS // (2 if whole and rows * problem.cols <= SMALL else 1)
        return RowwiseConfig(threads, team, ceil_div(total, team), 1, 1)
    vecs = 2 if problem.static else 3 if total <= 3072 else 6
    return _block(problem, total, max(vecs, ceil_div(total, MOST_THREADS)))


def _block(problem: Quantize, total: int, vecs: int) -> RowwiseConfig:
    """Return a block for a tile of ``total`` vectors of 8, with up to ``vecs`` of them per thread."""
    vecs = min(vecs, most_vecs(problem))
    threads = round_up(ceil_div(total, vecs), problem.target.warp)
    return RowwiseConfig(threads, threads, vecs, 1, 1)


def cluster_config(problem: Quantize, total: int, rows: int) -> RowwiseConfig | None:
    """Return the blocks of a cluster that share a token, if that is faster, on the architecture that was measured."""
    tokens = problem.group_shape == PER_TOKEN and not problem.static
    if problem.target[:2] != ("cuda", 90) or not tokens or total <= WARP_TEAM * WARP_TEAM_VECS or rows > SHARED_ROWS:
        return None
    shapes: tuple[tuple[int, int], ...] = ((2 if total <= SHARED_VECS else 4, SHARED_THREADS),)
    if total > LONG_VECS:
        shapes = LONG_CLUSTERS if rows <= FEW_ROWS else ((2, 2 * SHARED_THREADS), *LONG_CLUSTERS)
    for blocks, most in shapes:
        vecs = ceil_div(total, most * blocks)
        if vecs <= most_vecs(problem):
            threads = round_up(ceil_div(total, vecs * blocks), problem.target.warp)
            return RowwiseConfig(threads, threads * blocks, vecs, 1, 1, blocks)
    return None


def _teams(problem: Quantize, tile: Tile, total: int, each: int, idle: bool) -> RowwiseConfig:
    """Return blocks of teams, each a warp or a part of one, whose threads hold up to ``each`` vectors if possible."""
    team = min(power_of_two(ceil_div(total, each)), WARP_TEAM)
    vecs, tiles = ceil_div(total, team), max(ceil_div(problem.cols, tile.vecs * VEC8), 1)
    if idle or tiles == 1:
        # As many teams side by side as divide the row among equal blocks.
        most = TEAMS_THREADS // team
        teams_x = ceil_div(tiles, ceil_div(tiles, most))
        return RowwiseConfig(most // teams_x * teams_x * team, team, vecs, 1, teams_x)
    return RowwiseConfig(TEAMS_THREADS // 2, team, vecs, 2, min(TEAMS_X, ceil_div(tiles, 2)))


def row_bounds(problem: Quantize) -> tuple[int, ...]:
    """Return the numbers of rows, in ascending order, up to which kernels have configurations of their own."""
    cols = max(problem.cols, 1)
    small = {SMALL // cols} if unaligned(problem) and has_groups(problem) else set()
    return tuple(sorted({FEW_ROWS, SHARED_ROWS, FEW // cols, MANY_ROWS} | small))


def fits(problem: Quantize) -> bool:
    """Return whether the registers of a block hold a tile."""
    return vecs_of(problem, tile_of(problem)) <= MOST_THREADS * most_vecs(problem)


# ---- one scale for a whole tensor: the blocks that find it, and what they keep until it is found ----------


class TensorwiseConfig(NamedTuple):
    """Blocks that find one scale together, and the vectors of 8 that each of their threads keeps until then."""

    cluster: int
    """1: one block; more: the blocks of one cluster; 0: a resident grid, one block on every multiprocessor."""
    threads: int
    register_vecs: int
    """Vectors in registers."""
    shared_vecs: int = 0
    """Vectors in shared memory."""
    chunk: int = 1
    """Vectors in flight per thread, of those that it does not keep in registers."""
    whole: bool = True
    """Whether all vectors are kept, so that nothing is read again."""


TENSOR_THREADS: Final = 1024
SMALL_CONFIGS: Final = (
    TensorwiseConfig(1, 256, 2),
    TensorwiseConfig(8, 128, 1),
    TensorwiseConfig(8, 256, 1),
    TensorwiseConfig(1, 512, 4),
    TensorwiseConfig(8, 256, 2),
    TensorwiseConfig(8, 512, 2),
    TensorwiseConfig(8, 512, 4),
)
"""Configurations for matrices of up to 131,072 elements, in ascending order: faster than a grid that reduces through
memory."""
STATIC_SHARED_BYTES: Final = 1024
"""More than the static shared memory of the kernel."""
L1_BYTES: Final = 32 << 10
"""Bytes left to L1, which shares them with shared memory: with less, fewer loads are in flight (2 % of a large matrix).
"""
MULTIPROCESSOR_SHARED_BYTES: Final = {0x90A: 65_536, 0x942: 65_536, 0x950: 163_840}
"""For HIP targets; on CUDA a block can have all of a multiprocessor's shared memory but 1 KB."""


def shared_vecs(problem: Quantize) -> int:
    """Return how many vectors of 8 a thread of the resident grid can keep in shared memory."""
    target = problem.target
    cache = L1_BYTES if target.platform == "cuda" and target.shared_bytes > 128 << 10 else 0
    return (target.shared_bytes - STATIC_SHARED_BYTES - cache) // (TENSOR_THREADS * VEC8 * ITEMSIZE[problem.x])


def resident_config(problem: Quantize, flat: bool, whole: bool) -> TensorwiseConfig:
    """Return the resident grid: 64 registers limit what a thread keeps, and addresses of rows with gaps need some."""
    vec8_bytes = VEC8 * ITEMSIZE[problem.x]
    kept_bytes, chunk_bytes = (64, 32) if whole or not flat else (96, 64)
    return TensorwiseConfig(
        0, TENSOR_THREADS, kept_bytes // vec8_bytes, shared_vecs(problem), chunk_bytes // vec8_bytes, whole
    )


def tensorwise_configs(problem: Quantize, flat: bool) -> tuple[tuple[int, ...], tuple[TensorwiseConfig, ...]]:
    """Return the configurations for matrices of all sizes, and how many vectors each but the last one keeps."""
    target = problem.target
    clusters = target.platform == "cuda" and target.arch >= 90
    small = tuple(config for config in SMALL_CONFIGS if config.cluster == 1 or clusters)
    grid = resident_config(problem, flat, True)
    blocks = [config.cluster or target.multiprocessors for config in (*small, grid)]
    keeps = tuple(
        n * c.threads * (c.register_vecs + c.shared_vecs) for n, c in zip(blocks, (*small, grid), strict=True)
    )
    return keeps, (*small, grid, resident_config(problem, flat, False))


def one_block_a_multiprocessor(problem: Quantize) -> bool:
    """Return whether every block of the resident grid is certain to have a multiprocessor to itself."""
    target = problem.target
    whole = MULTIPROCESSOR_SHARED_BYTES.get(target.arch) if target.platform == "hip" else target.shared_bytes
    block_bytes = shared_vecs(problem) * TENSOR_THREADS * VEC8 * ITEMSIZE[problem.x]
    return whole is not None and 2 * block_bytes > whole and target.multiprocessors <= TENSOR_THREADS
