"""Launch configurations of the fused producers: threads of a block, what each keeps, the blocks that share a row."""

from typing import Final, NamedTuple

from fp8core.kernels.encodings import GROUP, STATIC, TOKEN, ceil_div, mode_of, round_up
from fp8core.problem import ITEMSIZE, NormQuantize, SiluQuantize

THREADS_STEP: Final = 64
"""Threads of a block are a multiple of this, a warp on any device."""


class ProducerConfig(NamedTuple):
    """The threads of a block, the vectors that each keeps, and the blocks of the cluster that shares a row.

    ``vectors`` is 0 when the row is read again for each pass.
    """

    threads: int
    vectors: int
    blocks: int = 1
    few: bool = False
    """Each multiprocessor has one block or none: latencies count, and registers do not."""


FEW, SOME, MANY = range(3)
"""Rows: at most one a multiprocessor, at most `SOME_ROWS` of them, more."""
SOME_ROWS: Final = 4
VECTORS: Final = {"norm": (2, 4, 8), "add": (2, 4, 2), "silu": (1, 1, 2)}
"""What a thread keeps, for `FEW`, `SOME` and `MANY` rows.

More of them means less work that is done once a thread, and more registers. A norm moves few bytes for such work.
"""
LEAST_THREADS: Final = (256, 256, 128)
"""For the same: threads that a row gets before one of them keeps more than one vector."""
MOST_THREADS: Final = {1: 1024, 2: 1024, 3: 1024, 4: 512, 5: 512, 6: 512, 7: 512, 8: 512}
"""By the vectors that each keeps: what registers allow."""

CLUSTER: Final = 4
CLUSTER_THREADS: Final = 256
"""The most of a block that shares its row."""
SINGLE_THREADS: Final = {"norm": 224, "add": 224, "silu": 256}
"""Up to so many of them each has one vector: 5,120, 6,144 and 7,168 columns of 16 bits are whole blocks then."""
SHARED_BYTES: Final = {STATIC: 12 << 10, TOKEN: 8 << 10, GROUP: 8 << 10}
"""By the mode: rows of at least this much input are shared by clusters; a multiprocessor takes only so much at a time.
"""
SHARED_VECTORS: Final = 512
"""As long as there are at most this many vectors a multiprocessor; a row counts as 1,024 at least."""
SILU_BYTES: Final = 16 << 10
"""Of SiLU's input below which only a single row is shared: alone a cluster is faster by 0.2 us, between products slower
by 0.5 (experiments/2026-11-between-launches)."""

TILE: Final = (ProducerConfig(128, 1, few=True), ProducerConfig(128, 1), ProducerConfig(256, 1))
"""Blocks of silu where no scale spans the row, for `FEW`, `SOME` and `MANY` rows."""
TILES: Final = 8
"""Of a multiprocessor, up to which few rows of them are few: else memory is what counts."""

Problem = NormQuantize | SiluQuantize


def vector_of(problem: Problem) -> int:
    """Return how many values a thread makes at a time: 16 bytes of x."""
    return 16 // ITEMSIZE[problem.x]


def kind_of(problem: Problem) -> str:
    """Return the key of a problem in `VECTORS`."""
    return "silu" if isinstance(problem, SiluQuantize) else "add" if problem.residual else "norm"


def row_config(problem: Problem, number: int) -> ProducerConfig:
    """Return the block that owns a row where there are `FEW`, `SOME` or `MANY`."""
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
    """Return the blocks of a cluster that share a row, on the device where it was measured, if that is worth it."""
    kind, mode = kind_of(problem), mode_of(problem)
    inputs = 1 if kind == "norm" else 2
    if problem.target[:2] != ("cuda", 90) or problem.cols * ITEMSIZE[problem.x] * inputs < SHARED_BYTES[mode]:
        return None
    units = ceil_div(problem.cols, vector_of(problem))
    vectors = 1 if units <= CLUSTER * SINGLE_THREADS[kind] else 2
    threads = round_up(ceil_div(units, CLUSTER * vectors), problem.target.warp)
    return ProducerConfig(threads, vectors, CLUSTER, few=True) if threads <= CLUSTER_THREADS else None


def most_shared(problem: Problem) -> int:
    """Return up to how many rows are shared by the blocks of `cluster_config`."""
    if isinstance(problem, SiluQuantize) and 2 * problem.cols * ITEMSIZE[problem.x] < SILU_BYTES:
        return 1
    return problem.target.multiprocessors * SHARED_VECTORS // max(ceil_div(problem.cols, vector_of(problem)), 1024)


def foresees(problem: NormQuantize, config: ProducerConfig) -> bool:
    """Return whether the largest value of a token is to come with its sum of squares.

    It saves the second exchange of a cluster for some instructions an element: worth it where a thread has few of them.
    """
    able = mode_of(problem) == TOKEN and not problem.round_intermediate and ITEMSIZE[problem.weight] == 2
    return able and problem.residual and config.blocks > 1 and config.vectors == 1
