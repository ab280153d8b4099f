"""Stacks the FP8 layers of experts, so that grouped products run them."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from fp8core.errors import LayoutError
from fp8core.kernels.grouped.args import MOST_GROUPS
from fp8core.problem import BLOCK_128
from fp8core.torch import Linear
from fp8core.torch.dispatched import Offloaded, has_own_forward, take_hook
from fp8core.torch.layers import check_model, hooks_of, refuse_additions
from fp8core.transformers.experts import Experts
from fp8core.transformers.grouped import GroupedExperts

ALIKE: Final = "in_features", "out_features", "use_fast_accum"
"""The attributes in which the layers of a projection have to be alike."""


def can_be_grouped(experts: Experts) -> bool:
    """Return whether `GroupedExperts` computes the same as `Experts`.

    The layers of a projection are FP8 and alike, without bias, hooks and parametrizations, on one device; gate and up
    have equal static scales; none is batch invariant; and blocks of 128x128 lie in one projection. Neither `Experts`
    nor the module of an expert have hooks. No module has a forward of its own.
    """
    layout = experts.layout
    if any(map(hooks_of, (experts, *experts))) or any(map(has_own_forward, experts.modules())):
        return False
    every = [expert._modules[name] for expert in experts for name in (*layout.first, layout.down)]
    if not 0 < len(experts) <= MOST_GROUPS or not all(type(layer) is Linear and _is_plain(layer) for layer in every):
        return False
    if len({(layer.scheme, layer.compute_dtype, layer.weight.device) for layer in every}) > 1:  # type: ignore[union-attr]
        return False
    for names in (layout.first, (layout.down,)):
        layers: list[Any] = [expert._modules[name] for expert in experts for name in names]
        if len({tuple(getattr(layer, name) for name in ALIKE) for layer in layers}) > 1:
            return False
        if len({(layer.weight.dtype, layer.input_scale is None) for layer in layers}) > 1:
            return False
        if len(names) > 1 and layers[0].scheme == "block" and layers[0].out_features % BLOCK_128[0]:
            return False
        if len(names) > 1 and layers[0].input_scale is not None:
            scales = torch.cat([layer.input_scale for layer in layers]).view(-1, len(names))
            if not torch.equal(scales[:, 0], scales[:, 1]):
                return False
    return True


def group_experts_(model: Any) -> tuple[str, ...]:
    """Replace `Experts` of a model by `GroupedExperts`, in place; `from_pretrained` and `convert_` do it themselves.

    Args:
        model: a transformers model, after `split_experts_` and `fp8core.torch.quantize_model_`, for example. Experts
            whose layers are not FP8, or not alike, stay as they are.

    Returns:
        The names of the replaced modules.

    Raises:
        LayoutError: model is itself `Experts`, so that there is no parent to put another module into.
        DTypeError: model is no ``torch.nn.Module``.

    Examples:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
        >>> from fp8core.torch import quantize_model_
        >>> from fp8core.transformers import group_experts_, split_experts_
        >>> sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        >>> model = Qwen3MoeModel(Qwen3MoeConfig(**sizes, num_experts=2, num_attention_heads=2, num_key_value_heads=2))
        >>> names, report = split_experts_(model), quantize_model_(model)
        >>> group_experts_(model)
        ('layers.0.mlp.experts',)
    """
    check_model(model)
    return _replaced(model, lambda module: isinstance(module, Experts) and can_be_grouped(module), GroupedExperts)


def separate_experts_(model: Any) -> tuple[str, ...]:
    """Replace `GroupedExperts` of a model by `Experts` with layers that share their memory; return their names.

    Raises:
        DeviceError: accelerate has offloaded the weights. No module has been replaced then.
        LayoutError: they or a stacked layer have hooks or a forward of their own, which would be lost; or model is
            itself `GroupedExperts`. No module has been replaced then.
    """
    offloaded = Offloaded(model)
    for name, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            refuse_additions(name, module, own_states=True)
            for stack in module.stacks:
                layer = module.get_submodule(stack)
                offloaded.refuse(f"{name}.{stack}", layer)
                refuse_additions(f"{name}.{stack}", layer)
    return _replaced(model, lambda module: isinstance(module, GroupedExperts), GroupedExperts.separate)


def _replaced(model: Any, chosen: Callable[[Any], bool], of: Callable[[Any], nn.Module]) -> tuple[str, ...]:
    """Replace chosen modules of a model in all places that hold them; return the first name of each."""
    places = {module: names for module, names in names_of(model).items() if chosen(module)}
    if model in places:
        raise alone(model)
    for module, names in places.items():
        put(model, names, module, of(module))
    return tuple(names[0] for names in places.values())


def names_of(model: Any) -> dict[nn.Module, list[str]]:
    """Return the names of each module of a model, one for every place that holds it."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return names


def alone(module: nn.Module) -> LayoutError:
    """Return the error for a module that is to be replaced but is the model itself."""
    return LayoutError(f"model needs to hold what is replaced in it, got a {type(module).__name__} alone")


def put(model: Any, names: Sequence[str], module: nn.Module, made: nn.Module) -> None:
    """Put ``made`` in all places of a module, with the hook that accelerate may have put around that module."""
    take_hook(made, module)
    for name in names:
        model.set_submodule(name, made)


def _is_plain(layer: Linear) -> bool:
    own = layer._parameters
    whole = own.keys() >= {"weight", "weight_scale", "input_scale", "bias"} and own["bias"] is None
    plain = whole and all(x is None or type(x.data) is Tensor for x in own.values())
    return plain and not (layer.batch_invariant or layer.weight.is_meta or hooks_of(layer))
