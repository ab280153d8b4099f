"""The common parts of quantizing kernels: arguments, constants and preparation."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fp8core.kernels.encodings import FORMAT, SCALE_FORMAT, TYPE, ceil_div, mode_of
from fp8core.problem import Quantize
from fp8core.runtime import jit, launches, limits
from fp8core.runtime.args import Float32, Int64, Pointer
from fp8core.runtime.plans import Plan, QuantizeNumbers, arguments, nothing
from fp8core.table import Launch


class QuantizeArgs(NamedTuple):
    """The arguments of every quantizing kernel; strides are in elements."""

    x: Pointer
    x_stride: Int64
    data: Pointer
    data_stride: Int64
    scales: Pointer
    scale_row_stride: Int64
    scale_col_stride: Int64
    rows: Int64
    rows_padded: Int64
    upper_address: Pointer
    upper_value: Float32
    eps: Float32
    cols: Int64


def prepare(
    problem: Quantize,
    kernel: str,
    threads: int,
    constants: Mapping[str, int],
    *,
    shared_bytes: int = 0,
    cluster: int = 1,
    cooperative: bool = False,
) -> launches.Launcher:
    """Return one of the kernels, compiled with ``constants`` and the constants of all of them."""
    common = {
        "FP8_INPUT": TYPE[problem.x],
        "FP8_FORMAT": FORMAT[problem.data],
        "FP8_MODE": mode_of(problem),
        "FP8_SCALE_FORMAT": SCALE_FORMAT[problem.scale_format],
        "FP8_GROUP_ROWS": problem.group_shape.rows,
        "FP8_GROUP_COLS": problem.group_shape.cols,
        "FP8_THREADS": threads,
    }
    return jit.prepare(
        problem.target,
        f"quantize/{kernel}",
        f"quantize_{kernel}",
        {**common, **constants},
        QuantizeArgs,
        block=threads,
        shared_bytes=shared_bytes,
        cluster=cluster,
        programmatic=True,
        cooperative=cooperative,
    )


Chosen = tuple[launches.Launcher, launches.Dim3]


def plan_of(cols: int, choose: Callable[[QuantizeNumbers], Chosen]) -> Plan[QuantizeNumbers]:
    """Return a plan for whose numbers ``choose`` gives the kernel and the grid of a launch."""

    def bind(numbers: QuantizeNumbers) -> Launch:
        run, grid = choose(numbers)
        return run.bind_args(grid, arguments(QuantizeArgs, numbers, cols=cols)) if all(grid) else nothing

    return Plan(QuantizeNumbers, bind)


def folded(blocks: int) -> tuple[int, int]:
    """Return a number of blocks along the rows, folded over y and z of a grid."""
    folds = max(ceil_div(blocks, limits.BLOCKS_ALONG_YZ), 1)
    return ceil_div(blocks, folds), folds
