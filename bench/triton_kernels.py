"""Quantization in Triton, a baseline of bench.quantize. Triton comes with PyTorch for GPUs."""

from collections.abc import Callable
from typing import Any, Final

import torch
import triton
import triton.language as tl

PIECE: Final = 4096
"""The elements per program, with a given scale."""
GROUPS: Final = 16
"""The groups per program."""
LARGEST: Final = tl.constexpr(448.0)


@triton.jit
def _encoded(values, data):
    return tl.clamp(values, -LARGEST, LARGEST).to(data.dtype.element_ty)


@triton.jit
def _static(x, data, scale, count, piece: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * piece + tl.arange(0, piece)
    values = tl.load(x + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(data + at, _encoded(values * (1.0 / tl.load(scale)), data), mask=at < count)


@triton.jit
def _token(x, data, scale, cols, width: tl.constexpr):
    row, col = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    values = tl.load(x + row * cols + col, mask=col < cols, other=0.0).to(tl.float32)
    found = tl.maximum(tl.math.div_rn(tl.max(tl.abs(values), 0), LARGEST), 1.0 / (LARGEST * 512))
    tl.store(scale + row, found)
    tl.store(data + row * cols + col, _encoded(tl.math.div_rn(values, found), data), mask=col < cols)


@triton.jit
def _groups(x, data, scale, row_stride, col_stride, count, across, each: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * each + tl.arange(0, each)
    at, inside = group[:, None] * 128 + tl.arange(0, 128)[None, :], (group < count)[:, None]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    found = tl.math.div_rn(tl.maximum(tl.max(tl.abs(values), 1), 1e-10), LARGEST)
    tl.store(scale + group // across * row_stride + group % across * col_stride, found, mask=group < count)
    tl.store(data + at, _encoded(tl.math.div_rn(values, found[:, None]), data), mask=inside)


def static(x: torch.Tensor, result: Any) -> None:
    """Quantize with a given scale."""
    _static[(triton.cdiv(x.numel(), PIECE),)](x, result.data, result.scale, x.numel(), piece=PIECE)


def token(x: torch.Tensor, result: Any) -> None:
    """Quantize with a scale for each row, which one program holds in registers."""
    rows, cols = x.shape
    width = triton.next_power_of_2(cols)
    _token[(rows,)](x, result.data, result.scale, cols, width=width, num_warps=max(1, min(16, width // 512)))


def groups(x: torch.Tensor, result: Any) -> None:
    """Quantize with a scale for each 128 columns of a row; the columns are a multiple of 128."""
    rows, cols = x.shape
    across = cols // 128
    grid = (triton.cdiv(rows * across, GROUPS),)
    _groups[grid](x, result.data, result.scale, *result.scale.stride(), rows * across, across, each=GROUPS)


QUANTIZERS: Final[dict[str, Callable[[torch.Tensor, Any], None]]] = {
    "static": static,
    "token": token,
    "1x128": groups,
    "1x128 mn": groups,
}
