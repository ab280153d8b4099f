"""Conversion to the other E4M3 format with the same real values."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import Normalize
from fp8core.runtime import jit
from fp8core.runtime.args import Int64, Pointer
from fp8core.runtime.plans import NormalizeNumbers, Plan, arguments
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256
VECTORS_IN_FLIGHT: Final = 2
"""Vectors of a thread; NORMALIZE_VECTORS in the source."""


class NormalizeArgs(NamedTuple):
    """The arguments of cuda_src/weights/normalize.cuh."""

    weight: Pointer
    out: Pointer
    code_count: Int64
    scale: Pointer
    scale_out: Pointer
    scale_count: Int64
    input_scale: Pointer
    input_scale_out: Pointer
    input_scale_count: Int64


def plan_normalize(problem: Normalize) -> Plan[NormalizeNumbers]:
    """Return the plan of `NORMALIZE`; ``weight`` is contiguous."""
    vector = 16 if problem.alignment >= 16 else 1
    codes_a_block = THREADS * VECTORS_IN_FLIGHT * vector
    launcher = jit.prepare(
        problem.target,
        "weights/normalize",
        "normalize",
        {"FP8_TO_FNUZ": int(problem.dtype == "float8_e4m3fn"), "FP8_VECTOR": vector, "FP8_THREADS": THREADS},
        NormalizeArgs,
        block=THREADS,
        programmatic=True,
    )

    def bind(numbers: NormalizeNumbers) -> Launch:
        grid = (max(1, ceil_div(numbers.code_count, codes_a_block)), 1, 1)
        return launcher.bind_args(grid, arguments(NormalizeArgs, numbers))

    return Plan(NormalizeNumbers, bind)


NORMALIZE: Final = Table(
    "normalize",
    Normalize,
    Kernel("normalize", (ON_A_GPU,), plan_normalize),
    Kernel("host", (ON_THE_HOST,), host.plan_normalize),
)
"""fn to fnuz: 0x80 becomes 0x00, 0x7f and 0xff become 0x80, scales double. fnuz to fn: 0x80 becomes 0x7f, 0x7f and
0xff (±240) become 0x7e and 0xfe (±448), scales halve. All other codes stay the same. One launch converts codes and
scales, in place or not."""
