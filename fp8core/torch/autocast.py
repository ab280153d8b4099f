"""What torch.autocast asks of a linear layer."""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

CAST: Final = (torch.float32, torch.float16, torch.bfloat16)
"""What autocast casts: not float64, nor numbers that are no floats."""
any_autocast: Final[Callable[[], bool]] = torch._C._is_any_autocast_enabled


def as_autocast(x: Tensor) -> Tensor:
    """Return the input of a linear layer in the dtype that autocast gives it, if it does for the device of x."""
    kind = x.device.type
    if x.dtype not in CAST or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))
