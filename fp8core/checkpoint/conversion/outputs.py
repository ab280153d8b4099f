"""The formats that conversions write: the names and shapes of their scales, and their configuration."""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.conversion.changes import Goal
from fp8core.checkpoint.formats.granularity import Granularity
from fp8core.checkpoint.formats.naming import WEIGHT, module_of
from fp8core.checkpoint.formats.schemes import GROUP_MX, MXFP8, SCHEMES, quantization_config
from fp8core.checkpoint.formats.selection import only
from fp8core.checkpoint.reading.layers import Layer
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape

OutputName = Literal["compressed-tensors", "deepseek", "modelopt", "comfyui"]
KvStrategy = Literal["tensor", "attn_head"]
"""What has a scale of the KV cache of its own: all keys or values of a layer, or those of one head."""

GROUPS: Final[Mapping[str, tuple[Granularity, GroupShape]]] = {
    "channel": ("channel", PER_CHANNEL),
    "block": ("block", BLOCK_128),
    "tensor": ("tensor", PER_TENSOR),
    "mxfp8": ("group", GROUP_MX),
    "modelopt-mxfp8": ("group", GROUP_MX),
}
FORMATS_OF: Final[Mapping[str, OutputName]] = {
    **dict.fromkeys(GROUPS, "compressed-tensors"),
    "compressed-tensors": "compressed-tensors",
    "deepseek": "deepseek",
    "modelopt": "modelopt",
    "modelopt-mxfp8": "modelopt",
    "comfyui": "comfyui",
}
"""By target of a conversion, except bf16: the format. A granularity alone is written as compressed-tensors."""
TARGETS: Final = ("bf16", *FORMATS_OF)


def granularity_for(
    target: str, layers: Iterable[Layer], static: bool, block_shape: GroupShape | None
) -> tuple[Granularity, GroupShape]:
    """Return the granularity of all layers in the new checkpoint.

    If the target format supports several, the layers' own granularity is chosen, so that the codes are kept. Blocks in
    ModelOpt's format are 128x128, as its configuration cannot express others.
    """
    if block_shape is not None:
        return "block", block_shape
    if target in GROUPS:
        found = GROUPS[target]
    elif target == "comfyui":
        found = GROUPS["tensor"]
    else:
        layers = list(layers)
        kinds = {layer.granularity for layer in layers}
        blocks = kinds <= {"block"}
        if target == "deepseek" or blocks:
            found = GROUPS["block"]
        elif all(map(_is_mxfp8, layers)):
            found = GROUPS["mxfp8"]
        elif kinds <= {"tensor"} and (target == "compressed-tensors" or static):
            found = GROUPS["tensor"]
        else:
            found = GROUPS["channel"]
    shapes = {layer.group_shape if layer.granularity == "block" else None for layer in layers}
    shape = shapes.pop() if len(shapes) == 1 else None
    if found[0] == "block" and target != "modelopt" and shape is not None:
        return "block", shape
    return found


def _is_mxfp8(layer: Layer) -> bool:
    whole = layer.matrix_shape[1] % GROUP_MX.cols == 0
    return whole and layer.group_shape == GROUP_MX and layer.scale_kind == "e8m0"


def keeps_static_scales(output: OutputName, granularity: Granularity) -> bool:
    """Return whether a format has static scales of activations beside weights of this granularity.

    ModelOpt's FP8_PER_CHANNEL_PER_TOKEN has none, as its name says.
    """
    return granularity == "tensor" or (granularity == "channel" and output != "modelopt")


class Named(NamedTuple):
    """The name and shape of a tensor in the new checkpoint."""

    name: str
    shape: tuple[int, ...]


def scale_named(output: OutputName, layer: Layer, goal: Goal, grid: tuple[int, int]) -> Named:
    """Return the name and shape of a weight's scale in a format.

    Raises:
        CheckpointError: experts are stacked in one tensor, or the weight is none of a module, and the format has no
            name for its scales.
    """
    if not layer.weight.name.endswith(WEIGHT) or layer.experts is not None:
        if output != "deepseek":
            got = "a name without .weight: bf16 and deepseek take it"
            if layer.experts is not None:
                got = (
                    "experts in one tensor: split_experts (--split-experts) splits them, "
                    "and bf16 and deepseek take them stacked"
                )
            raise CheckpointError(f"{layer.weight.name} needs to be the weight of one module for {output}, got {got}")
        suffix = ".weight_scale_inv" if layer.weight.name.endswith(WEIGHT) else "_scale_inv"
        experts = () if layer.experts is None else (layer.experts,)
        return Named(layer.name + suffix, (*experts, *grid))
    if output == "deepseek":
        return Named(f"{layer.name}.weight_scale_inv", grid)
    shapes: Mapping[tuple[str, str], tuple[int, ...]] = {
        ("compressed-tensors", "tensor"): (1,),
        ("modelopt", "tensor"): (),
        ("modelopt", "channel"): (grid[0],),
        ("modelopt", "block"): (grid[0], 1, grid[1], 1),
        ("comfyui", "tensor"): (),
    }
    return Named(f"{layer.name}.weight_scale", shapes.get((output, goal.granularity), grid))


def input_scale_named(output: OutputName, layer: Layer) -> Named:
    """Return the name and shape of the static scale of a layer's activations."""
    return Named(f"{layer.name}.input_scale", (1,) if output == "compressed-tensors" else ())


def kv_scale_named(output: OutputName, name: str, shape: tuple[int, ...]) -> Named:
    """Return the name and shape of a KV cache scale whose name in compressed-tensors is ``name``.

    Raises:
        CheckpointError: there is a scale for each head, which the format cannot say.
    """
    one = math.prod(shape) == 1
    if not one and output != "compressed-tensors":
        raise CheckpointError(
            f"{name} needs to be one number for {output}, got shape {list(shape)}: bf16 leaves scales of the KV cache "
            "out, and compressed-tensors takes one for each head"
        )
    if output != "modelopt":
        return Named(name, (1,) if one else shape)
    for key in ("k", "v"):
        if name.endswith(f".{key}_scale"):
            return Named(f"{name.removesuffix(f'{key}_scale')}{key}_proj.{key}_scale", () if one else shape)
    return Named(name, shape)


def marker(goal: Goal) -> bytes:
    """Return the content of the marker tensor of a layer in newer files of ComfyUI."""
    return json.dumps({"format": goal.dtype}).encode()


def configuration(
    output: OutputName,
    goal: Goal,
    kept: Iterable[tuple[str, tuple[int, ...]]],
    quantized: Iterable[str],
    config: Mapping[str, Any],
    *,
    static: bool,
    kv_cache: KvStrategy | None,
) -> dict[str, Any] | None:
    """Return the quantization_config of a format; None for ComfyUI, whose weight files contain it.

    Args:
        output: the format.
        goal: the scaling of the weights.
        kept: name and shape of each tensor that is not FP8.
        quantized: the names of the FP8 modules.
        config: the content of config.json.
        static: whether the file has scales of activations.
        kv_cache: what has a scale of the KV cache of its own; None if the file has none.
    """
    kept, quantized = list(kept), list(quantized)
    if output == "comfyui":
        return None
    others = {module_of(name) for name, shape in kept if len(shape) == 2 and name.endswith(WEIGHT)}
    ignored = sorted(({"lm_head"} - {name.rpartition(".")[2] for name in quantized}) | (others - {*quantized}))
    if output == "deepseek":
        found: dict[str, Any] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": list(goal.group_shape),
            "modules_to_not_convert": ignored,
        }
        return {**found, "scale_fmt": "ue8m0"} if goal.scale_format != "float32" else found
    scheme = MXFP8 if goal.granularity == "group" else SCHEMES[goal.granularity]
    compressed = quantization_config(scheme.with_static_activations() if static else scheme, kept, quantized, config)
    group = compressed["config_groups"]["group_0"]
    if goal.granularity == "block":
        group["weights"]["block_structure"] = list(goal.group_shape)
    if kv_cache:
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        compressed["kv_cache_scheme"] = {**number, "strategy": kv_cache, "dynamic": False}
    if output == "compressed-tensors":
        return compressed
    algorithms = {"tensor": "FP8", "channel": "FP8_PER_CHANNEL_PER_TOKEN", "block": "FP8_PB_WO", "group": "MXFP8"}
    found = {
        "quant_method": "modelopt",
        "quant_algo": algorithms[goal.granularity],
        "ignore": [*map(only, ignored)],
        "producer": {"name": "fp8core"},
    }
    if kv_cache:
        found["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return found


def modelopt_file(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of hf_quant_config.json, which older readers need beside config.json."""
    return {
        "producer": found["producer"],
        "quantization": {
            "quant_algo": found["quant_algo"],
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in found else None,
            "exclude_modules": found["ignore"],
        },
    }
