"""Kernels that make values and quantize them in one launch: RMS norm (with or without a residual), SiLU times up.

The numbers are those of the unfused sequence in fp32. Two things are left to a kernel: the order of the sum of squares,
and the last places of ``exp``. So against an oracle a value may be off by 6 ulp of fp32 (with ``round_intermediate``,
where that crosses a tie, by one step of x's dtype), a scale by as much, and a code by one step.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

from fp8core import host, jit
from fp8core.dispatch import Kernel, Launch, Requirement, Table
from fp8core.kernels.requirements import platform
from fp8core.kernels.words import FORMAT, SCALE_FORMAT, TYPE, ceil_div
from fp8core.problem import ITEMSIZE, NormQuantize, SiluQuantize

STATIC: Final = 0
TOKEN: Final = 2
GROUP: Final = 3
"""The modes of cuda_src/common/quantize_scale.cuh."""
PARTS, VECTORS_AND_END, WHOLE = range(3)
"""How rows lie, in cuda_src/common/produce.cuh."""
MOST_THREADS: Final = 1024
MOST_VECTORS: Final = 3
"""Vectors that each of `MOST_THREADS` threads keeps in registers; a longer row is read again for each pass."""
FEW_BLOCKS: Final = 4
"""Up to this many rows a multiprocessor, a row gets as many threads as it can: it is latency that counts."""
FRUGAL_THREADS: Final = (128, 256, 512)
FRUGAL_VECTORS: Final = 8
"""Threads of a block that normalizes one of many rows, tried in turn, and the most vectors that each keeps."""
BESIDE: Final = {(128, GROUP): 5, (256, GROUP): 3}
"""By threads and mode, where the compiler alone takes registers that another block could have."""
WAVE: Final = 64
"""Threads of a block are a multiple of this, a warp on any device."""
MOST_GRID_ROWS: Final = 65535
"""Of the second axis of a grid."""


class Shape(NamedTuple):
    """A block's threads, and the vectors that each keeps: 0 when the row is read again for each pass.

    ``beside``: the blocks that are to fit on a multiprocessor, whatever the compiler thinks best; 0 leaves it to that.
    """

    threads: int
    vectors: int
    beside: int = 0


TILE_VECTORS: Final = 256
"""Of a block of silu where no scale spans the row."""
QUICK_TILE: Final = Shape(TILE_VECTORS, 1)
FRUGAL_TILE: Final = Shape(TILE_VECTORS // 2, 2)


def vector_of(problem: NormQuantize | SiluQuantize) -> int:
    """Return how many values a thread makes at a time: 16 bytes of x."""
    return 16 // ITEMSIZE[problem.x]


def quick_shape(problem: NormQuantize | SiluQuantize) -> Shape:
    """Return the block that owns a row when there are few rows: all the threads that find work."""
    units = ceil_div(problem.cols, vector_of(problem))
    vectors = ceil_div(units, MOST_THREADS)
    if vectors > MOST_VECTORS:
        return Shape(MOST_THREADS, 0)
    return Shape(ceil_div(ceil_div(units, vectors), WAVE) * WAVE, vectors)


def frugal_shape(problem: NormQuantize | SiluQuantize) -> Shape:
    """Return the block that owns a row when there are many rows: what a thread does once, fewer threads do."""
    units, quick = ceil_div(problem.cols, vector_of(problem)), quick_shape(problem)
    if isinstance(problem, NormQuantize) and not problem.residual:
        # Least is moved here, so that what is done once a thread counts most: as few threads as the registers allow.
        most = next((threads for threads in FRUGAL_THREADS if units <= threads * FRUGAL_VECTORS), MOST_THREADS)
        vectors = ceil_div(units, most)
    else:
        adds = isinstance(problem, NormQuantize)  # two inputs: fewer vectors fill the registers
        vectors = 2 if adds and units <= MOST_THREADS else 4
        if units % (vectors * WAVE) and not units % ((vectors + 1) * WAVE):
            vectors += 1  # which leaves no thread without work
    threads = ceil_div(ceil_div(units, vectors), WAVE) * WAVE
    if not quick.vectors or threads > MOST_THREADS // 2:
        return quick
    many = vectors > 4 and problem.cols % (threads * vectors * vector_of(problem)) == 0
    return Shape(threads, vectors, BESIDE.get((threads, mode_of(problem)), 0) if many else 0)


def mode_of(problem: NormQuantize | SiluQuantize) -> int:
    """Return the mode of a problem that `SUPPORTED` lets through."""
    if problem.static:
        return STATIC
    return TOKEN if problem.group_shape.cols < 0 else GROUP


def constants_of(problem: NormQuantize | SiluQuantize, shape: Shape) -> dict[str, int]:
    """Return the constants that both sources take."""
    whole = shape.vectors > 0 and problem.cols % (shape.threads * shape.vectors * vector_of(problem)) == 0
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
    }


def by_rows(prepare: Callable[[Shape], jit.Launcher], quick: Shape, frugal: Shape) -> tuple[jit.Launcher, jit.Launcher]:
    """Return the launchers for few and for many rows, which may be one."""
    first = prepare(quick)
    return first, first if frugal == quick else prepare(frugal)


def plan_norm_quantize(problem: NormQuantize) -> Launch:
    """Return the launch of `NORM_QUANTIZE`.

    ``launch(stream, x, x_stride, residual, residual_stride, weight, epsilon, data, data_stride, scale,
    scale_row_stride, scale_col_stride, rows, upper, upper_value, eps)``
    """
    cols, few = problem.cols, problem.target.multiprocessors * FEW_BLOCKS

    def prepare(shape: Shape) -> jit.Launcher:
        own = {"FP8_W": TYPE[problem.weight], "FP8_RESIDUAL": int(problem.residual), "FP8_BESIDE": shape.beside}
        return jit.prepare(
            problem.target,
            "norm_quantize",
            "norm_quantize",
            {**constants_of(problem, shape), **own},
            "PqPqPfPqPqqPffi",
            block=shape.threads,
            programmatic=True,
        )

    quick, frugal = by_rows(prepare, quick_shape(problem), frugal_shape(problem))

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
        launcher = quick if rows <= few else frugal
        launcher(stream, (rows, 1, 1), *inputs, *results, upper, upper_value, eps, cols)

    return launch


def plan_silu_quantize(problem: SiluQuantize) -> Launch:
    """Return the launch of `SILU_QUANTIZE`.

    ``launch(stream, x, x_stride, data, data_stride, scale, scale_row_stride, scale_col_stride, rows, upper,
    upper_value, eps)``
    """
    cols, few = problem.cols, problem.target.multiprocessors * FEW_BLOCKS

    def prepare(shape: Shape) -> jit.Launcher:
        return jit.prepare(
            problem.target,
            "silu_quantize",
            "silu_quantize",
            constants_of(problem, shape),
            "PqPqPqqPffqi",
            block=shape.threads,
            programmatic=True,
        )

    tiles = 1
    if mode_of(problem) == TOKEN:
        quick, frugal = by_rows(prepare, quick_shape(problem), frugal_shape(problem))
    else:
        quick, frugal = by_rows(prepare, QUICK_TILE, FRUGAL_TILE)
        tiles = ceil_div(cols, TILE_VECTORS * vector_of(problem))

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
        launcher = quick if rows <= few else frugal
        grid = (tiles, min(rows, MOST_GRID_ROWS), ceil_div(rows, MOST_GRID_ROWS))
        launcher(stream, grid, x, x_stride, *results, *limits, rows, cols)

    return launch


def _is_supported(problem: NormQuantize | SiluQuantize) -> bool:
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
"""``h = x``, or with a residual ``x + residual`` rounded to their dtype (and written to residual): the norm reads what
the residual becomes, as the unfused sequence and vLLM's fused_add_rms_norm do. ``y = (h * r) * weight`` in fp32 with
``r = 1 / sqrt(sum(h * h) / cols + epsilon)``; ``round_intermediate`` rounds ``h * r`` and ``y`` to x's dtype, which is
what vLLM's static kernels quantize. Then ``y`` is quantized exactly as `QUANTIZE` does it."""

SILU_QUANTIZE: Final = Table(
    "silu_and_mul_quant",
    SiluQuantize,
    Kernel("tile", (platform("cuda", "hip"), SUPPORTED), plan_silu_quantize),
    Kernel("host", (platform("host"), SCALED_BY_ROWS), host.plan_silu_quantize),
)
"""``y = silu(gate) * up`` in fp32 with ``silu(v) = v / (1 + exp(-v))`` within 6 ulp, or, where it is below 2**-110,
within ``|v| * 2**-118``; -Inf gives NaN, as the formula does. ``round_intermediate`` rounds ``silu(gate)`` and ``y`` to
x's dtype. Then ``y`` is quantized exactly as `QUANTIZE` does it."""
