"""Finds the framework of an array, through the modules already in `sys.modules`; never imports a framework."""

import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Final, ParamSpec, TypeVar

from fp8core.interop.tensor import Framework

P = ParamSpec("P")
F = TypeVar("F", bound=Framework)
_FOUND: Final[dict[type, Framework | None]] = {}


def only_instance(make: Callable[P, F]) -> Callable[P, F]:
    """Cache what ``make`` returns, like `functools.cache`; threads that call it at once get one and the same framework.

    Frameworks are compared by identity: arrays of two instances would be ordered like those of two frameworks.
    """
    made: dict[Any, F] = {}

    def first(*arguments: P.args, **keywords: P.kwargs) -> F:
        return made.setdefault(arguments, make(*arguments, **keywords))

    return cache(first)  # type: ignore[return-value]


def framework_of(cls: type) -> Framework | None:
    """Return the framework of arrays of type ``cls``, or None if they support no known protocol."""
    try:
        return _FOUND[cls]
    except KeyError:
        return _FOUND.setdefault(cls, _find(cls))


def _find(cls: type) -> Framework | None:
    if _is(cls, "torch", "Tensor"):
        from fp8core.interop import torch_tensors

        return torch_tensors.framework()
    if _is(cls, "cupy", "ndarray"):
        from fp8core.interop import cupy_arrays

        return cupy_arrays.framework()
    if _is(cls, "jax", "Array") or _is(cls, "jax.core", "Tracer"):
        from fp8core.interop import jax_arrays

        return jax_arrays.framework()
    if _is(cls, "numpy", "ndarray"):
        from fp8core.interop import numpy_arrays

        return numpy_arrays.framework()
    if hasattr(cls, "__dlpack_c_exchange_api__"):
        from fp8core.interop import dlpack_exchange

        exchange = dlpack_exchange.framework(cls)
        if exchange.allocates:
            return exchange
    if hasattr(cls, "__dlpack__") and hasattr(cls, "__dlpack_device__"):
        from fp8core.interop import dlpack_capsule

        return dlpack_capsule.framework()
    if hasattr(cls, "__cuda_array_interface__"):
        from fp8core.interop import cuda_array

        return cuda_array.framework()
    return None


def _is(cls: type, module: str, attribute: str) -> bool:
    known = getattr(sys.modules.get(module), attribute, None)
    return isinstance(known, type) and issubclass(cls, known)
