"""Kernels that make values and quantize them in one launch: RMS norm (with or without a residual), SiLU times up.

The numbers are those of the unfused sequence in fp32. Two things are left to a kernel: the last places of the mean of
squares, whose sum has any order, and of ``exp``. So against an oracle a value may be off by 6 ulp of fp32 (with
``round_intermediate``, where that crosses a tie, by one step of x's dtype), a scale by as much, and a code by one step.
"""

from collections.abc import Callable
from functools import cache
from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, ceil_div
from fp8core.kernels.requirements import platform
from fp8core.problem import ITEMSIZE, NormQuantize, SiluQuantize
from fp8core.runtime import jit
from fp8core.table import Kernel, Launch, Requirement, Table

STATIC: Final = 0
TOKEN: Final = 2
GROUP: Final = 3
"""The modes of cuda_src/common/quantize_scale.cuh."""
PARTS, VECTORS_AND_END, WHOLE = range(3)
"""How rows lie, in cuda_src/common/produce.cuh."""
WAVE: Final = 64
"""Threads of a block are a multiple of this, a warp on any device."""
MOST_GRID_ROWS: Final = 65535
"""Of the second axis of a grid."""


class Shape(NamedTuple):
    """The threads of a block, the vectors that each keeps, and the blocks of the cluster that shares a row.

    ``vectors`` is 0 when the row is read again for each pass.
    """

    threads: int
    vectors: int
    blocks: int = 1


FEW, SOME, MANY = range(3)
"""Rows: at most one a multiprocessor, at most `SOME_ROWS` of them, more."""
SOME_ROWS: Final = 4
VECTORS: Final = {"norm": (2, 4, 8), "add": (2, 4, 2), "silu": (1, 1, 2)}
"""What a thread keeps, for `FEW`, `SOME` and `MANY` rows. More is less to be done once a thread, and more registers.

A norm moves least for what it does once a thread, so that counts most there.
"""
LEAST_THREADS: Final = (256, 256, 128)
"""For the same: threads that a row gets before one of them keeps more than one vector."""
MOST_THREADS: Final = {1: 1024, 2: 1024, 3: 1024, 4: 512, 5: 512, 6: 512, 7: 512, 8: 512}
"""By the vectors that each keeps: what registers allow."""

CLUSTER: Final = 4
CLUSTER_THREADS: Final = 256
"""The most of a block that shares its row."""
SHARED_BYTES: Final = {STATIC: 12 << 10, TOKEN: 12 << 10, GROUP: 8 << 10}
"""By the mode: rows of at least this much input are shared by clusters; a multiprocessor takes only so much at a time.

A residual does not count where a scale spans the row: the second exchange costs what it would gain.
"""
SHARED_VECTORS: Final = 512
"""As long as there are at most this many vectors a multiprocessor; a row counts as 1,024 at least."""

TILE: Final = (Shape(128, 1), Shape(256, 1))
"""Blocks of silu where no scale spans the row, for fewer rows and for `MANY`."""

Problem = NormQuantize | SiluQuantize


def vector_of(problem: Problem) -> int:
    """Return how many values a thread makes at a time: 16 bytes of x."""
    return 16 // ITEMSIZE[problem.x]


def kind_of(problem: Problem) -> str:
    """Return the key of a problem in `VECTORS`."""
    return "silu" if isinstance(problem, SiluQuantize) else "add" if problem.residual else "norm"


def own_shape(problem: Problem, number: int) -> Shape:
    """Return the block that owns a row where there are `FEW`, `SOME` or `MANY`."""
    units = max(ceil_div(problem.cols, vector_of(problem)), 1)
    wanted = VECTORS[kind_of(problem)][number]
    if units > MOST_THREADS[1]:
        wanted = max(wanted, 2 if number == FEW else 4)
    wanted = min(wanted, max(units // LEAST_THREADS[number], 1))
    for vectors in range(wanted, max(MOST_THREADS) + 1):
        threads = ceil_div(ceil_div(units, vectors), WAVE) * WAVE
        if threads <= MOST_THREADS[vectors]:
            return Shape(threads, ceil_div(units, threads))
    return Shape(MOST_THREADS[1], 0)


def shared_shape(problem: Problem) -> Shape | None:
    """Return the blocks of a cluster that share a row, on the device where it was measured, if that is worth it."""
    kind, mode = kind_of(problem), mode_of(problem)
    inputs = 1 if kind == "norm" or (kind == "add" and mode == TOKEN) else 2
    if problem.target[:2] != ("cuda", 90) or problem.cols * ITEMSIZE[problem.x] * inputs < SHARED_BYTES[mode]:
        return None
    units = ceil_div(problem.cols, vector_of(problem))
    vectors = 1 if units <= 512 else 2
    threads = ceil_div(ceil_div(units, CLUSTER * vectors), problem.target.warp) * problem.target.warp
    return Shape(threads, vectors, CLUSTER) if threads <= CLUSTER_THREADS else None


def mode_of(problem: Problem) -> int:
    """Return the mode of a problem that `SUPPORTED` lets through."""
    if problem.static:
        return STATIC
    return TOKEN if problem.group_shape.cols < 0 else GROUP


def constants_of(problem: Problem, shape: Shape) -> dict[str, int]:
    """Return the constants that both sources take."""
    spanned = shape.threads * shape.vectors * shape.blocks * vector_of(problem)
    whole = shape.vectors > 0 and problem.cols > 0 and problem.cols % spanned == 0
    return {
        "FP8_X": TYPE[problem.x],
        "FP8_FORMAT": FORMAT[problem.data],
        "FP8_ROUND": int(problem.round_intermediate),
        "FP8_MODE": mode_of(problem),
        "FP8_GROUP_ROWS": problem.group_shape.rows,
        "FP8_GROUP_COLS": problem.group_shape.cols,
        "FP8_SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
        "FP8_ALIGNED": PARTS if problem.alignment < 16 else WHOLE if whole else VECTORS_AND_END,
        "FP8_VECTORS": shape.vectors,
        "FP8_THREADS": shape.threads,
        "FP8_BLOCKS": shape.blocks,
    }


def by_rows(problem: Problem, prepare: Callable[[Shape], jit.Launcher]) -> Callable[[int], tuple[jit.Launcher, int]]:
    """Return what gives, by the rows, the launcher (compiled when it is first asked for) and the blocks of a row."""
    few, units = problem.target.multiprocessors, ceil_div(problem.cols, vector_of(problem))
    tiles = isinstance(problem, SiluQuantize) and mode_of(problem) != TOKEN
    shared = None if tiles else shared_shape(problem)
    most_shared = few * SHARED_VECTORS // max(units, 1024) if shared else 0

    @cache
    def ready(number: int | None) -> tuple[jit.Launcher, int]:
        if tiles:
            shape = TILE[number == MANY]
            return prepare(shape), ceil_div(units, shape.threads * shape.vectors)
        shape = shared if shared and number is None else own_shape(problem, number or FEW)
        return prepare(shape), shape.blocks

    def chosen(rows: int) -> tuple[jit.Launcher, int]:
        return ready(None if rows <= most_shared else FEW if rows <= few else SOME if rows <= few * SOME_ROWS else MANY)

    return chosen


def plan_norm_quantize(problem: NormQuantize) -> Launch:
    """Return the launch of `NORM_QUANTIZE`.

    ``launch(stream, x, x_stride, residual, residual_stride, weight, epsilon, data, data_stride, scale,
    scale_row_stride, scale_col_stride, rows, upper, upper_value, eps)``
    """
    cols = problem.cols

    def prepare(shape: Shape) -> jit.Launcher:
        return jit.prepare(
            problem.target,
            "norm_quantize",
            "norm_quantize",
            {
                **constants_of(problem, shape),
                "FP8_W": TYPE[problem.weight],
                "FP8_RESIDUAL": int(problem.residual),
            },
            "PqPqPfPqPqqPffi",
            block=shape.threads,
            cluster=shape.blocks,
            programmatic=True,
        )

    chosen = by_rows(problem, prepare)

    def launch(
        stream: int,
        x: int,
        x_stride: int,
        residual: int,
        residual_stride: int,
        weight: int,
        epsilon: float,
        data: int,
        data_stride: int,
        scale: int,
        scale_row_stride: int,
        scale_col_stride: int,
        rows: int,
        upper: int,
        upper_value: float,
        eps: float,
    ) -> None:
        inputs = (x, x_stride, residual, residual_stride, weight, epsilon)
        results = (data, data_stride, scale, scale_row_stride, scale_col_stride)
        launcher, blocks = chosen(rows)
        launcher(stream, (rows * blocks, 1, 1), *inputs, *results, upper, upper_value, eps, cols)

    return launch


def plan_silu_quantize(problem: SiluQuantize) -> Launch:
    """Return the launch of `SILU_QUANTIZE`.

    ``launch(stream, x, x_stride, data, data_stride, scale, scale_row_stride, scale_col_stride, rows, upper,
    upper_value, eps)``
    """
    cols = problem.cols

    def prepare(shape: Shape) -> jit.Launcher:
        return jit.prepare(
            problem.target,
            "silu_quantize",
            "silu_quantize",
            constants_of(problem, shape),
            "PqPqPqqPffqi",
            block=shape.threads,
            cluster=shape.blocks,
            programmatic=True,
        )

    chosen = by_rows(problem, prepare)

    def launch(
        stream: int,
        x: int,
        x_stride: int,
        data: int,
        data_stride: int,
        scale: int,
        scale_row_stride: int,
        scale_col_stride: int,
        rows: int,
        upper: int,
        upper_value: float,
        eps: float,
    ) -> None:
        results = (data, data_stride, scale, scale_row_stride, scale_col_stride)
        limits = (upper, upper_value, eps)
        launcher, blocks = chosen(rows)
        grid = (blocks, min(rows, MOST_GRID_ROWS), ceil_div(rows, MOST_GRID_ROWS))
        launcher(stream, grid, x, x_stride, *results, *limits, rows, cols)

    return launch


def _is_supported(problem: Problem) -> bool:
    rows, cols = problem.group_shape
    vector = vector_of(problem)
    if problem.static:
        return cols < 0 or cols % vector == 0
    lanes = cols // vector
    groups = cols % vector == 0 and lanes & (lanes - 1) == 0 and lanes <= problem.target.warp
    return rows == 1 and (cols < 0 or groups)


SUPPORTED: Final = Requirement(
    _is_supported,
    "needs a given scale, one per token, or one per (1, g) with g = 8, 16, 32, 64 or 128; got {p.group_shape}",
)

SCALED_BY_ROWS: Final = Requirement(
    lambda p: p.static or p.group_shape.rows > 0,
    "needs a given scale, or one for every so many rows; got {p.group_shape}",
)

NORM_QUANTIZE: Final = Table(
    "rms_norm_quant",
    NormQuantize,
    Kernel("row", (platform("cuda", "hip"), SUPPORTED), plan_norm_quantize),
    Kernel("host", (platform("host"), SCALED_BY_ROWS), host.plan_norm_quantize),
)
"""``h = x``, or with a residual ``x + residual`` in fp32, which is written to residual rounded to its dtype.
``y = (h * r) * weight`` in fp32 with ``r = 1 / sqrt(sum(h * h) / cols + epsilon)``; ``round_intermediate`` rounds
``h * r`` and ``y`` to x's dtype, and with a given scale ``h``, too: what vLLM's static kernels quantize. (Its dynamic
kernels and FlashInfer's norm the fp32 sum.) Then ``y`` is quantized exactly as `QUANTIZE` does it."""

SILU_QUANTIZE: Final = Table(
    "silu_and_mul_quant",
    SiluQuantize,
    Kernel("tile", (platform("cuda", "hip"), SUPPORTED), plan_silu_quantize),
    Kernel("host", (platform("host"), SCALED_BY_ROWS), host.plan_silu_quantize),
)
"""``y = silu(gate) * up`` in fp32 with ``silu(v) = v / (1 + exp(-v))`` within 6 ulp, or, where it is below 2**-110,
within ``|v| * 2**-118``; -Inf gives NaN, as the formula does. ``round_intermediate`` rounds ``silu(gate)`` and ``y`` to
x's dtype; of float16 ``silu(gate)`` is then the rounded quotient by the rounded sum, as where each step is one of fp32,
with ``expf`` as the device has it (at most 2 ulp off: 7 of the 63,488 gates depend on its last place). Then ``y`` is
quantized exactly as `QUANTIZE` does it."""
