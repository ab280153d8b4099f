"""The dtypes of a linear layer's input and result: torch.autocast, and FP8 with its scale or without."""

from collections.abc import Callable, Container
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from fp8core.dtypes import FORMATS
from fp8core.errors import DTypeError
from fp8core.interop import dtype_name
from fp8core.ops import Quantized

T = TypeVar("T")
CODES: Final = frozenset(getattr(torch, name) for name in FORMATS)
"""The dtypes of FP8."""
CAST: Final = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast casts: neither float64 nor integers."""
any_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled


def expected_dtype(given: Any) -> torch.dtype:
    """Return the dtype of the inputs that a layer expects: the given one, or torch's default if that is None.

    Raises:
        DTypeError: it is no ``torch.dtype``.
    """
    if given is not None and not isinstance(given, torch.dtype):
        raise DTypeError(f"dtype needs a torch.dtype, got {given!r}")
    return torch.get_default_dtype() if given is None else given


def high_precision(given: Any) -> torch.dtype:
    """Return a dtype that inputs and results of layers can have.

    Raises:
        DTypeError: it is no ``torch.dtype``, or another one.
    """
    if given not in CAST:
        raise DTypeError(f"dtype needs one of float32, float16, bfloat16, as a torch.dtype, got {given!r}")
    return given  # type: ignore[no-any-return]


def as_autocast(x: T) -> T | Tensor:
    """Return the input of a linear layer, cast to autocast's dtype if autocast is on for the device of x."""
    dtype = _autocast(x, CAST)
    return x if dtype is None else x.to(dtype)  # type: ignore[attr-defined]


def bias_of_autocast(bias: Tensor | None, x: object) -> Tensor | None:
    """Return the bias for a result in autocast's dtype: a float32 bias as it is, any other in that dtype."""
    dtype = _autocast(x.data, CODES) if isinstance(x, Quantized) else _autocast(x, CAST)
    if bias is None or bias.dtype == torch.float32 or dtype is None:
        return bias
    return bias.to(dtype)


def result_of_codes(q: Quantized[Any, Any], own: torch.dtype) -> torch.dtype:
    """Return the dtype of a layer's result for a `Quantized`: autocast's, or ``own`` where autocast is off."""
    return _autocast(q.data, CODES) or own


def _autocast(x: object, dtypes: Container[torch.dtype]) -> torch.dtype | None:
    """Return autocast's dtype if it is on for the device of a tensor that has one of some dtypes, otherwise None."""
    # The meta device has no autocast.
    if not any_autocast() or not isinstance(x, Tensor) or x.dtype not in dtypes or x.is_meta:
        return None
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else None


def refuse_codes(x: object) -> None:
    """Refuse an FP8 tensor as the input of a layer: something has cast its values, and they have no scale.

    Raises:
        DTypeError: x is an FP8 tensor.
    """
    if isinstance(x, Tensor) and x.dtype in CODES:
        raise DTypeError(
            f"input needs float32, float16, bfloat16 or a Quantized, got {dtype_name(x.dtype)} without its scale: "
            "a model that casts inputs to weight.dtype needs this layer left as it was (exclude)"
        )


def refuse_proxies(x: object) -> None:
    """Refuse what torch.fx traces a model with, which goes through layers that are not of torch.nn.

    Raises:
        DTypeError: it is one.
    """
    if isinstance(x, torch.fx.Proxy):
        raise DTypeError(
            "input needs an array or a Quantized, got a Proxy of torch.fx, whose symbolic_trace does not take FP8 "
            "layers: use torch.export, or a Tracer whose is_leaf_module is true of fp8core.torch.Linear"
        )
