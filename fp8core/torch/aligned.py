"""Memory for FP8 weights of layers, in which rows begin where products of any k are fast."""

from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8core.ops.linear_scratch import ROW_ALIGNMENT

PACKED_ON: Final = ("cpu", "meta")
"""Devices on which rows of codes follow each other without gaps."""


def empty_codes(n: int, k: int, dtype: torch.dtype, device: Any = None) -> Tensor:
    """Return uncleared FP8 ``[n, k]``; on a GPU, rows begin at multiples of 16 bytes, with gaps of less than 16."""
    place = torch.get_default_device() if device is None else torch.device(device)
    gap = 0 if place.type in PACKED_ON else -k % ROW_ALIGNMENT
    made = torch.empty((n, k + gap), dtype=dtype, device=place)
    return made[:, :k] if gap else made


def align_rows_(weight: Tensor) -> None:
    """Move the codes of a parameter on a GPU so that rows begin at multiples of 16 bytes; it stays the same parameter.

    Codes whose rows do are left alone, and so are parameters of other kinds, such as sharded ones.
    """
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    if not plain or weight.device.type in PACKED_ON or not weight.numel() or weight.stride(0) % ROW_ALIGNMENT == 0:
        return
    n, k = weight.shape
    made = empty_codes(n, k, weight.dtype, weight.device)
    made.view(torch.uint8).copy_(weight.detach().view(torch.uint8))
    weight.data = made
