"""Tests whether all scales of an array are equal."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from fp8core import interop
from fp8core.core import scale_shapes
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec, contiguous_count
from fp8core.errors import ShapeError
from fp8core.interop import Operand, eager_only
from fp8core.kernels.weights import ALL_CLOSE
from fp8core.problem import AllClose
from fp8core.runtime import streams
from fp8core.runtime.plans import AllCloseNumbers
from fp8core.types import Array, Stream


@eager_only
def all_close_1d(x: Array, *, stream: Stream | None = None) -> bool:
    """Return whether all scales equal the first one, with rtol 1e-5 and atol 0: one reduction, one synchronisation.

    The result is True if x has no elements, and False if any element is NaN. The name is vLLM's (w8a8_utils).

    Args:
        x: a float32 array with one axis.
        stream: the stream to launch on, as for `quantize`.

    Raises:
        DTypeError, ShapeError, LayoutError, DeviceError: before anything is launched.
        DeviceError: the stream is being captured into a graph, which stays valid: the call waits for its result.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.all_close_1d(np.array([0.5, 0.5], np.float32))
        True
    """
    arrays, count = ALL_CLOSE_CALLS((x, None), None, stream)
    return not count or read_flag(x, arrays[1], stream)


def read_flag(x: Any, flag: Any, stream: Any) -> bool:
    """Wait for the work on the stream, and return the flag that the reduction has written."""
    for stand_in in tuple(READING.values()):  # an import may add one meanwhile
        value = stand_in(flag)
        if value is not None:
            return value
    seen, written = interop.view(x, "x", interop.LaunchStream(stream)), interop.view(flag, "result")
    return streams.read_int32(written.pointer, seen.target, interop.stream_of(seen, stream)) != 0


READING: Final[dict[str, Callable[[Any], bool | None]]] = {}
"""By framework: reads a flag without memory, or returns None for any other flag. Set by the framework's module."""


def _describe_all_close(operands: Sequence[TensorSpec | None], options: None) -> Described:
    del options
    x = operands[0]
    assert x is not None
    scale_shapes.check_scale_dtype(x)
    if len(x.shape) != 1:
        raise ShapeError(f"x needs one axis, got shape {x.shape}")
    count = contiguous_count(x)
    problem = AllClose(x.target)

    def plan() -> Planned:
        if not count:
            return Planned(None)
        return Planned(ALL_CLOSE.plan(problem).bind(AllCloseNumbers(count)))

    return Described({1: NewArray((1,), "float32")}, plan, lambda: ALL_CLOSE.explain(problem), count)


ALL_CLOSE_CALLS: Final = Operation((Operand("x", "float32"), "result"), _describe_all_close)
