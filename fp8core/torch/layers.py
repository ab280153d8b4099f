"""The linear layers of a model, and which of them to quantize."""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import torch
from torch import nn

from fp8core.checkpoint.formats import kinds
from fp8core.checkpoint.formats.selection import Selection, selection
from fp8core.dtypes import HIGH_PRECISION
from fp8core.errors import CheckpointError, DTypeError, LayoutError
from fp8core.interop.names import dtype_spelling
from fp8core.torch.dispatched import Offloaded, has_own_forward, take_hook
from fp8core.torch.linear import Linear

READ_WEIGHTS: Final = nn.MultiheadAttention, nn.TransformerEncoderLayer
"""Modules that pass the weights of their layers to kernels of torch without calling the layers."""
_LINEAR: Final = kinds.LINEAR, kinds.CONV1D, kinds.MAYBE_CONV1D
"""Kinds of names that may be quantized: a name that could be a Conv1D in a file is an ``nn.Linear`` here."""


def check_model(model: object) -> None:
    """Refuse what is no model.

    Raises:
        DTypeError: it is no ``torch.nn.Module``.
    """
    if not isinstance(model, nn.Module):
        raise DTypeError(f"model needs a torch.nn.Module, got {type(model).__name__}")


class Place(NamedTuple):
    """An attribute of a parent module that holds a layer."""

    parent: nn.Module
    attribute: str
    layer: nn.Linear


def replace(places: Sequence[Place], made: nn.Linear) -> None:
    """Put ``made`` in all places of another layer, with the hook that accelerate may have put around that layer."""
    take_hook(made, places[0].layer)
    for place in places:
        setattr(place.parent, place.attribute, made)


def not_finite(weight: torch.Tensor) -> bool:
    """Return whether a weight holds NaN or infinities: the quantized layer would return NaN."""
    return not weight.is_meta and not torch.stack(weight.detach().aminmax()).isfinite().all()  # NaN is both of them


def refused(names: Sequence[str]) -> CheckpointError:
    """Return the error for weights that are `not_finite`, in the words of ``fp8core quantize``."""
    others = f" (and {len(names) - 1} other weights)" if len(names) > 1 else ""
    return CheckpointError(f"{names[0]} needs finite values, got NaN or Inf{others}")


def hooks_of(module: nn.Module) -> list[str]:
    """Return the kinds of hooks of calls and of states that a module has, which one in its place would not have."""
    return [kind for kind, hooks in vars(module).items() if kind.endswith("_hooks") and hooks]


def refuse_additions(name: str, module: nn.Module, own_states: bool = False) -> None:
    """Refuse a module with hooks or a forward of its own, which would be lost with it.

    Args:
        name: its name in the model.
        module: a module that is about to be replaced.
        own_states: whether its class itself registers hooks of states.

    Raises:
        LayoutError: it has some.
    """
    if not all(own_states and "state_dict" in kind for kind in hooks_of(module)):
        raise LayoutError(f"model needs layers without hooks, got some on {name}: remove them first")
    if has_own_forward(module):
        raise LayoutError(f"model needs layers with the forward of their class, got another on {name}")


def layers_of(model: nn.Module) -> dict[str, list[Place]]:
    """Return the linear layers of a model: all places that hold a layer, by its first name."""
    places: dict[int, list[Place]] = {}
    for parent in model.modules():
        for attribute, layer in parent._modules.items():
            if isinstance(layer, nn.Linear):
                places.setdefault(id(layer), []).append(Place(parent, attribute, layer))
    return {name: places[id(module)] for name, module in model.named_modules() if id(module) in places}


def _shared_weights(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, one for every module that holds it."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return names


class _Chosen(NamedTuple):
    """What decides about a layer: the caller's patterns, the kinds of the model's names, and what the model says."""

    patterns: Selection
    names: kinds.Names
    head: object
    """The head over the vocabulary, if it is a model of transformers that has one."""

    def reason_to_keep(self, name: str, layer: nn.Linear) -> str | None:
        """Return why a layer of this name stays as it is, or None."""
        excluded = self.patterns.excluded_by(name)
        if excluded is not None:
            return f"its name matches exclude, '{excluded}'"
        if self.patterns.include is not None:
            return "its name matches no pattern of include" if self.patterns.included_by(name) is None else None
        kind = kinds.kind_of(name, tuple(layer.weight.shape), self.names)
        if kind in _LINEAR:
            return "it is the model's head" if layer is self.head else None
        return f"its name says {kind.name}"


class Sorted(NamedTuple):
    """The linear layers of a model by name: the places of those to quantize, and why the others are kept.

    Stacked experts are among those that are kept, by the names of their parameters.
    """

    chosen: dict[str, list[Place]]
    kept: dict[str, str]


def sorted_layers(model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str]) -> Sorted:
    """Return which linear layers of a model to quantize, and why not the others.

    Raises:
        CheckpointError: a regular expression is not valid, or a pattern matches no layer.
    """
    found, layers = Sorted({}, {}), layers_of(model)
    chosen, shared, offloaded = _choice_of(model, layers, include, exclude), _shared_weights(model), Offloaded(model)
    for name, places in layers.items():
        reason = _reason_to_keep(name, places, chosen, shared, offloaded)
        if reason is None:
            found.chosen[name] = places
        else:
            found.kept[name] = reason
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 and "expert" in name and dtype_spelling(parameter.dtype) in HIGH_PRECISION:
            found.kept[name] = "it stacks experts: fp8core.transformers.split_experts_ separates those that it can"
    return found


def _choice_of(
    model: nn.Module, layers: Collection[str], include: Sequence[str] | None, exclude: Sequence[str]
) -> _Chosen:
    patterns = selection(include, exclude, layers)
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    head = getattr(model, "get_output_embeddings", None)
    names = kinds.names_of(layers, (), {"model_type": model_type})
    return _Chosen(patterns, names._replace(layered=False), head() if callable(head) else None)


def _reason_to_keep(
    name: str, places: list[Place], chosen: _Chosen, shared: dict[int, list[str]], offloaded: Offloaded
) -> str | None:
    """Return why a layer stays as it is, or None."""
    layer, kind = places[0].layer, type(places[0].layer)
    if kind is not nn.Linear:
        return "it is FP8 already" if issubclass(kind, Linear) else f"it is a {kind.__name__}, not a Linear of torch.nn"
    for place in places:
        if isinstance(place.parent, READ_WEIGHTS):
            return f"its {type(place.parent).__name__} reads the weight itself"
    if hooks_of(layer):
        return "it has hooks"
    reason = _unusual_parameter(layer)
    if reason is not None:
        return reason
    if layer._parameters.keys() | layer._buffers.keys() | layer._modules.keys() != {"weight", "bias"}:
        return "it holds more than a weight and a bias"
    weight = layer.weight
    others = [other for other in shared[id(weight)] if other != f"{name}.weight"]
    if others:
        return f"it shares its weight with {others[0].removesuffix('.weight')}"
    if layer in offloaded:
        return "accelerate has offloaded its weight: quantize before dispatching"
    if has_own_forward(layer):
        return "its forward is not that of torch.nn"
    if dtype_spelling(weight.dtype) not in HIGH_PRECISION:
        return f"its weight is {weight.dtype}"
    if not weight.numel():
        return "its weight has no elements"
    return chosen.reason_to_keep(name, layer)


def _unusual_parameter(layer: nn.Linear) -> str | None:
    """Return how a layer's weight or bias differs from a parameter that torch.nn makes, or None."""
    weight = layer._parameters.get("weight")
    if weight is None:
        return "its weight is not a parameter"
    if "bias" not in layer._parameters:
        return "its bias is not a parameter"
    if type(weight).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        return f"its weight is a {type(weight).__name__}, not a tensor of its own: quantize before sharding"
    return None if weight.layout == torch.strided else f"its weight is {weight.layout}"
