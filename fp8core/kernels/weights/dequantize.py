"""The kernels that dequantize: ``out = float(q) * scale``, computed in fp32 and rounded once."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, ceil_div, column_tiling
from fp8core.kernels.requirements import COLUMNS_IN_32_BITS, ON_A_GPU, ON_THE_HOST
from fp8core.problem import Dequantize
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.runtime.plans import DequantizeNumbers, Plan, arguments, nothing
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256
ROWS_IN_FLIGHT: Final = 2
"""Rows of a thread; DEQUANTIZE_ROWS in the source."""


class DequantizeArgs(NamedTuple):
    """The arguments of cuda_src/weights/dequantize.cuh; strides are in elements."""

    q: Pointer
    q_stride: Int64
    scale: Pointer
    scale_row_stride: Int64
    scale_col_stride: Int64
    out: Pointer
    out_stride: Int64
    rows: Int64
    cols: Int32
    column_tiles: Int32


def plan_dequantize(problem: Dequantize) -> Plan[DequantizeNumbers]:
    """Return the plan of `DEQUANTIZE`; a result below 2**-126 may become a zero of its sign."""
    vector = max(1, min(problem.alignment, 16) // ITEMSIZE[problem.out])
    across, column_tiles = column_tiling(ceil_div(problem.cols, vector), THREADS)
    rows_a_block = THREADS // across * ROWS_IN_FLIGHT
    launcher = jit.prepare(
        problem.target,
        "weights/dequantize",
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
        DequantizeArgs,
        block=THREADS,
        programmatic=True,
    )

    def bind(numbers: DequantizeNumbers) -> Launch:
        blocks = column_tiles * ceil_div(numbers.rows, rows_a_block)
        given = arguments(DequantizeArgs, numbers, cols=problem.cols, column_tiles=column_tiles)
        return launcher.bind_args((blocks, 1, 1), given) if blocks else nothing

    return Plan(DequantizeNumbers, bind)


DEQUANTIZE: Final = Table(
    "dequantize",
    Dequantize,
    Kernel("dequantize", (ON_A_GPU, COLUMNS_IN_32_BITS), plan_dequantize),
    Kernel("host", (ON_THE_HOST,), host.plan_dequantize),
)
