"""Plans a call without making it, for a device that need not be in this machine, so that its kernels are known."""

from collections.abc import Callable
from typing import Any

from fp8core.core.calls import Described
from fp8core.core.explaining import ExplainRequest, answer_of
from fp8core.problem import Target


class PlanRequest(ExplainRequest):
    """Passed as the stream of a call, makes the operation plan the call."""

    def answer(self, described: Described) -> None:
        """Plan the launch of the call, and the one that reads the weight early."""
        planned = described.plan()
        if planned.prefetching is not None:
            planned.prefetching()


def plan_ahead(function: Callable[..., Any], target: Target, *args: Any, **kwargs: Any) -> None:
    """Plan the call ``function(*args, **kwargs)``, whose arrays are specs, for a target whose device is `ABSENT`.

    Its kernels are in `fp8core.runtime.jit.ASKED` afterwards, unless an equal call was planned before.
    """
    answer_of(function, PlanRequest(target), *args, **kwargs)
