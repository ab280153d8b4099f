"""The codes of a layer's weight: memory for them, and how they are pickled."""

from typing import Any, Final
from weakref import WeakValueDictionary

from fp8core import interop
from fp8core.errors import LayoutError
from fp8core.forks import ForkSafeLock
from fp8core.interop import Operand, dtype_name
from fp8core.kernels.encodings import round_up
from fp8core.ops.linear_scratch import ROW_ALIGNMENT
from fp8core.problem import FORMATS, HIGH_PRECISION


def aligned_rows(weight: Any, dtype: Any) -> Any:
    """Return an uninitialized FP8 array ``[n, k]`` for the codes of ``weight``, with rows aligned to 16 bytes.

    None if contiguous rows are aligned already, on the host, and for frameworks whose arrays cannot have gaps.
    """
    at = interop.view(weight, Operand("weight", *HIGH_PRECISION))
    n, k = at.shape
    if k % ROW_ALIGNMENT == 0 or at.target.platform == "host" or at.framework.immutable:
        return None
    stride = round_up(k, ROW_ALIGNMENT)
    name, stream = dtype_name(dtype, "dtype", FORMATS), at.framework.stream(at.target)
    made = at.framework.empty((n, k), name, at.target, (stride, 1))
    return at.framework.wrap(made.array, stream)


class Codes:
    """A weight on its way into a pickle, which gets its bytes: not every pickle knows a framework's FP8 arrays."""

    def __init__(self, weight: Any) -> None:
        self.weight = weight

    def __reduce__(self) -> tuple[Any, ...]:
        """Have the weight itself made of the bytes, once for each object of this class that a pickle meets."""
        return interop.reinterpret, (interop.reinterpret(self.weight, "uint8"), dtype_name(self.weight.dtype))


_UNDER_WAY: Final[WeakValueDictionary[int, Codes]] = WeakValueDictionary()
"""By the id of the weight, which they hold, as long as a pickle holds them."""
_LOCK: Final = ForkSafeLock()
"""Of `_UNDER_WAY`."""


def codes_to_pickle(weight: Any) -> Any:
    """Return what a pickle holds in the place of a weight: one object for all layers of it, which stays one so."""
    try:
        interop.reinterpret(weight, "uint8")
    except LayoutError:  # JAX, whose arrays have one dtype for life, and which pickles FP8
        return weight
    with _LOCK.held:
        known = _UNDER_WAY.get(id(weight))
        if known is None:
            _UNDER_WAY[id(weight)] = known = Codes(weight)
        return known
