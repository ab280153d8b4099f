"""The row layout of FP8 weights, which keeps products of any k fast, and of inputs."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting

from fp8core.errors import LayoutError
from fp8core.ops.linear_scratch import ROW_ALIGNMENT

PACKED_ON: Final = ("cpu", "meta")
"""Devices on which a weight's rows are stored without padding."""


def empty_codes(shape: Sequence[int], dtype: torch.dtype, device: Any = None) -> Tensor:
    """Return an uninitialized FP8 tensor ``[..., n, k]``; on a GPU, each row is padded to a multiple of 16 bytes."""
    *outer, k = shape
    place = torch.get_default_device() if device is None else torch.device(device)
    gap = 0 if place.type in PACKED_ON else -k % ROW_ALIGNMENT
    made = torch.empty((*outer, k + gap), dtype=dtype, device=place)
    return made[..., :k] if gap else made


def align_rows_(weight: Tensor) -> None:
    """Copy the codes of a GPU parameter to memory whose rows begin at multiples of 16 bytes; the parameter stays.

    Rows that are aligned already are left alone, and so are parameter subclasses, such as sharded parameters.
    """
    plain = type(weight) is nn.Parameter and type(weight.data) is Tensor
    if not plain or weight.device.type in PACKED_ON or not weight.numel() or weight.stride(-2) % ROW_ALIGNMENT == 0:
        return
    made = empty_codes(weight.shape, weight.dtype, weight.device)
    made.view(torch.uint8).copy_(weight.detach().view(torch.uint8))
    weight.data = made


def refuse_gaps_in_exports(weight: Tensor) -> None:
    """Refuse a weight with padded rows while torch.export traces.

    Raises:
        LayoutError: torch.export traces, and the rows are padded.
    """
    if exporting() and not weight.is_contiguous():
        stride, k = weight.stride(-2), weight.shape[-1]
        raise LayoutError(
            f"weight needs rows without gaps in torch.export, whose files lose them, got rows {stride} bytes apart "
            f"for k = {k}: export the model on the CPU"
        )


def exporting() -> bool:
    """Return whether torch.export traces, as a constant: in graphs, ``is_exporting`` is always true (torch 2.11)."""
    return is_exporting()


# What torch.compiler.assume_constant_result sets:
exporting._dynamo_marked_constant = True  # type: ignore[attr-defined]


def by_rows(x: Tensor) -> Tensor:
    """Return an input whose rows products read, or a contiguous copy of it; as it is if calls refuse it in any case."""
    refused = x.layout != torch.strided or x.is_nested or not x.dim()
    return x if refused or is_read_by_rows(x.shape, x.stride()) else x.contiguous()


def is_read_by_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether each row is contiguous and all rows, over all leading axes, have one stride."""
    apart = zip(strides[:-2], strides[1:-1], shape[1:-1], strict=True)
    return strides[-1] == 1 and all(outer == inner * extent for outer, inner, extent in apart)
