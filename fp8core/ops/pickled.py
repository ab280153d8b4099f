"""How torch's FP8 tensors are pickled: as bytes, since torch writes pickles of them that it cannot read."""

from typing import Any, Final
from weakref import WeakValueDictionary

from fp8core import interop
from fp8core.errors import DTypeError
from fp8core.forks import ForkSafeLock
from fp8core.interop import dtype_name, framework_of
from fp8core.interop.float8 import DTYPES


class Codes:
    """A tensor of codes on its way into a pickle, which gets its bytes."""

    def __init__(self, codes: Any) -> None:
        self.codes = codes

    def __reduce__(self) -> tuple[Any, ...]:
        """Have the codes themselves made of the bytes, once for each object of this class that a pickle meets."""
        return interop.reinterpret, (interop.reinterpret(self.codes, "uint8"), dtype_name(self.codes.dtype))


_UNDER_WAY: Final[WeakValueDictionary[int, Codes]] = WeakValueDictionary()
"""By the id of the tensor, which they hold, as long as a pickle holds them."""
_LOCK: Final = ForkSafeLock()
"""Of `_UNDER_WAY`."""


def to_pickle(x: Any) -> Any:
    """Return what a pickle holds in the place of ``x``: for a tensor of codes, one object for all its owners.

    Anything else is returned as it is. So an array of another framework stays one array, even if only one of those who
    hold it is an object of fp8core.
    """
    framework = framework_of(type(x))
    if framework is None or framework.name != "torch":
        return x
    try:
        name = dtype_name(x.dtype)
    except DTypeError:  # none that a call would take
        return x
    if name not in DTYPES:
        return x
    with _LOCK.held:
        known = _UNDER_WAY.get(id(x))
        if known is None:
            _UNDER_WAY[id(x)] = known = Codes(x)
        return known
