"""Plans a call without making it, for a device that need not be in this machine, so that its kernels are known."""

from collections.abc import Callable
from typing import Any

from fp8core.core.calls import Described
from fp8core.core.explaining import ArraySpec, ExplainRequest, answer_of
from fp8core.target import Target


class PlanRequest(ExplainRequest):
    """Passed as the stream of a call, makes the operation plan the call."""

    def answer(self, described: Described) -> list[ArraySpec]:
        """Plan the launch of the call, and the one that reads the weight early; return the new results."""
        planned = described.plan()
        if planned.prefetching is not None:
            planned.prefetching()
        return [ArraySpec(new.shape, new.dtype, strides=new.strides) for new in described.results.values()]


def plan_ahead(function: Callable[..., Any], target: Target, *args: Any, **kwargs: Any) -> list[ArraySpec]:
    """Plan the call ``function(*args, **kwargs)``, whose arrays are specs, for a target whose device is `ABSENT`.

    Its kernels are in `fp8core.runtime.jit.ASKED` afterwards, unless an equal call was planned before. Return its
    results, in the order of its operands.
    """
    made: list[ArraySpec] = answer_of(function, PlanRequest(target), *args, **kwargs)
    return made
