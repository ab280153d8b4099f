"""How quantize_tile and quantize_anywhere divide work: which part of a matrix a team takes, and which a thread.

The sweeps behind the numbers are in docs/quantize.md.
"""

from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div, power_of_two
from fp8core.problem import PER_TOKEN, Quantize

OCTET: Final = 8
"""The elements that a thread loads, holds and encodes at a time."""
TEAM_BLOCK: Final = 256
"""Threads of a block of several teams, at most."""
ANYWHERE_BLOCK: Final = 128
"""Threads of a block of several teams where rows begin anywhere."""
TEAMS_X: Final = 4
"""Teams side by side, of a block with many rows of groups: 8 groups, 1,024 columns of 128."""
WARP_TEAM: Final = 32
WARP_TEAM_VECTORS: Final = 4
"""Up to 1,024 elements a tile belongs to part of a warp: no barrier."""
STATIC_OCTETS: Final = 512
"""A given scale needs no whole row in one block: pieces of 4,096 columns."""
MOST_THREADS: Final = 1024
FEW_ROWS: Final = 16
FEW: Final = 1 << 21
"""Elements up to which more threads with less each are faster: not all of the device is busy."""
MANY_ROWS: Final = 1 << 62
SHARED_ROWS: Final = 64
"""Up to so many tokens, if they are more than `FEW_ROWS`, each is shared by the blocks of a cluster."""
SHARED_THREADS: Final = 128
"""Of such a block: with few registers it stands beside a product that still runs, and is ready when that ends."""
SHARED_OCTETS: Final = 1024
"""Of a token that two blocks share; more is for four."""


class Tile(NamedTuple):
    """What shares one scale, or with a given scale a piece of a row: its rows and its octets a row."""

    rows: int
    octets: int


class Shape(NamedTuple):
    """How a block is divided: teams of threads with a tile each, and what a thread holds of it."""

    threads: int
    team: int
    vectors: int
    """Octets of a tile that a thread holds."""
    repeat: int
    """Tiles of a team, one after another along the columns."""
    teams_x: int
    """Teams side by side; the others stand below them."""
    blocks: int = 1
    """Of a cluster that is one team."""


def anywhere(problem: Quantize) -> bool:
    """Return whether rows may begin at any element: then the octets at both ends of a tile's row are partly its."""
    return problem.alignment < OCTET


def octets_of(problem: Quantize, tile: Tile) -> int:
    """Return the octets that hold a tile, with those at the ends of several rows that begin anywhere."""
    return tile.rows * (tile.octets + (2 if anywhere(problem) and tile.rows > 1 else 0))


def most_vectors(problem: Quantize) -> int:
    """Return how many octets a thread of the largest block (1,024, so 64 registers each) holds without spilling."""
    most = 4 if problem.x == "float32" else 8
    return most * 3 // 4 if anywhere(problem) else most


def tile_of(problem: Quantize, rows: int = MANY_ROWS) -> Tile:
    """Return the tile of ``problem`` of up to ``rows`` rows: a group, and of a row as much as there is."""
    group = problem.group_shape
    row = max(problem.cols // OCTET if anywhere(problem) else ceil_div(problem.cols, OCTET), 1)
    if problem.static and anywhere(problem) and group.cols > 0:
        return Tile(1, group.cols // OCTET)
    if problem.static:
        return Tile(1, ceil_div(row, ceil_div(row, STATIC_OCTETS)))
    height = min(group.rows, FEW_ROWS) if rows <= FEW_ROWS else group.rows
    return Tile(height, row if group.cols < 0 else group.cols // OCTET)


def shape_of(problem: Quantize, tile: Tile, rows: int = MANY_ROWS) -> Shape:
    """Return the block for ``tile`` where there are up to ``rows`` rows, as sweeps on an H200 have it."""
    octets, few = octets_of(problem, tile), rows * problem.cols <= FEW
    if anywhere(problem):
        return _anywhere(problem, octets)
    shared = shared_shape(problem, octets) if rows == SHARED_ROWS else None
    if shared:
        return shared
    each = 1 if few else WARP_TEAM_VECTORS
    if octets <= WARP_TEAM * each:
        return _teams(problem, tile, octets, min(each, 2), few)
    if few and (tile.rows == 1 or rows <= FEW_ROWS):
        slim = tile.rows > 1 or (rows > FEW_ROWS and octets > 512)
        vectors = max(1 if slim else 2, ceil_div(octets, MOST_THREADS))
    elif tile.rows > 1:
        vectors = 8
    else:
        vectors = 2 if octets <= 512 else 4 if octets <= 2048 else 8
    return _block(problem, octets, vectors)


def _anywhere(problem: Quantize, octets: int) -> Shape:
    """Return the block for rows that begin anywhere: a thread holds so many octets that their ends cost little."""
    if octets <= WARP_TEAM * WARP_TEAM_VECTORS:
        team = min(power_of_two(ceil_div(octets, WARP_TEAM_VECTORS)), WARP_TEAM)
        return Shape(ANYWHERE_BLOCK, team, ceil_div(octets, team), 1, 1)
    vectors = 2 if problem.static else 3 if octets <= 3072 else 6
    return _block(problem, octets, max(vectors, ceil_div(octets, MOST_THREADS)))


def _block(problem: Quantize, octets: int, vectors: int) -> Shape:
    """Return a block for a tile of ``octets``, up to ``vectors`` of them a thread."""
    step = problem.target.warp
    vectors = min(vectors, most_vectors(problem))
    threads = ceil_div(octets, vectors * step) * step
    return Shape(threads, threads, vectors, 1, 1)


def shared_shape(problem: Quantize, octets: int) -> Shape | None:
    """Return the blocks of a cluster that share a token, on the device where it was measured, if that is worth it."""
    tokens = problem.group_shape == PER_TOKEN and not problem.static
    if problem.target[:2] != ("cuda", 90) or not tokens or octets <= WARP_TEAM * WARP_TEAM_VECTORS:
        return None
    blocks = 2 if octets <= SHARED_OCTETS else 4
    vectors = ceil_div(octets, SHARED_THREADS * blocks)
    if vectors > most_vectors(problem):
        return None
    threads = ceil_div(ceil_div(octets, vectors * blocks), problem.target.warp) * problem.target.warp
    return Shape(threads, threads * blocks, vectors, 1, 1, blocks)


def _teams(problem: Quantize, tile: Tile, octets: int, each: int, few: bool) -> Shape:
    """Return blocks of teams, each of them a part of a warp, whose threads hold up to ``each`` octets if they can."""
    team = min(power_of_two(ceil_div(octets, each)), WARP_TEAM)
    vectors, tiles = ceil_div(octets, team), max(ceil_div(problem.cols, tile.octets * OCTET), 1)
    if few or tiles == 1:
        # As many teams side by side as cover the row by equal blocks.
        most = TEAM_BLOCK // team
        teams_x = ceil_div(tiles, ceil_div(tiles, most))
        return Shape(most // teams_x * teams_x * team, team, vectors, 1, teams_x)
    return Shape(TEAM_BLOCK // 2, team, vectors, 2, min(TEAMS_X, ceil_div(tiles, 2)))


def row_bounds(problem: Quantize) -> tuple[int, ...]:
    """Return, in ascending order, up to how many rows kernels have shapes of their own."""
    return tuple(sorted({FEW_ROWS, SHARED_ROWS, FEW // max(problem.cols, 1), MANY_ROWS}))


def fits(problem: Quantize) -> bool:
    """Return whether the registers of a block hold a tile."""
    return octets_of(problem, tile_of(problem)) <= MOST_THREADS * most_vectors(problem)
