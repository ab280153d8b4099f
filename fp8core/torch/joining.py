"""Layers that share an input as one product: their weights are adjacent in memory, so that one launch reads them all.

Examples are q, k and v of an attention, and gate and up of an MLP. The time of a product of few rows is the time to
read its weight, and a small weight does not fill the device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fp8core.core.specs import ALIGNMENT
from fp8core.dtypes import ITEMSIZE
from fp8core.problem import BLOCK_128
from fp8core.torch.adjacent import ADJACENT, are_adjacent
from fp8core.torch.linear import Linear
from fp8core.torch.operators import LIBRARY, OVERLOADS, TAGS
from fp8core.torch.schemas import OPERATORS

T = TypeVar("T")
LINEAR: Final = OVERLOADS["linear", ""]
_LINEAR: Final = next(operator for operator in OPERATORS if operator.name == "linear")
ARRAYS: Final = len(_LINEAR.overloads[0].passed)
"""The number of tensor arguments of the linear operator; the first three are x, weight and weight_scale."""
MOST: Final = 4
"""The most layers of one product: a module may hold many that never share an input, and joining copies a whole run."""
PARAMETERS: Final = {"weight", "weight_scale", "input_scale", "bias"}
_NONE: Final = (None,) * (ARRAYS - 3)


def join_(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Move the weights of layers that may share an input next to each other, in place; values stay the same.

    Candidates are up to four `Linear` children of one module with the same k, without bias or static input scale, and
    with scales per channel or by blocks. While they are moved, memory holds their weights twice.

    Returns:
        The names of the layers whose weights are adjacent now, by group.
    """
    names = {id(module): name for name, module in model.named_modules()}
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    joined = []
    for parent in model.modules():
        own = [layer for layer in parent.children() if isinstance(layer, Linear) and _held_once(layer, holders)]
        for layers in _groups(own):
            apart = not are_adjacent([x.weight for x in layers]) or not are_adjacent([x.weight_scale for x in layers])
            if apart:
                _join(layers)
            joined.append(tuple(names[id(layer)] for layer in layers))
    return tuple(joined)


def _held_once(layer: Linear, holders: Mapping[int, int]) -> bool:
    """Return whether all parameters of a layer are its own, without a parametrization, and its weight no other's."""
    own = layer._parameters
    return own.keys() >= PARAMETERS and holders[id(own["weight"])] == 1


def _groups(layers: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Yield runs of layers that one product can compute."""
    alike: dict[Any, list[Linear]] = {}
    for layer in layers:
        weight = layer.weight
        own = layer._parameters
        lonely = layer.scheme == "tensor" or own["bias"] is not None or own["input_scale"] is not None
        usual = _plain(weight) and _plain(layer.weight_scale) and not weight.is_meta
        if usual and not lonely and weight.numel() and weight.is_contiguous():  # padded rows cannot be joined
            alike.setdefault((layer.in_features, layer.scheme, weight.dtype, weight.device), []).append(layer)
    for several in alike.values():
        yield from runs(several, lambda layer: (layer.weight, layer.weight_scale))


def _plain(parameter: Any) -> bool:
    """Return whether a parameter holds a plain tensor, not a tensor subclass such as FSDP's."""
    return type(parameter.data) is Tensor


def runs(layers: Iterable[T], arrays: Callable[[T], tuple[Any, Any]]) -> Iterator[list[T]]:
    """Yield runs of two to `MOST` layers; each but the last ends on a block boundary and at an aligned address.

    Args:
        layers: layers that differ in their weights only.
        arrays: returns the weight ``[n, k]`` and the scale of a layer.
    """
    run: list[T] = []
    for layer in layers:
        run.append(layer)
        (n, k), scale = arrays(layer)[0].shape, arrays(layer)[1].shape
        whole = n % BLOCK_128[0] == 0 or (scale[0] == n and n > 1)
        if len(run) == MOST or not whole or n * k % ALIGNMENT or scale[0] * scale[1] * ITEMSIZE["float32"] % ALIGNMENT:
            if len(run) > 1:
                yield run
            run = []
    if len(run) > 1:
        yield run


def _join(layers: Sequence[Linear]) -> None:
    codes = torch.cat([layer.weight.detach().view(torch.uint8) for layer in layers]).view(layers[0].weight.dtype)
    scales = torch.cat([layer.weight_scale.detach() for layer in layers])
    row = of_scale = 0
    for layer in layers:
        rows, scale_rows = len(layer.weight), len(layer.weight_scale)
        layer.weight = nn.Parameter(codes[row : row + rows], requires_grad=False)
        layer.weight_scale = nn.Parameter(scales[of_scale : of_scale + scale_rows], requires_grad=False)
        row, of_scale = row + rows, of_scale + scale_rows


def _run(x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], *options: Any) -> Tensor:
    weight, scale = ADJACENT.as_one(weights), ADJACENT.as_one(scales)
    if weight is None or scale is None:
        return torch.cat([LINEAR(x, *pair, *_NONE, *options) for pair in zip(weights, scales, strict=True)], -1)
    made: Tensor = LINEAR(x, weight, scale, *_NONE, *options)
    return made


def _fake(x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], *options: Any) -> Tensor:
    weight, scale = (
        parts[0].new_empty((sum(len(part) for part in parts), *parts[0].shape[1:])) for parts in (weights, scales)
    )
    made: Tensor = LINEAR(x, weight, scale, *_NONE, *options)
    return made


def _define() -> Any:
    options = ", ".join(option.schema for option in _LINEAR.options if option is not None)
    LIBRARY.define(f"linear_joined(Tensor x, Tensor[] weights, Tensor[] weight_scales, {options}) -> Tensor", tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("linear_joined", _run, key)
    LIBRARY.impl("linear_joined", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("fp8core::linear_joined", _fake, lib=LIBRARY)
    return torch.ops.fp8core.linear_joined.default


LINEAR_JOINED: Final = _define()
"""The operator that returns the products of x with several weights, concatenated along the last axis."""
