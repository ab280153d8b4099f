"""Expands one scale per shard to one scale per row."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.kernels.weights.shards import FEW_SHARDS, capacity_of, ends_of
from fp8core.problem import Expand
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int32Array, Pointer
from fp8core.runtime.plans import ExpandNumbers, Plan, arguments, nothing
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256


class ExpandArgs(NamedTuple):
    """The arguments of cuda_src/weights/expand.cuh."""

    scales: Pointer
    scales_count: Int32
    shards: Int32Array
    out: Pointer
    rows: Int32


def plan_expand(problem: Expand) -> Plan[ExpandNumbers]:
    """Return the plan of `EXPAND`: ``out`` has ``sum(widths)`` contiguous fp32 numbers."""
    capacity = capacity_of(problem.shards)
    launcher = jit.prepare(
        problem.target,
        "weights/expand",
        "expand",
        {"FP8_SHARDS": capacity, "FP8_THREADS": THREADS},
        ExpandArgs,
        block=THREADS,
        shards=capacity,
    )

    def bind(numbers: ExpandNumbers) -> Launch:
        rows = sum(numbers.widths)
        given = arguments(ExpandArgs, numbers, shards=ends_of(numbers.widths, capacity), rows=rows)
        return launcher.bind_args((ceil_div(rows, THREADS), 1, 1), given) if rows else nothing

    return Plan(ExpandNumbers, bind)


EXPAND: Final = Table(
    "expand",
    Expand,
    Kernel("expand", (ON_A_GPU, FEW_SHARDS), plan_expand),
    Kernel("host", (ON_THE_HOST,), host.plan_expand),
)
"""``out[row] = scale of the shard that the row belongs to``."""
