"""Layers of every kind of scales, and what the functions make of their originals."""

import pytest
import torch
from torch import nn

import fp8core
from fp8core.problem import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.torch import GroupedLinear, Linear
from pytorch.tensors import K, N, wide

KINDS = ("channel", None), ("tensor", None), ("block", None), ("channel", 0.03), ("tensor", 0.03)
WEIGHT_GROUPS = {"channel": PER_TOKEN, "tensor": PER_TENSOR, "block": BLOCK_128}
INPUT_GROUPS = {"channel": PER_TOKEN, "tensor": PER_TENSOR, "block": GROUP_128}

kinds = pytest.mark.parametrize(("scheme", "input_scale"), KINDS)


def original(bias=True, dtype=torch.bfloat16, n=N, k=K):
    made = nn.Linear(k, n, bias, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(wide(n, k, seed=1))
        if bias:
            made.bias.copy_(wide(n, seed=4))
    return made


def quantized(scheme, input_scale, **options):
    return Linear.from_linear(original(**options), scheme=scheme, input_scale=input_scale)


def grouped_and_single(weights, scheme, static):
    """Return grouped layers with the weights ``[groups, n, k]``, and a layer for each group."""
    grouped = GroupedLinear.from_weight(weights, scheme=scheme)
    scales = [0.01 * (1 + at) if static else None for at in range(len(weights))]
    if static:
        grouped.input_scale = nn.Parameter(torch.tensor(scales, device=weights.device), requires_grad=False)
    layers = []
    for weight, scale in zip(weights, scales, strict=True):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
        linear.weight.data.copy_(weight)
        layers.append(Linear.from_linear(linear, scheme=scheme, input_scale=scale))
    return grouped, layers


def expected(scheme, input_scale, x, bias=True):
    """Return what the functions make of the original's weight."""
    linear = original(bias, x.dtype)
    q = fp8core.quantize(linear.weight, group_shape=WEIGHT_GROUPS[scheme])
    group = INPUT_GROUPS[scheme] if input_scale is None else PER_TENSOR
    added = None if linear.bias is None else linear.bias.detach()
    return fp8core.linear(x.detach(), q, bias=added, input_scale=input_scale, group_shape=group)
