"""Requantization of fused shards to the largest of their scales; `REQUANTIZE` documents exactness and corner cases."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import FORMAT, ceil_div, column_tiling
from fp8core.kernels.requirements import COLUMNS_IN_32_BITS, ON_A_GPU, ON_THE_HOST
from fp8core.kernels.weights.shards import FEW_SHARDS, capacity_of, ends_of
from fp8core.problem import Requantize
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int32Array, Int64, Pointer
from fp8core.runtime.plans import Plan, RequantizeNumbers, arguments
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256
ROWS_IN_FLIGHT: Final = 2
"""Rows of a thread; REQUANTIZE_ROWS in the source."""


class RequantizeArgs(NamedTuple):
    """The arguments of cuda_src/weights/requantize.cuh."""

    weight: Pointer
    weight_stride: Int64
    scales: Pointer
    scales_count: Int32
    shards: Int32Array
    out: Pointer
    out_stride: Int64
    max_scale: Pointer
    rows: Int32
    cols: Int32
    column_tiles: Int32


def plan_requantize(problem: Requantize) -> Plan[RequantizeNumbers]:
    """Return the plan of `REQUANTIZE`.

    A launch writes ``max_scale``, and ``out`` if it is another array than ``weight``, or otherwise where codes change.
    """
    vector = 16 if problem.alignment >= 16 else 1
    capacity = capacity_of(problem.shards)
    across, column_tiles = column_tiling(ceil_div(problem.cols, vector), THREADS)
    rows_a_block = THREADS // across * ROWS_IN_FLIGHT
    launcher = jit.prepare(
        problem.target,
        "weights/requantize",
        "requantize",
        {
            "FP8_FORMAT": FORMAT[problem.dtype],
            "FP8_SHARDS": capacity,
            "FP8_VECTOR": vector,
            "FP8_ACROSS": across,
            "FP8_THREADS": THREADS,
        },
        RequantizeArgs,
        block=THREADS,
        programmatic=True,
        shards=capacity,
    )

    def bind(numbers: RequantizeNumbers) -> Launch:
        rows, cols, shards = sum(numbers.widths), problem.cols, ends_of(numbers.widths, capacity)
        given = arguments(RequantizeArgs, numbers, shards=shards, rows=rows, cols=cols, column_tiles=column_tiles)
        return launcher.bind_args((column_tiles * max(1, ceil_div(rows, rows_a_block)), 1, 1), given)

    return Plan(RequantizeNumbers, bind)


REQUANTIZE: Final = Table(
    "requantize",
    Requantize,
    Kernel("requantize", (ON_A_GPU, COLUMNS_IN_32_BITS, FEW_SHARDS), plan_requantize),
    Kernel("host", (ON_THE_HOST,), host.plan_requantize),
)
"""``code = encode(RN(RN(float(code) * scale of its shard) * RN(1 / max_scale)))``, clamped, in one launch.

``max_scale`` is the largest scale, including those of zero-width shards, or NaN if any is NaN. The codes stay the same

- in shards whose scale is ``max_scale``;
- everywhere with one scale, or if a scale after the first is the mark "unset" (the lowest float, or anything
  ≤ -448: the checkpoint was fused on disk): ``max_scale`` is then the first scale;
- everywhere if ``max_scale`` is 0 (or below 2**-126), infinite or NaN: no code could represent it better.

Formula: static quantization (vLLM's ``requantize_with_max_scale``) of the shard dequantized in fp32, not fp16.
"""
