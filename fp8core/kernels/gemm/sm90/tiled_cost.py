"""Which tiles sm90_tiled is compiled for, and how long a product takes by each: constants fitted to an H200."""

from functools import lru_cache
from typing import Final, Literal, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K
from fp8core.problem import ITEMSIZE, ScaledMm, Target

Scales = Literal["chain", "promoted", "block", "group"]
"""Of a product: those that do not change along k, by one chain of sums over k or promoted every 128 of it; or 1x128 of
a with 128x128 ("block") or 1x128 ("group") of the weight."""


class Tile(NamedTuple):
    """A tile of the result, which a multiprocessor has at a time."""

    rows: int
    """64, 128 or 256."""
    columns: int
    """Channels."""

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    @property
    def groups(self) -> int:
        """Return how many warpgroups have a tile: each every other 64 rows of it, or all."""
        return 1 if self.rows == 64 else 2

    @property
    def m_slices(self) -> int:
        """Return how many times 64 rows each of them has."""
        return self.rows // (64 * self.groups)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a k-block of both operands."""
        return (self.rows + self.columns) * BLOCK_K

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of a result."""
        return ceil_div(m, self.rows) * ceil_div(n, self.columns)

    def waves(self, m: int, n: int, target: Target) -> int:
        """Return how many tiles the busiest multiprocessor has."""
        return ceil_div(self.tiles(m, n), target.multiprocessors)


def scales_of(problem: ScaledMm) -> Scales:
    """Return how the scales of a product enter."""
    if problem.scale_a == "group":
        return "block" if problem.scale_b == "block" else "group"
    return "chain" if problem.use_fast_accum else "promoted"


START_US: Final = 2.0
"""Of a product: from its launch to the first k-block."""
BYTES_A_US: Final = 4.2e6
"""What the memory gives, at the best."""


class Cost(NamedTuple):
    """Of a tile, in microseconds."""

    promoted: float
    """Of a k-block whose products are added in fp32; 0: the registers do not hold it."""
    promoted_end: float
    """Of such a tile, beside its k-blocks."""
    chain: float
    """Of a k-block whose products are not."""
    chain_end: float


COSTS: Final[dict[Tile, Cost]] = {
    Tile(256, 128): Cost(0.84, 1.4, 0.785, 2.0),
    Tile(128, 192): Cost(0.61, 1.3, 0.54, 2.0),
    Tile(128, 160): Cost(0.50, 1.7, 0.497, 1.6),
    Tile(128, 128): Cost(0.43, 0.3, 0.40, 0.95),
    Tile(128, 96): Cost(0.367, 0.3, 0.335, 0.6),
    Tile(128, 64): Cost(0.308, 0.3, 0.275, 0.3),
    Tile(64, 128): Cost(0.244, 0.3, 0.25, 0.3),
    Tile(64, 96): Cost(0.217, 0.3, 0.217, 0.3),
    Tile(64, 64): Cost(0.182, 0.3, 0.182, 0.3),
    Tile(64, 32): Cost(0.139, 0.3, 0.139, 0.3),
    Tile(128, 256): Cost(0, 0, 0.745, 1.8),
    Tile(64, 256): Cost(0, 0, 0.385, 1.9),
    Tile(64, 192): Cost(0, 0, 0.315, 0.5),
}
"""Fitted to measured times (experiments/2026-11-tiled)."""
RAGGED: Final = 1.2
"""What a k-block takes more where a tile has rows outside of a, which TMA fills with zeros: a has fewer than a tile."""
UNALIGNED_SCALES: Final = 1.1
"""What a k-block takes more where scales of neighbouring rows cannot be loaded four at a time."""
TILES: Final = tuple(COSTS)
"""What kernels are compiled for; of equals the first is taken."""


def wide_scales(problem: ScaledMm) -> bool:
    """Return whether 1x128 scales of neighbouring rows are loaded four at a time."""
    rows, k_blocks = problem.scale_a_strides
    return rows == 1 and k_blocks % 4 == 0


def tiles(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return those that a product's sums, products and scales leave registers for."""
    chain = scales_of(problem) == "chain"
    return tuple(tile for tile in TILES if chain or COSTS[tile].promoted)


def us(problem: ScaledMm, tile: Tile | None = None) -> float:
    """Return the estimated microseconds of ``problem``, by the fastest tile if none is given."""
    p = problem
    if tile is None:
        return min(us(p, each) for each in tiles(p))
    cost = COSTS[tile]
    k_block, end = (cost.chain, cost.chain_end) if scales_of(p) == "chain" else (cost.promoted, cost.promoted_end)
    if p.m < tile.rows:
        k_block *= RAGGED
    if p.scale_a == "group" and not wide_scales(p):
        k_block *= UNALIGNED_SCALES
    busy = tile.waves(p.m, p.n, p.target) * (ceil_div(p.k, BLOCK_K) * k_block + end)
    moved = (p.m * p.k + p.n * p.k + p.m * p.n * ITEMSIZE[p.out]) / BYTES_A_US
    return START_US + max(busy, moved)


@lru_cache(8192)
def by_cost(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return the tiles that a product can have, the fastest first."""
    return tuple(sorted(tiles(problem), key=lambda tile: us(problem, tile)))


def fastest(problem: ScaledMm) -> Tile:
    """Return the tile that takes the least time by `us`."""
    return by_cost(problem)[0]
