"""The tiles that sm90_tiled is compiled for, and the estimated time of a product with each of them.

The constants are fitted to an H200 (experiments/2026-11-choice). Times are in microseconds.
"""

from typing import Final, Literal, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.scales import WITHIN, is_along_k
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, clusters_at_once
from fp8core.problem import Activation, ScaledMm
from fp8core.target import Target

Scales = Literal["chain", "promoted", "block", "group"]
"""How the scales of a product enter. Without scales along k, the tensor cores accumulate all of k ("chain") or every
k-block is promoted ("promoted"). With scales of 1x128 for a, those of the weight are 128x128 ("block") or 1x128
("group")."""


class Tile(NamedTuple):
    """A tile of the result, which a multiprocessor makes at a time."""

    rows: int
    """64, 128, 192 or 256."""
    columns: int
    """Channels."""
    cluster: int = 1
    """Tiles of a cluster: they have the same channels, and their blocks multicast loads of the weight. In a grouped
    product they have the same rows, and multicast loads of a."""
    pingpong: bool = False
    """Whether two consumer warpgroups make whole tiles by turns: one multiplies while the other stores."""
    split_k: int = 1
    """Blocks of a cluster that share a tile, each with a part of k; then no cluster has two tiles."""

    def __str__(self) -> str:
        own = "-pingpong" if self.pingpong else f"/{self.cluster}" if self.cluster > 1 else ""
        return f"{self.rows}x{self.columns}{own}" + (f"-split{self.split_k}" if self.split_k > 1 else "")

    @property
    def groups(self) -> int:
        """Return the number of consumer warpgroups."""
        return 2 if self.pingpong else 3 if self.rows == 192 else min(2, self.rows // 64)

    @property
    def m_slices(self) -> int:
        """Return how many slices of 64 rows of a tile each of them has."""
        return self.rows // (64 if self.pingpong else 64 * self.groups)

    @property
    def stage_bytes(self) -> int:
        """Bytes of a k-block of both operands."""
        return (self.rows + self.columns) * BLOCK_K

    @property
    def received(self) -> int:
        """Return how many sums a block gets from the others that share the tile."""
        return self.rows * self.columns * (self.split_k - 1) // self.split_k

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of a result, counting those twice that clusters make twice."""
        return ceil_div(m, self.rows * self.cluster) * self.cluster * ceil_div(n, self.columns)

    def waves(self, m: int, n: int, target: Target) -> int:
        """Return how many tiles the busiest multiprocessor makes."""
        return ceil_div(self.tiles(m, n), target.multiprocessors)


def scales_of(problem: ScaledMm) -> Scales:
    """Return how the scales of a product enter (see `Scales`)."""
    if is_along_k(problem):
        return "block" if WITHIN[problem.scale_b] == "block" else "group"
    return "chain" if problem.use_fast_accum else "promoted"


START_US: Final = 1.094
"""Time from a product's launch to its first k-block."""
FILL_US: Final = 0.004125
"""Time of a product per row of its first k-block, to fill the pipeline."""
BYTES_A_US: Final = 4.526e6
"""Memory bandwidth, in bytes per microsecond."""
OVERLAP: Final = 3.894
"""Exponent of the norm that combines the overlapping times (`overlapped_us`) of the memory, of the multiprocessors, and
of further L2 requests for rows that cross cache lines."""
CHAIN_US: Final = 1.637e-5
PROMOTED_US: Final = 1.5e-5
"""Time of a multiprocessor per result of a tile and k-block: in one chain over k, or promoted."""
CHAIN_K_BLOCK_US: Final = 0.0198
PROMOTED_K_BLOCK_US: Final = 0.05791
"""Addition per k-block, whatever the tile."""
LOAD_US: Final = 1.154e-6
"""Time of a multiprocessor per row of a k-block, if it alone loads."""
SHARED_LOAD_US: Final = 0.0004083
"""Addition to `LOAD_US` if all multiprocessors load; if only some do, in proportion."""
CROSSING_US: Final = 0.0009113
"""Time of a multiprocessor per row of a k-block that crosses a cache line, which takes two requests to L2: for rows
that begin at multiples of 16 bytes. It overlaps with products."""
SHARED_CROSSING_US: Final = 0.00152
"""Addition to `CROSSING_US` if all multiprocessors load; if only some do, in proportion."""
AT_32: Final = 0.5777
AT_64: Final = 0.4871
"""Fractions of both for rows that begin at multiples of 32 or 64 bytes: fewer of them cross a line."""
MEMORY_UNALIGNED: Final = 0.06467
"""Fraction by which the memory takes longer if rows do not begin at multiples of `SECTOR` bytes."""
SECTOR: Final = 32
"""Bytes that L2 reads together."""
FEW_ROWS: Final = 64
"""Up to so many rows, ping-pong tiles are no candidates: none were measured."""
LOADED_ROWS: Final = 8
"""Rows of a are loaded in multiples of this, and never more than a has."""
RESULT_US: Final = 5.162e-5
"""Time of a tile's epilogue per result."""
HIDDEN: Final = 0.6556
"""Fraction of the epilogue that ping-pong hides, except in the last tile, if the other warpgroup's products take as
long."""
ALONE: Final = 1.78
"""Factor on the epilogue if one warpgroup does it."""
ELEMENTWISE: Final = 2.627
"""Factor on the epilogue if threads store the result instead of TMA."""
BY_ONE: Final = 1.71
"""Further factor on that in tiles of 64 rows, which one warpgroup stores."""
NARROW: Final = 0.6397
"""Fraction by which that takes longer per further piece, if threads find pieces narrower than `STAGED` bytes."""
BETWEEN_WORDS: Final = 0.05108
"""Fraction by which that takes longer if rows of the result do not begin at multiples of `WORD` bytes."""
WORD: Final = 4
PIECE: Final = 16
"""The alignment in bytes that TMA needs to store the result."""
STAGED: Final = 128
"""Bytes of a row of the result that are staged as a piece if they divide a tile's row; else a half or a quarter."""
ACTIVATED: Final[dict[Activation, float]] = {"": 0, "gelu": 1.87, "gelu_tanh": 1.5, "silu": 1.45}
ADDED: Final = 1.0
"""Fractions by which an activation, and beta, lengthen the epilogue."""
CHAIN_HEAT: Final = 0.2431
PROMOTED_HEAT: Final = 0.3289
"""Fraction by which k-blocks take longer in a long product, as the clock falls."""
HOT_US: Final = 102.9
"""Time of k-blocks after which half of that fraction applies."""
WHOLE_WAVES: Final = 1.014
"""Share of the time that grows with whole waves; the rest grows with tiles."""
SPLIT_FACTORS: Final[dict[Scales, float]] = {"chain": 1.14, "promoted": 1.14, "block": 1.09, "group": 1.31}
"""Factors on the time of a split k, beside that of as many tiles with as many k-blocks."""
SPLIT_US: Final = {2: -0.263, 4: 0.105}
"""Time that a product takes more, by the number of blocks that share a tile."""
EXCHANGE_US: Final = 8.22e-5
"""Time of a block per sum that it gets from others. `python -m bench.split_costs` fits the three, to an H100; they
choose as well on an H200 (docs/results/README.md)."""
LEAST_K_BLOCKS: Final = 2
"""Of a block, where several share a tile."""


class Cost(NamedTuple):
    """Factors on the constants above, fitted to a tile: what its size does not explain."""

    promoted: float
    """On promoted products; 0: the registers do not hold them."""
    chain: float
    """On products in one chain over k."""


COSTS: Final[dict[Tile, Cost]] = {
    Tile(256, 128): Cost(0.9682, 0.9695),
    Tile(128, 192): Cost(0.8821, 0.899),
    Tile(128, 160): Cost(0.9117, 0.8749),
    Tile(128, 144): Cost(0.9007, 0.8718),
    Tile(128, 128): Cost(0.7889, 0.8236),
    Tile(128, 96): Cost(0.8534, 0.7924),
    Tile(128, 64): Cost(0.8064, 0.7458),
    Tile(64, 128): Cost(0.7698, 0.8146),
    Tile(64, 96): Cost(0.8961, 0.8364),
    Tile(64, 64): Cost(0.9722, 0.9956),
    Tile(64, 32): Cost(1.289, 1.733),
    Tile(128, 256): Cost(0, 0.9429),
    Tile(64, 256): Cost(0, 0.8443),
    Tile(64, 192): Cost(0, 0.8142),
    Tile(64, 64, cluster=2): Cost(1.266, 1.145),
    Tile(64, 128, cluster=2): Cost(0.8613, 0.9163),
    Tile(128, 192, pingpong=True): Cost(0, 0.8885),
    Tile(128, 160, pingpong=True): Cost(0, 0.8567),
    Tile(128, 144, pingpong=True): Cost(0, 0.8507),
    Tile(128, 128, pingpong=True): Cost(0, 0.8177),
    Tile(64, 256, pingpong=True): Cost(0, 0.7638),
    Tile(192, 128): Cost(0.9, 0.9378),
    Tile(192, 96): Cost(0.9069, 0.8835),
    Tile(192, 64): Cost(0.9076, 0.7683),
    Tile(256, 112): Cost(1.084, 1.082),
    Tile(192, 112): Cost(0.9588, 0.9435),
    Tile(128, 112): Cost(0.945, 0.8914),
    Tile(128, 80): Cost(0.9133, 0.792),
}
TILES: Final = tuple(COSTS)
"""The tiles that kernels are compiled for; of equally fast ones the first is chosen."""
SPLITS: Final = (2, 4)
"""Blocks that can share a tile: each completes the rows of whole warps."""
MOST_SPLIT: Final = 128 * 192
"""Results of such a tile: beside the sums that blocks get, shared memory has room for three stages of it."""
SPLIT_TILES: Final = tuple(
    tile._replace(split_k=split_k)
    for tile in TILES
    if tile.m_slices == tile.cluster == 1 and not tile.pingpong and tile.rows * tile.columns <= MOST_SPLIT
    for split_k in SPLITS
)
"""The tiles that several blocks make together."""


FITTED: Final = (
    *("START_US", "FILL_US", "BYTES_A_US", "OVERLAP", "CHAIN_US", "PROMOTED_US", "CHAIN_K_BLOCK_US"),
    *("PROMOTED_K_BLOCK_US", "LOAD_US", "SHARED_LOAD_US", "CROSSING_US", "SHARED_CROSSING_US", "AT_32", "AT_64"),
    *("MEMORY_UNALIGNED", "RESULT_US", "HIDDEN", "ALONE", "ELEMENTWISE", "BY_ONE", "NARROW", "BETWEEN_WORDS"),
    *("CHAIN_HEAT", "PROMOTED_HEAT", "HOT_US", "WHOLE_WAVES"),
)
"""The constants that `python -m bench.fit_estimates` fits beside `COSTS`."""


def staged_piece(tile: Tile, itemsize: int) -> int:
    """Return the bytes of a piece of a row of the result that shared memory holds together."""
    return next(size for size in (STAGED, STAGED // 2, STAGED // 4) if tile.columns * itemsize % size == 0)


def stores_tiles(problem: ScaledMm) -> bool:
    """Return whether TMA can store the result: its address and its rows are aligned, and its columns counted in bytes.

    (The coordinates of TMA are 32-bit numbers with a sign: stores from a negative one on are dropped.)
    """
    at, item = max(problem.alignment, problem.out_alignment), ITEMSIZE[problem.out]
    return at % PIECE == 0 and problem.ldo * item % PIECE == 0 and problem.n * item < 1 << 31


def tiles(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return the tiles whose sums, products and scales fit into registers for a product."""
    scales = scales_of(problem)
    ends = bool(problem.activation) or problem.beta != 0 or problem.amax
    singly = scales == "group" and not stores_tiles(problem)  # takes registers
    most = 128 * 160 if singly or (scales == "group" and ends) else 256 * 128
    # Ping-pong tiles: none for few rows, where loads take the time and not products.
    loads = problem.beta != 0 and not stores_tiles(problem)  # threads load what beta scales: takes registers, too
    most_alone = 0 if problem.m <= FEW_ROWS else 128 * 128 if problem.amax else 128 * 160 if loads else 128 * 192
    # 256x112: the code has a copy of the ending for each place in a tile where the weight's scale may change, and for
    # each of two slices. Not all copies of a long ending are inlined, and products are serialized at the calls. With
    # 1x128 scales of the weight, registers spill.
    short = scales in ("chain", "promoted") or (scales == "block" and not ends and stores_tiles(problem))
    # No clusters with beta, as they make some tiles twice, nor with scales that leave a warpgroup no register to spare;
    # nor three warpgroups with these.
    together = 1 if problem.beta or scales == "group" else 2
    piece = 16 if ITEMSIZE[problem.out] > 1 else 32  # channels whose results are stored together
    return tuple(
        tile
        for tile in TILES
        if (scales == "chain" or COSTS[tile].promoted)
        and tile.columns % piece == 0
        and tile.rows * tile.columns <= (most_alone if tile.pingpong else most)
        and tile.cluster <= together
        and (tile.groups < 3 or scales != "group")
        and (short or tile != Tile(256, 112))
        and not (singly and (tile.rows, tile.columns) == (64, 128))
    )


def split_tiles(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return the tiles that several blocks can make together: those of which all blocks run at a time.

    There are none for few rows, which sm90_decode multiplies with a split k, too.
    """
    if problem.m <= FEW_ROWS or problem.beta:
        return ()
    at_once, k_blocks = clusters_at_once(problem.target), ceil_div(problem.k, BLOCK_K)
    alone = set(tiles(problem))
    return tuple(
        tile
        for tile in SPLIT_TILES
        if tile._replace(split_k=1) in alone
        and tile.tiles(problem.m, problem.n) <= at_once[tile.split_k]
        and k_blocks >= LEAST_K_BLOCKS * tile.split_k
    )


def candidates(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return all tiles that a product can have."""
    return (*tiles(problem), *split_tiles(problem))


def unsplit(problem: ScaledMm, tile: Tile) -> ScaledMm:
    """Return the product with as many tiles, and as many k-blocks for each, as the blocks of a split k have."""
    n = ceil_div(problem.n, tile.columns) * tile.columns * tile.split_k
    k = ceil_div(ceil_div(problem.k, BLOCK_K), tile.split_k) * BLOCK_K - -problem.k % BLOCK_K
    return problem._replace(n=n, k=k)


def split_us(problem: ScaledMm, tile: Tile, unsplit_us: float) -> float:
    """Return the microseconds of a split k, given those of `unsplit`."""
    return SPLIT_FACTORS[scales_of(problem)] * unsplit_us + SPLIT_US[tile.split_k] + EXCHANGE_US * tile.received


def us(problem: ScaledMm, tile: Tile | None = None) -> float:
    """Return the estimated microseconds of ``problem``, by the fastest tile if none is given."""
    p = problem
    if tile is None:
        return min(us(p, each) for each in candidates(p))
    if tile.split_k > 1:
        return split_us(p, tile, us(unsplit(p, tile), tile._replace(split_k=1)))
    cost, results, waves = COSTS[tile], tile.rows * tile.columns, max(1, tile.waves(p.m, p.n, p.target))
    share = tile.tiles(p.m, p.n) / p.target.multiprocessors
    rows = tile.columns / tile.cluster + min(tile.rows, ceil_div(p.m, LOADED_ROWS) * LOADED_ROWS)
    k_block, k_blocks = (LOAD_US + SHARED_LOAD_US * share / waves) * rows, ceil_div(p.k, BLOCK_K)
    memory, crossing = (p.m * p.k + p.n * p.k + p.m * p.n * ITEMSIZE[p.out]) / BYTES_A_US, 0.0
    if p.k % BLOCK_K:
        crossing = (CROSSING_US * waves + SHARED_CROSSING_US * share) * rows * k_blocks
        if p.k % SECTOR:
            memory *= 1 + MEMORY_UNALIGNED
        else:
            crossing *= AT_32 if p.k % (2 * SECTOR) else AT_64
    if scales_of(p) == "chain":
        k_block += results * CHAIN_US * cost.chain + CHAIN_K_BLOCK_US
    else:
        k_block += results * PROMOTED_US * cost.promoted + PROMOTED_K_BLOCK_US
    rounds = WHOLE_WAVES * waves + (1 - WHOLE_WAVES) * max(1.0, share)
    cool = rounds * k_blocks * k_block
    heat = (CHAIN_HEAT if scales_of(p) == "chain" else PROMOTED_HEAT) * cool / (cool + HOT_US)
    end = RESULT_US * results * (1 + ACTIVATED[p.activation] + (ADDED if p.beta else 0))
    if not stores_tiles(p):
        between = p.ldo * ITEMSIZE[p.out] % WORD > 0
        narrow = STAGED / staged_piece(tile, ITEMSIZE[p.out]) - 1
        end *= ELEMENTWISE * (BY_ONE if tile.groups == 1 else 1) * (1 + BETWEEN_WORDS * between) * (1 + NARROW * narrow)
    if tile.pingpong:
        shown = max((1 - HIDDEN) * end, (ALONE * end - k_blocks * k_block) / 2)
        ends = ALONE * end + (rounds - 1) * shown
    else:
        ends = rounds * end
    busy = cool * (1 + heat) + ends
    return START_US + FILL_US * (tile.rows + tile.columns) + overlapped_us(OVERLAP, memory, busy, crossing)
