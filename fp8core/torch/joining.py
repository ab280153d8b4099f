"""Layers of one input as one product: their weights follow each other in memory, so that one launch reads them all.

q, k and v of an attention, gate and up of an MLP: a product of few rows takes as long as its weight takes to be read,
and a small weight does not fill the device.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn

from fp8core.core.specs import ALIGNMENT
from fp8core.problem import BLOCK_128, ITEMSIZE
from fp8core.torch.forms import ENTRIES
from fp8core.torch.joints import JOINTS, follow
from fp8core.torch.linear import Linear
from fp8core.torch.operators import LIBRARY, OVERLOADS, TAGS

T = TypeVar("T")
LINEAR: Final = OVERLOADS["linear", ""]
_ENTRY: Final = next(entry for entry in ENTRIES if entry.name == "linear")
ARRAYS: Final = len(_ENTRY.forms[0].passed)
"""So many arguments of a linear layer's operator are tensors; the first three are x, weight and weight_scale."""
MOST: Final = 4
"""Layers of one product; a module may hold many that never share an input, and each run is there twice for a moment."""
PARAMETERS: Final = {"weight", "weight_scale", "input_scale", "bias"}
_NONE: Final = (None,) * (ARRAYS - 3)


def join_(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Move the weights of layers that may have one input next to each other, in place; values stay the same.

    These are the `Linear` layers that one module holds, of the same extent k, without biases and static scales, per
    channel or by blocks; up to four of them. Their weights are there twice while they are moved.

    Returns:
        The names of layers whose weights follow each other now, by group.
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
            apart = not follow([x.weight for x in layers]) or not follow([x.weight_scale for x in layers])
            if apart:
                _join(layers)
            joined.append(tuple(names[id(layer)] for layer in layers))
    return tuple(joined)


def _held_once(layer: Linear, holders: Mapping[int, int]) -> bool:
    """Return whether all parameters of a layer are its own, without a parametrization, and its weight no other's."""
    own = layer._parameters
    return own.keys() >= PARAMETERS and holders[id(own["weight"])] == 1


def _groups(layers: Sequence[Linear]) -> Iterator[list[Linear]]:
    """Yield runs of layers that can follow each other in one product."""
    alike: dict[Any, list[Linear]] = {}
    for layer in layers:
        weight = layer.weight
        own = layer._parameters
        lonely = layer.scheme == "tensor" or own["bias"] is not None or own["input_scale"] is not None
        usual = _plain(weight) and _plain(layer.weight_scale) and not weight.is_meta
        if usual and not lonely and weight.numel() and weight.is_contiguous():  # with gaps, no next one follows
            alike.setdefault((layer.in_features, layer.scheme, weight.dtype, weight.device), []).append(layer)
    for several in alike.values():
        yield from runs(several, lambda layer: (layer.weight, layer.weight_scale))


def _plain(parameter: Any) -> bool:
    """Return whether a parameter is no subclass of a tensor, as those of FSDP are."""
    return type(parameter.data) is Tensor


def runs(layers: Iterable[T], arrays: Callable[[T], tuple[Any, Any]]) -> Iterator[list[T]]:
    """Yield runs of two and more layers, each of which ends in whole blocks and aligned for kernels, but for the last.

    Args:
        layers: alike in all but their weights.
        arrays: returns weight and scale of one.
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
    weight, scale = JOINTS.of(weights), JOINTS.of(scales)
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
    options = ", ".join(option.schema for option in _ENTRY.options if option is not None)
    LIBRARY.define(f"linear_joined(Tensor x, Tensor[] weights, Tensor[] weight_scales, {options}) -> Tensor", tags=TAGS)
    for key in ("CPU", "CUDA"):
        LIBRARY.impl("linear_joined", _run, key)
    LIBRARY.impl("linear_joined", torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake("fp8core::linear_joined", _fake, lib=LIBRARY)
    return torch.ops.fp8core.linear_joined.default


LINEAR_JOINED: Final = _define()
"""The products of one x with several weights, side by side."""
