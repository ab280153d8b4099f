"""Computes with subnormal numbers in threads of XLA, which count them as zeros."""

import ctypes
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final

BYTES: Final = 256
"""More than the ``fenv_t`` of any C library takes."""
DEFAULT: Final = ctypes.c_void_p(-1)
"""``FE_DFL_ENV`` of glibc and musl: the floating-point environment in which a process starts."""
KNOWN: Final = sys.platform == "linux"
"""Whether `DEFAULT` is that of the C library; elsewhere it would be an address that nothing may read."""


def with_subnormals(call: Callable[..., Any], *args: Any) -> None:
    """Make a call in the default floating-point environment, and return to that of the thread.

    XLA's threads on the CPU treat subnormal operands and results as zeros: a scale of 2**-127 (the byte 0 of
    float8_e8m0fnu) would have the reciprocal infinity, and zeros divided by it would be NaN.
    """
    if not KNOWN:
        call(*args)
        return
    library = _library()
    kept = ctypes.create_string_buffer(BYTES)
    library.fegetenv(kept)
    library.fesetenv(DEFAULT)
    try:
        call(*args)
    finally:
        library.fesetenv(kept)


@cache
def _library() -> Any:
    """Return the C library that has ``fesetenv``: it is loaded already, as Python itself needs it."""
    loaded = ctypes.PyDLL(None)
    found = loaded if hasattr(loaded, "fesetenv") else ctypes.PyDLL("libm.so.6")
    for function in (found.fegetenv, found.fesetenv):
        function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    return found
