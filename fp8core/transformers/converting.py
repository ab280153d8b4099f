"""Conversions of loaded models: of FP8 layers that transformers made itself, and of experts that it stacked."""

from collections.abc import Mapping
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn

from fp8core.checkpoint.formats.naming import NAMES, OTHERS, ZERO_POINTS
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128
from fp8core.torch import GroupedLinear, Linear
from fp8core.torch.aligned import align_rows_
from fp8core.torch.dispatched import Offloaded
from fp8core.torch.input_dtypes import CODES
from fp8core.torch.layers import check_model, refuse_additions
from fp8core.transformers.config import METHOD, Fp8CoreConfig
from fp8core.transformers.experts import DOWN, GATED, PLAIN, Experts, Layout, fits, layout_of
from fp8core.transformers.grouping import alone, group_experts_, names_of, put, separate_experts_
from fp8core.transformers.names import has, transforms_of
from fp8core.transformers.quantizer import Fp8CoreQuantizer
from fp8core.transformers.stored import Stored, safetensors_dtype

SCALES: Final = [one.suffix[1:] for one in NAMES if one.role == "scale"]
INPUT_SCALES: Final = [one.suffix[1:] for one in NAMES if one.role == "input_scale"]
OF_TRANSFORMERS: Final = "transformers.integrations."
"""The package in which transformers keeps the conversion steps of quantization methods."""


def convert_(model: Any) -> tuple[str, ...]:
    """Replace the FP8 layers of a loaded model by `fp8core.torch.Linear` with the same codes and scales, in place.

    FP8 layers are transformers' FP8Linear, FP8Experts, FbgemmFp8Linear and CompressedTensorsFP8Linear, which its own
    from_pretrained makes on a GPU. The converted model is saved in the format that it was loaded from.

    Args:
        model: a transformers model.

    Returns:
        The names of the new layers.

    Raises:
        DeviceError: accelerate has offloaded a layer. No layer has been replaced then.
        CheckpointError: a layer's scales are neither per tensor, nor per channel, nor by blocks of 128x128, or are by
            blocks beside a static scale of inputs; or transformers has no conversion that names the projections of
            stacked experts. Layers before this one have been replaced then. Or a layer has zero points that are not
            zero, or scales of other quantizations, or is an FP8GroupedLinear, which multiplies each group of its
            channels with another input; or an FP8 parameter is in neither a linear layer nor stacked experts. No layer
            has been then.
        DTypeError: model is no ``torch.nn.Module``.
        LayoutError: a layer has hooks or a forward of its own, which would be lost: with them compressed-tensors
            transforms and quantizes inputs, for example; or model is itself a layer. No layer has been replaced then.

    Examples:
        >>> from transformers import LlamaConfig, LlamaModel
        >>> from fp8core.transformers import convert_
        >>> sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
        >>> convert_(LlamaModel(LlamaConfig(**sizes, num_attention_heads=2)))  # it has no FP8 layers
        ()
    """
    check_model(model)
    converted: list[str] = []
    transforms, places = transforms_of(model), names_of(model)
    unstacked: set[str] = set()
    offloaded = Offloaded(model)
    for module, (name, *_) in places.items():
        if not isinstance(module, Linear | GroupedLinear) and any(map(_is_fp8, module._parameters.values())):
            offloaded.refuse(name, module)
            _refuse_more(name, module)
            if module is model:
                raise alone(module)
    for module, names in places.items():
        name = names[0]
        if _is_layer(module) and not isinstance(module, Linear):
            put(model, names, module, _linear(name, module))
            converted.append(name)
        elif _are_experts(module):
            layout = layout_of(name, transforms)
            if layout is None:
                raise CheckpointError(f"experts need names that transformers can stack, got {name} without them")
            values = dict(module.named_parameters(recurse=False))
            experts = Experts(module, layout)
            for at, expert in enumerate(experts):
                for projection, layer in _projections(name, at, module, values, layout).items():
                    setattr(expert, projection, layer)
                    converted.append(f"{name}.{at}.{projection}")
            unstacked.update(layout.patterns)
            put(model, names, module, experts)
    if converted:
        dtype = _dtype(model)
        layers = {name: model.get_submodule(name) for name in converted}
        for layer in layers.values():
            layer.compute_dtype = dtype
        static = {name: layer.input_scale is not None for name, layer in layers.items()}
        group_experts_(model)
        _take_over(model, static, unstacked)
    return tuple(converted)


def split_experts_(model: Any) -> tuple[str, ...]:
    """Replace the stacked expert tensors of a loaded model by linear layers for each expert, in place.

    The layers' weights are views of the stacked tensors. `fp8core.torch.calibrate` and `fp8core.torch.quantize_model_`
    find the layers; `Experts` calls them one after the other. `group_experts_` stacks them again once they are FP8.

    Args:
        model: a transformers model. Experts that have biases, have transposed weights or are FP8 experts of
            transformers stay as they are; `GroupedExperts` are replaced.

    Returns:
        The names of the new layers.

    Raises:
        DeviceError: accelerate has offloaded experts. No module has been replaced then.
        LayoutError: experts, or a layer of `GroupedExperts`, have hooks or a forward of their own, which would be lost;
            or model is itself `GroupedExperts`. No module has been replaced then.
        DTypeError: model is no ``torch.nn.Module``.

    Examples:
        >>> from transformers import Qwen3MoeConfig, Qwen3MoeModel
        >>> from fp8core.transformers import split_experts_
        >>> sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 64}
        >>> model = Qwen3MoeModel(Qwen3MoeConfig(**sizes, num_experts=2, num_attention_heads=2, num_key_value_heads=2))
        >>> split_experts_(model)[:3]
        ('layers.0.mlp.experts.0.gate_proj', 'layers.0.mlp.experts.0.up_proj', 'layers.0.mlp.experts.0.down_proj')
    """
    check_model(model)
    split: list[str] = []
    transforms, offloaded = transforms_of(model), Offloaded(model)
    unstacked: set[str] = set()
    stacks: list[tuple[list[str], nn.Module, Layout]] = []
    for module, names in names_of(model).items():
        name = names[0]
        down = module._parameters.get(DOWN)
        layout = None if down is None or down.ndim != 3 or _is_fp8(down) else layout_of(name, transforms)
        if layout is not None and fits(module, layout):
            offloaded.refuse(name, module)
            refuse_additions(name, module)
            stacks.append((names, module, layout))
    for name in separate_experts_(model):
        experts: Any = model.get_submodule(name)
        split += [f"{name}.{at}.{part}" for at, one in enumerate(experts) for part, _ in one.named_children()]
    for names, module, layout in stacks:
        values = dict(module.named_parameters(recurse=False))
        experts = Experts(module, layout)
        for role, parts in _roles(layout):
            for at, expert in enumerate(experts):
                for part, rows in zip(parts, values[role].detach()[at].chunk(len(parts)), strict=True):
                    expert.get_submodule(part).weight = nn.Parameter(rows, values[role].requires_grad)
        split += [f"{names[0]}.{at}.{part}" for at in range(len(experts)) for part in (*layout.first, layout.down)]
        unstacked.update(layout.patterns)
        put(model, names, module, experts)
    _keep_unstacked(model, unstacked)
    return tuple(split)


def _refuse_more(name: str, module: nn.Module) -> None:
    """Refuse an FP8 module that is not one product of its codes and scales, or has what would be lost with it."""
    if not (_is_layer(module) or _are_experts(module)):
        parameter = next(one for one, tensor in module._parameters.items() if _is_fp8(tensor))
        what = f"{name}.{parameter} in a {type(module).__name__}".removeprefix(".")
        raise CheckpointError(f"model needs FP8 weights of linear layers or of stacked experts, got {what}")
    held = {**module._parameters, **module._buffers}
    others = (one for one, tensor in held.items() if tensor is not None and f".{one}" in OTHERS)
    other = next((one for one in others if f".{one}" not in ZERO_POINTS or not _is_zero(held[one])), None)
    if other is not None:
        what = f"{name}.{other}, which is of {OTHERS[f'.{other}']}"
        raise CheckpointError(f"model needs layers of FP8 codes and scales, got {what}")
    if hasattr(module, "n_groups"):
        what = f"{name}, a {type(module).__name__} of {module.n_groups}"
        raise CheckpointError(f"model needs FP8 layers of one product each, got {what}")
    refuse_additions(name, module)


def _roles(layout: Layout) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the names of the stacked tensors of experts, each with the projections that it holds."""
    return (GATED if len(layout.first) == 2 else PLAIN, layout.first), (DOWN, (layout.down,))


def _is_layer(module: nn.Module) -> TypeGuard[nn.Linear]:
    return isinstance(module, nn.Linear) and _is_fp8(module._parameters.get("weight"))


def _are_experts(module: nn.Module) -> bool:
    down = module._parameters.get(DOWN)
    return down is not None and down.ndim == 3 and _is_fp8(down)


def _is_zero(tensor: Tensor | None) -> bool:
    return tensor is not None and not tensor.is_meta and not bool(tensor.float().any())


def _is_fp8(codes: Tensor | None) -> bool:
    return codes is not None and codes.dtype in CODES


def _dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of a model beside its FP8 layers: that of its first floating-point parameter outside of them.

    transformers' ``model.dtype`` follows the same rule, but would return FP8 if an FP8 weight came first.
    """
    others = (module for module in model.modules() if not isinstance(module, Linear))
    values = (x for module in others for x in module.parameters(recurse=False))
    return next((x.dtype for x in values if x.is_floating_point()), torch.get_default_dtype())


def _linear(name: str, module: nn.Linear) -> Linear:
    """Return a layer with the tensors of an FP8 layer of transformers."""
    scale_name = next((one for one in SCALES if isinstance(getattr(module, one, None), Tensor)), None)
    if scale_name is None:
        raise CheckpointError(f"{name}.weight needs a scale, got none")
    input_name = next((one for one in INPUT_SCALES if isinstance(getattr(module, one, None), Tensor)), None)
    return _made(
        name,
        module.weight.detach(),
        getattr(module, scale_name),
        scale_name,
        None if input_name is None else (input_name, getattr(module, input_name)),
        module._parameters["bias"],
        getattr(module, "block_size", None),
    )


def _projections(
    name: str, at: int, module: nn.Module, values: Mapping[str, Tensor], layout: Layout
) -> dict[str, Linear]:
    """Return the layers of expert ``at`` of a module whose stacked tensors are ``values``, by projection."""
    made, blocks = {}, getattr(module, "block_size", None)
    for role, parts in _roles(layout):
        scale = values[f"{role}_scale_inv"][at]
        scales = scale.chunk(len(parts)) if scale.numel() > 1 else (scale,) * len(parts)
        static = values.get(f"{role}_activation_scale")
        beside = None if static is None else ("activation_scale", static[at])
        for part, codes, own in zip(parts, values[role][at].chunk(len(parts)), scales, strict=True):
            made[part] = _made(f"{name}.{at}.{part}", codes.detach(), own, "weight_scale_inv", beside, None, blocks)
    return made


def _made(
    name: str,
    codes: Tensor,
    scale: Tensor,
    scale_name: str,
    input_scale: tuple[str, Tensor] | None,
    bias: Tensor | None,
    blocks: Any,
) -> Linear:
    """Return a layer with tensors of transformers; ``blocks`` is the block size of the scale, or None."""
    n, k = codes.shape
    shape = tuple(scale.shape)
    if blocks is not None and tuple(blocks) == tuple(BLOCK_128) and shape == BLOCK_128.scale_shape(n, k):
        scheme = "block"
    elif blocks is None and scale.numel() == 1:
        scheme = "tensor"
    elif blocks is None and scale.numel() == n:  # [n, 1], or [1, n] in CompressedTensorsFP8Linear
        scheme, shape = "channel", (n, 1)
    else:
        what = f"{list(shape)}" if blocks is None else f"{list(shape)} by blocks of {list(blocks)}"
        raise CheckpointError(
            f"{name} needs scales per tensor, per channel or by blocks of 128x128, got {what} for {n}x{k}"
        )
    if scheme == "block" and input_scale is not None:
        raise CheckpointError(
            f"{name} needs scales per tensor or channel beside {input_scale[0]}, got blocks of 128x128"
        )
    made = Linear(k, n, bias is not None, "meta", scheme=scheme, static=input_scale is not None)
    stored = {"weight_scale": Stored(scale_name, safetensors_dtype(scale.dtype), shape)}
    made.weight = nn.Parameter(codes, requires_grad=False)
    align_rows_(made.weight)
    wide = stored["weight_scale"].canonical(scale, made.scale_shape)
    made.weight_scale = nn.Parameter(wide, requires_grad=False)
    if input_scale is not None:
        called, own = input_scale
        stored["input_scale"] = Stored(called, safetensors_dtype(own.dtype), tuple(own.shape))
        made.input_scale = nn.Parameter(stored["input_scale"].canonical(own, (1,)), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach(), requires_grad=False)
    made.__dict__["stored"] = stored
    return made


def _take_over(model: Any, layers: Mapping[str, bool], unstacked: set[str]) -> None:
    """Give the model this library's quantizer, which saves the model in the format that it was loaded from."""
    known = getattr(model, "hf_quantizer", None)
    if known is not None:
        config = Fp8CoreConfig(source=known.quantization_config.to_dict())
        model.hf_quantizer = Fp8CoreQuantizer(config, layers, pre_quantized=True)
        model.config.quantization_config = config
        model.quantization_method = METHOD
    _keep_unstacked(model, unstacked, (OF_TRANSFORMERS,))


def _keep_unstacked(model: Any, unstacked: set[str], without: tuple[str, ...] = ()) -> None:
    """Remove the conversions on saving that would restack experts, and those with steps of packages ``without``."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is not None:
        model._weight_conversions = [
            one
            for one in conversions
            if not has(one, unstacked)
            and not any(type(step).__module__.startswith(without) for step in getattr(one, "operations", ()))
        ]
