"""Tensors of the tests: random ones, weights of layers and of groups, what a file gives back, and what has to be equal."""

import io
import math
from typing import Any

import torch

import fp8core

N, K = 64, 256
GROUPS = 3


def wide(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """Return values that differ from each other, and from those of other seeds."""
    generator = torch.Generator().manual_seed(math.prod(shape) + seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float32).to(dtype)


def saved(layer: Any) -> Any:
    """Return a layer as it comes back from a file."""
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory whose every byte is wrong."""
    size = torch.empty(0, dtype=dtype).itemsize
    return torch.full((*shape, size), 0x5A, dtype=torch.uint8).view(dtype).reshape(shape)


def weight(group: tuple[int, int], n: int = N, k: int = K) -> fp8core.Quantized:
    return fp8core.quantize(wide(n, k, seed=1), group_shape=group)


def stacked(group: tuple[int, int], n: int = N) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of a weight for each group of a grouped product."""
    each = [fp8core.quantize(wide(n, K, seed=seed), group_shape=group) for seed in range(GROUPS)]
    data = torch.stack([one.data.view(torch.uint8) for one in each]).view(torch.float8_e4m3fn)
    return data, torch.stack([one.scale for one in each])


def ends(m: int, end: int) -> torch.Tensor:
    """Return where groups of m rows end, an empty one among them; the last one at row ``end``."""
    return torch.tensor([m // 3, m // 3, end], dtype=torch.int32)


def bits(x: Any) -> Any:
    """Return what has to be equal: dtype, shape, strides and bytes of every tensor, in what holds them."""
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape), x.stride(), x.detach().contiguous().view(-1).view(torch.uint8).tolist()
    if isinstance(x, (tuple, list)):
        return [bits(item) for item in x]
    return x
