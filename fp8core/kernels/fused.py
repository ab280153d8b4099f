"""Kernels that make values and quantize them in one launch: RMS norm (with or without a residual), SiLU times up.

The numbers are those of the unfused sequence in fp32. Two things are left to a kernel: the order of the sum of squares,
and the last places of ``exp``. So against an oracle a value may be off by 4 ulp of fp32 (with ``round_intermediate``,
where that crosses a tie, by one step of x's dtype), a scale by as much, and a code by one step.
"""

from typing import Final

from fp8core import host, jit
from fp8core.dispatch import Kernel, Launch, Requirement, Table
from fp8core.kernels.requirements import platform
from fp8core.kernels.words import FORMAT, SCALE_FORMAT, TYPE, ceil_div
from fp8core.problem import ITEMSIZE, NormQuantize, SiluQuantize

STATIC: Final = 0
TOKEN: Final = 2
GROUP: Final = 3
"""The modes of cuda_src/common/quantize_scale.cuh."""
MOST_THREADS: Final = 1024
MOST_VECTORS: Final = 3
"""Vectors that a thread keeps in registers; a longer row is read again for each pass."""
TILE: Final = (256, 1)
"""Threads, and vectors a thread, of a block of silu where no scale spans the row."""
WAVE: Final = 64
"""Threads of a block are a multiple of this, a warp on any device."""


def vector_of(problem: NormQuantize | SiluQuantize) -> int:
    """Return how many values a thread makes at a time: 16 bytes of x."""
    return 16 // ITEMSIZE[problem.x]


def row_shape(problem: NormQuantize | SiluQuantize) -> tuple[int, int]:
    """Return (threads, vectors a thread) of a block that owns a row; 0 vectors when registers can't hold it."""
    units = ceil_div(problem.cols, vector_of(problem))
    vectors = ceil_div(units, MOST_THREADS)
    if vectors > MOST_VECTORS:
        return MOST_THREADS, 0
    return ceil_div(ceil_div(units, vectors), WAVE) * WAVE, vectors


def mode_of(problem: NormQuantize | SiluQuantize) -> int:
    """Return the mode of a problem that `SUPPORTED` lets through."""
    if problem.static:
        return STATIC
    return TOKEN if problem.group_shape.cols < 0 else GROUP


def constants_of(problem: NormQuantize | SiluQuantize) -> dict[str, int]:
    """Return the constants that both sources take."""
    return {
        "FP8_X": TYPE[problem.x],
        "FP8_FORMAT": FORMAT[problem.data],
        "FP8_ROUND": int(problem.round_intermediate),
        "FP8_MODE": mode_of(problem),
        "FP8_GROUP_ROWS": problem.group_shape.rows,
        "FP8_GROUP_COLS": problem.group_shape.cols,
        "FP8_SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
        "FP8_ALIGNED": int(problem.alignment >= 16),
    }


def plan_norm_quantize(problem: NormQuantize) -> Launch:
    """Return the launch of `NORM_QUANTIZE`.

    ``launch(stream, x, x_stride, residual, residual_stride, weight, epsilon, data, data_stride, scale,
    scale_row_stride, scale_col_stride, rows, upper, upper_value, eps)``
    """
    threads, vectors = row_shape(problem)
    cols = problem.cols
    launcher = jit.prepare(
        problem.target,
        "norm_quantize",
        "norm_quantize",
        {
            **constants_of(problem),
            "FP8_W": TYPE[problem.weight],
            "FP8_RESIDUAL": int(problem.residual),
            "FP8_VECTORS": vectors,
            "FP8_THREADS": threads,
        },
        "PqPqPfPqPqqPffi",
        block=threads,
        programmatic=True,
    )

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
        launcher(stream, (rows, 1, 1), *inputs, *results, upper, upper_value, eps, cols)

    return launch


def plan_silu_quantize(problem: SiluQuantize) -> Launch:
    """Return the launch of `SILU_QUANTIZE`.

    ``launch(stream, x, x_stride, data, data_stride, scale, scale_row_stride, scale_col_stride, rows, upper,
    upper_value, eps)``
    """
    threads, vectors = row_shape(problem) if mode_of(problem) == TOKEN else TILE
    cols = problem.cols
    column_tiles = ceil_div(cols, threads * vectors * vector_of(problem)) if vectors else 1
    launcher = jit.prepare(
        problem.target,
        "silu_quantize",
        "silu_quantize",
        {**constants_of(problem), "FP8_VECTORS": vectors, "FP8_THREADS": threads},
        "PqPqPqqPffii",
        block=threads,
        programmatic=True,
    )

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
        launcher(stream, (rows * column_tiles, 1, 1), x, x_stride, *results, *limits, cols, column_tiles)

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
"""``y = silu(gate) * up`` in fp32 with ``silu(v) = v / (1 + exp(-v))``, within 4 ulp, ``v`` from 87 on and -0 from -87
down (NaN for -Inf); ``round_intermediate`` rounds ``silu(gate)`` and ``y`` to x's dtype. Then ``y`` is quantized
exactly as `QUANTIZE` does it."""
