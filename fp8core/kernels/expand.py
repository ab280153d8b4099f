"""One scale a shard, written once a row."""

from itertools import accumulate
from typing import Final

from fp8core import host
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.requirements import platform
from fp8core.kernels.weights import CAPACITIES, NO_END, THREADS, shards_up_to
from fp8core.problem import Expand
from fp8core.runtime import jit
from fp8core.table import Kernel, Launch, Table


def plan_expand(problem: Expand) -> Launch:
    """Return ``launch(stream, scales, scales_count, widths, out)``: out has ``sum(widths)`` contiguous fp32."""
    capacity = next(c for c in CAPACITIES if problem.shards <= c)
    launcher = jit.prepare(
        problem.target,
        "expand",
        "expand",
        {"FP8_SHARDS": capacity, "FP8_THREADS": THREADS},
        f"Pi{capacity}iPi",
        block=THREADS,
    )

    def launch(stream: int, scales: int, scales_count: int, widths: tuple[int, ...], out: int) -> None:
        ends = tuple(accumulate(widths))
        rows = ends[-1]
        ends += (NO_END,) * (capacity - len(ends))
        launcher(stream, (ceil_div(rows, THREADS), 1, 1), scales, scales_count, *ends, out, rows)

    return launch


EXPAND: Final = Table(
    "expand",
    Expand,
    Kernel("rows", (platform("cuda", "hip"), shards_up_to(CAPACITIES[-1])), plan_expand),
    Kernel("host", (platform("host"),), host.plan_expand),
)
"""``out[row] = scale of the shard that the row belongs to``."""
