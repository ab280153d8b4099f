"""The dtypes of a linear layer's input: the casts of torch.autocast, and the refusal of FP8 without its scale."""

from collections.abc import Callable
from typing import Final, TypeGuard, TypeVar

import torch
from torch import Tensor

from fp8core.errors import DTypeError
from fp8core.interop import dtype_name
from fp8core.problem import FORMATS

T = TypeVar("T")
CODES: Final = frozenset(getattr(torch, name) for name in FORMATS)
"""The dtypes of FP8."""
CAST: Final = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that autocast casts: neither float64 nor integers."""
any_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled


def as_autocast(x: T) -> T | Tensor:
    """Return the input of a linear layer, cast to autocast's dtype if autocast is on for the device of x."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if _is_cast(x) else x


def bias_of_autocast(bias: Tensor | None, x: object) -> Tensor | None:
    """Return the bias for an input that autocast has cast: a float32 bias as it is, any other in the input's dtype."""
    if bias is None or bias.dtype == torch.float32 or not _is_cast(x) or bias.dtype == x.dtype:
        return bias
    return bias.to(x.dtype)


def _is_cast(x: object) -> TypeGuard[Tensor]:
    """Return whether autocast casts an operand: whether it is on for the operand's own device."""
    # The meta device has no autocast.
    if not any_autocast() or not isinstance(x, Tensor) or x.dtype not in CAST or x.is_meta:
        return False
    return torch.is_autocast_enabled(x.device.type)


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
