"""How arrays of FP8 codes are pickled: as bytes, since torch writes pickles of FP8 tensors that it cannot read."""

from typing import Any, Final
from weakref import WeakValueDictionary

from fp8core import interop
from fp8core.errors import DTypeError, LayoutError
from fp8core.forks import ForkSafeLock
from fp8core.interop import dtype_name, framework_of
from fp8core.interop.float8 import DTYPES, Float8Array


class Codes:
    """Codes on their way into a pickle, which gets their bytes."""

    def __init__(self, codes: Any) -> None:
        self.codes = codes

    def __reduce__(self) -> tuple[Any, ...]:
        """Have the codes themselves made of the bytes, once for each object of this class that a pickle meets."""
        return interop.reinterpret, (interop.reinterpret(self.codes, "uint8"), dtype_name(self.codes.dtype))


_UNDER_WAY: Final[WeakValueDictionary[int, Codes]] = WeakValueDictionary()
"""By the id of the array, which they hold, as long as a pickle holds them."""
_LOCK: Final = ForkSafeLock()
"""Of `_UNDER_WAY`."""


def to_pickle(x: Any) -> Any:
    """Return what a pickle holds in the place of an array: one object for all its owners, if it is an array of codes.

    Anything else is returned as it is.
    """
    try:
        name = dtype_name(x.dtype)
    except (AttributeError, DTypeError):  # no array, or none that a call would take
        return x
    if name not in DTYPES or not (isinstance(x, Float8Array) or framework_of(type(x))):
        return x
    try:
        interop.reinterpret(x, "uint8")
    except LayoutError:  # JAX, whose arrays have one dtype for life, and which pickles FP8
        return x
    with _LOCK.held:
        known = _UNDER_WAY.get(id(x))
        if known is None:
            _UNDER_WAY[id(x)] = known = Codes(x)
        return known
