"""Launch configurations of fused producers: threads of a block, vectors per thread, and blocks that share a row."""

from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import GROUP, STATIC, TOKEN, ceil_div, mode_of, round_up
from fp8core.problem import NormQuantize, SiluQuantize

THREADS_STEP: Final = 64
"""Threads of a block are a multiple of this, a warp on any device."""


class ProducerConfig(NamedTuple):
    """The threads of a block, the vectors that each keeps, and the blocks of the cluster that shares a row.

    ``vectors`` is 0 if the row is read again for each pass.
    """

    threads: int
    vectors: int
    blocks: int = 1
    few: bool = False
    """Whether each multiprocessor has one block or none, so that latencies count and registers do not."""


FEW, SOME, MANY = range(3)
"""Rows per multiprocessor: at most one, at most `SOME_ROWS`, more."""
SOME_ROWS: Final = 4
VECTORS: Final = {"norm": (2, 4, 8), "add": (2, 4, 2), "silu": (1, 1, 2)}
"""Vectors that a thread keeps, for `FEW`, `SOME` and `MANY` rows.

With more vectors there is less work that is done once per thread, but more registers are needed. A norm moves few bytes
for that work.
"""
LEAST_THREADS: Final = (256, 256, 128)
"""For the same: threads that a row gets before any of them keeps more than one vector."""
MOST_THREADS: Final = {1: 1024, 2: 1024, 3: 1024, 4: 512, 5: 512, 6: 512, 7: 512, 8: 512}
"""The threads that registers allow, by the vectors that each keeps."""

CLUSTER: Final = 4
CLUSTER_THREADS: Final = 256
"""The most threads of a block that shares its row."""
SINGLE_THREADS: Final = {"norm": 224, "add": 224, "silu": 256}
"""Threads of such a block up to which each has one vector: then 5,120, 6,144 and 7,168 columns of 16 bits are whole
blocks."""
SHARED_BYTES: Final = {STATIC: 12 << 10, TOKEN: 8 << 10, GROUP: 8 << 10}
"""Bytes of a row's input from which clusters share rows, by the mode: a multiprocessor takes only so much at a time.
"""
SHARED_VECTORS: Final = 512
"""Vectors per multiprocessor up to which clusters share rows; a row counts as at least 1,024."""
SILU_BYTES: Final = 16 << 10
"""Bytes of SiLU's input below which a cluster shares only a single row: alone that is 0.2 us faster, between products
0.5 us slower (experiments/2026-11-between-launches)."""

TILE: Final = (ProducerConfig(128, 1, few=True), ProducerConfig(128, 1), ProducerConfig(256, 1))
"""Blocks of silu for `FEW`, `SOME` and `MANY` rows, if no scale spans the row."""
TILES: Final = 8
"""Tiles per multiprocessor up to which rows are `FEW`; with more, memory bandwidth counts."""

Problem = NormQuantize | SiluQuantize


def vector_of(problem: Problem) -> int:
    """Return how many values a thread computes at a time: those of 16 bytes of x."""
    return 16 // ITEMSIZE[problem.x]


def kind_of(problem: Problem) -> str:
    """Return the key of a problem in `VECTORS`."""
    return "silu" if isinstance(problem, SiluQuantize) else "add" if problem.residual else "norm"


def row_config(problem: Problem, number: int) -> ProducerConfig:
    """Return the block that owns a row, for `FEW`, `SOME` or `MANY` rows."""
    units = max(ceil_div(problem.cols, vector_of(problem)), 1)
    wanted = VECTORS[kind_of(problem)][number]
    if units > MOST_THREADS[1]:
        wanted = max(wanted, 2 if number == FEW else 4)
    wanted = min(wanted, max(units // LEAST_THREADS[number], 1))
    for vectors in range(wanted, max(MOST_THREADS) + 1):
        threads = round_up(ceil_div(units, vectors), THREADS_STEP)
        if threads <= MOST_THREADS[vectors]:
            return ProducerConfig(threads, ceil_div(units, threads), few=number == FEW)
    return ProducerConfig(MOST_THREADS[1], 0)


def cluster_config(problem: Problem) -> ProducerConfig | None:
    """Return the blocks of a cluster that share a row, if that is faster, on the architecture that was measured."""
    kind, mode = kind_of(problem), mode_of(problem)
    inputs = 1 if kind == "norm" else 2
    if problem.target[:2] != ("cuda", 90) or problem.cols * ITEMSIZE[problem.x] * inputs < SHARED_BYTES[mode]:
        return None
    units = ceil_div(problem.cols, vector_of(problem))
    vectors = 1 if units <= CLUSTER * SINGLE_THREADS[kind] else 2
    threads = round_up(ceil_div(units, CLUSTER * vectors), problem.target.warp)
    return ProducerConfig(threads, vectors, CLUSTER, few=True) if threads <= CLUSTER_THREADS else None


def most_shared(problem: Problem) -> int:
    """Return the number of rows up to which the blocks of `cluster_config` share each row."""
    if isinstance(problem, SiluQuantize) and 2 * problem.cols * ITEMSIZE[problem.x] < SILU_BYTES:
        return 1
    return problem.target.multiprocessors * SHARED_VECTORS // max(ceil_div(problem.cols, vector_of(problem)), 1024)


def has_tiles(problem: Problem) -> bool:
    """Return whether blocks make tiles of rows: those of silu do if no scale spans the row."""
    return isinstance(problem, SiluQuantize) and mode_of(problem) != TOKEN


def blocks_per_row(problem: Problem, config: ProducerConfig) -> int:
    """Return how many blocks make a row; none if it has no columns to divide into tiles."""
    if not has_tiles(problem):
        return config.blocks
    return ceil_div(ceil_div(problem.cols, vector_of(problem)), config.threads * config.vectors)


def config_for(problem: Problem, rows: int) -> ProducerConfig:
    """Return the blocks of a launch for a number of rows."""
    multiprocessors, tiles = problem.target.multiprocessors, has_tiles(problem)
    shared = None if tiles else cluster_config(problem)
    if shared is not None and rows <= most_shared(problem):
        return shared
    few = multiprocessors
    if tiles:
        few = min(few, multiprocessors * TILES // max(blocks_per_row(problem, TILE[FEW]), 1))
    number = FEW if rows <= few else SOME if rows <= multiprocessors * SOME_ROWS else MANY
    return TILE[number] if tiles else row_config(problem, number)


def predicts_amax(problem: NormQuantize, config: ProducerConfig) -> bool:
    """Return whether to find the largest value of a token together with its sum of squares.

    That saves the second exchange of a cluster, at the cost of some instructions per element: it pays if a thread has
    few elements.
    """
    able = mode_of(problem) == TOKEN and not problem.round_intermediate and ITEMSIZE[problem.weight] == 2
    return able and problem.residual and config.blocks > 1 and config.vectors == 1
