"""The kernels that give values back: ``out = float(q) * scale``, formed in fp32 and rounded once."""

from typing import Final

from fp8core import host
from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, ceil_div, threads_across
from fp8core.kernels.requirements import platform
from fp8core.problem import ITEMSIZE, Dequantize
from fp8core.runtime import jit
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256
ROWS_IN_FLIGHT: Final = 2
"""Of a thread; DEQUANTIZE_ROWS in the source."""


def plan_dequantize(problem: Dequantize) -> Launch:
    """Return ``launch(stream, q, q_stride, scale, scale_row_stride, scale_col_stride, out, out_stride, rows)``.

    A result below 2**-126 may come as zero of its sign.
    """
    vector = max(1, min(problem.alignment, 16) // ITEMSIZE[problem.out])
    across = threads_across(ceil_div(problem.cols, vector), THREADS)
    cols, column_tiles = problem.cols, ceil_div(problem.cols, across * vector)
    rows_a_block = THREADS // across * ROWS_IN_FLIGHT
    launcher = jit.prepare(
        problem.target,
        "dequantize",
        "dequantize",
        {
            "FP8_FORMAT": FORMAT[problem.q],
            "FP8_OUT": TYPE[problem.out],
            "FP8_VECTOR": vector,
            "FP8_GROUP_ROWS": problem.group_shape.rows,
            "FP8_GROUP_COLS": problem.group_shape.cols,
            "FP8_SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
            "FP8_ACROSS": across,
            "FP8_THREADS": THREADS,
        },
        "PqPqqPqqii",
        block=THREADS,
        programmatic=True,
    )

    def launch(
        stream: int,
        q: int,
        q_stride: int,
        scale: int,
        scale_row_stride: int,
        scale_col_stride: int,
        out: int,
        out_stride: int,
        rows: int,
    ) -> None:
        grid = (column_tiles * ceil_div(rows, rows_a_block), 1, 1)
        strides = (scale_row_stride, scale_col_stride)
        launcher(stream, grid, q, q_stride, scale, *strides, out, out_stride, rows, cols, column_tiles)

    return launch


DEQUANTIZE: Final = Table(
    "dequantize",
    Dequantize,
    Kernel("rows", (platform("cuda", "hip"),), plan_dequantize),
    Kernel("host", (platform("host"),), host.plan_dequantize),
)
