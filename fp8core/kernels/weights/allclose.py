"""Whether all scales of an array equal the first."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import AllClose
from fp8core.runtime import jit
from fp8core.runtime.args import Int64, Pointer
from fp8core.runtime.plans import AllCloseNumbers, Plan, arguments
from fp8core.table import Kernel, Launch, Table

THREADS: Final = 1024


class AllCloseArgs(NamedTuple):
    """The arguments of cuda_src/weights/all_close.cuh."""

    x: Pointer
    scale_count: Int64
    result: Pointer


def plan_all_close(problem: AllClose) -> Plan[AllCloseNumbers]:
    """Return the plan of `ALL_CLOSE`: ``result`` is one int32, 1 if all scales are close to the first."""
    constants = {"FP8_THREADS": THREADS}
    launcher = jit.prepare(problem.target, "weights/all_close", "all_close", constants, AllCloseArgs, block=THREADS)

    def bind(numbers: AllCloseNumbers) -> Launch:
        return launcher.bind_args((1, 1, 1), arguments(AllCloseArgs, numbers))

    return Plan(AllCloseNumbers, bind)


ALL_CLOSE: Final = Table(
    "all_close",
    AllClose,
    Kernel("all_close", (ON_A_GPU,), plan_all_close),
    Kernel("host", (ON_THE_HOST,), host.plan_all_close),
)
"""Whether every number equals the first or ``|x_i - x_0|`` is finite and at most ``1e-5 * |x_0|``.

The answer is yes for no numbers, and no with a NaN."""
