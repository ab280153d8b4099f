"""Sums the rows of each token, with a weight for each."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import TYPE, ceil_div, column_tiling, power_of_two
from fp8core.kernels.requirements import COLUMNS_IN_32_BITS, ON_A_GPU, ON_THE_HOST
from fp8core.problem import ITEMSIZE, MoeUnpermute
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.runtime.plans import MoeUnpermuteNumbers, Plan, arguments, nothing
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 256
MOST_AT_ONCE: Final = 8
"""Rows that a thread has loaded before it adds the first."""


class UnpermuteArgs(NamedTuple):
    """The arguments of cuda_src/moe/unpermute.cuh; strides are in elements."""

    y: Pointer
    y_stride: Int64
    inverse: Pointer
    weights: Pointer
    each: Int32
    out: Pointer
    out_stride: Int64
    tokens: Int64
    rows: Int32
    cols: Int32
    column_tiles: Int32


def plan_moe_unpermute(p: MoeUnpermute) -> Plan[MoeUnpermuteNumbers]:
    """Return the plan of `MOE_UNPERMUTE`."""
    vector = max(1, p.alignment // ITEMSIZE[p.y])
    across, column_tiles = column_tiling(ceil_div(p.cols, vector), THREADS)
    launcher = jit.prepare(
        p.target,
        "moe/unpermute",
        "unpermute",
        {
            "FP8_Y": TYPE[p.y],
            "FP8_WEIGHTS": TYPE[p.weights] if p.weights else -1,
            "FP8_OUT": TYPE[p.out],
            "FP8_VECTOR": vector,
            "FP8_AT_ONCE": min(MOST_AT_ONCE, power_of_two(max(1, p.each))),
            "FP8_ACROSS": across,
            "FP8_THREADS": THREADS,
        },
        UnpermuteArgs,
        block=THREADS,
        programmatic=True,
    )

    def bind(numbers: MoeUnpermuteNumbers) -> Launch:
        blocks = column_tiles * ceil_div(numbers.tokens, THREADS // across)
        given = arguments(UnpermuteArgs, numbers, each=p.each, cols=p.cols, column_tiles=column_tiles)
        return launcher.bind_args((blocks, 1, 1), given) if blocks else nothing

    return Plan(MoeUnpermuteNumbers, bind)


MOE_UNPERMUTE: Final = Table(
    "moe_unpermute",
    MoeUnpermute,
    Kernel("moe_unpermute", (ON_A_GPU, COLUMNS_IN_32_BITS), plan_moe_unpermute),
    Kernel("host", (ON_THE_HOST,), host.plan_moe_unpermute),
)
"""``out[t] = round(sum of weights[t, j] * y[inverse[t, j]] over j)``: in fp32, in the order of j, each product and
each sum rounded. Places that are no row of y are left out."""
