"""Sums the rows of each token, with a weight for each."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import TYPE, ceil_div, column_tiling, power_of_two
from fp8core.kernels.requirements import COLUMNS_IN_32_BITS, ON_A_GPU, ON_THE_HOST
from fp8core.problem import MoeUnpermute
from fp8core.runtime import jit
from fp8core.runtime.args import Int32, Int64, Pointer
from fp8core.runtime.launches import Launcher
from fp8core.runtime.plans import MoeUnpermuteNumbers, Plan, arguments, nothing
from fp8core.table import Kernel, Launch, Table

MANY_CHOICES: Final = 5
"""From so many choices of a token on, blocks have 128 threads, of which more run at a time. With fewer, blocks of 256
need not be started as often (experiments/2026-11-routing)."""
MOST_AT_ONCE: Final = 8
"""Rows that a thread has loaded before it adds the first, if all blocks run at a time."""
FEWER_AT_ONCE: Final = 4
"""The same for more blocks, of which more run at a time if their threads have fewer registers."""
BLOCKS_AT_ONCE: Final = 7
"""Blocks of a multiprocessor that run at a time with `MOST_AT_ONCE`."""


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
    vector, threads = max(1, p.alignment // ITEMSIZE[p.y]), 128 if p.each >= MANY_CHOICES else 256
    across, column_tiles = column_tiling(ceil_div(p.cols, vector), threads)

    def loading(at_once: int) -> Launcher:
        return jit.prepare(
            p.target,
            "moe/unpermute",
            "unpermute",
            {
                "FP8_Y": TYPE[p.y],
                "FP8_WEIGHTS": TYPE[p.weights] if p.weights else -1,
                "FP8_OUT": TYPE[p.out],
                "FP8_VECTOR": vector,
                "FP8_AT_ONCE": min(at_once, power_of_two(p.each)),
                "FP8_ACROSS": across,
                "FP8_THREADS": threads,
            },
            UnpermuteArgs,
            block=threads,
            programmatic=True,
        )

    few, many = loading(MOST_AT_ONCE), loading(FEWER_AT_ONCE)

    def bind(numbers: MoeUnpermuteNumbers) -> Launch:
        blocks = column_tiles * ceil_div(numbers.tokens, threads // across)
        given = arguments(UnpermuteArgs, numbers, each=p.each, cols=p.cols, column_tiles=column_tiles)
        launcher = few if blocks <= BLOCKS_AT_ONCE * p.target.multiprocessors else many
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
