"""Whole models: their linear layers quantized, dequantized, described and warmed up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8core.checkpoint import schemes
from fp8core.checkpoint.schemes import scheme_of, static_scale
from fp8core.core.specs import counts
from fp8core.errors import CheckpointError, DeviceError, LayoutError, ScaleError
from fp8core.torch.dispatched import Offloaded
from fp8core.torch.layers import has_hooks, layers_of, replace, sorted_layers
from fp8core.torch.linear import Linear


class Report(NamedTuple):
    """What `quantize_model_` did.

    Examples:
        >>> from fp8core.torch import Report
        >>> Report(("up",), {"lm_head": "excluded"}).quantized
        ('up',)
    """

    quantized: tuple[str, ...]
    """The names of the layers that are FP8 now."""
    kept: dict[str, str]
    """Those of the linear layers that stayed as they were, and why."""


def quantize_model_(
    model: nn.Module,
    *,
    scheme: str = "channel",
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    input_scales: Mapping[str, float] | None = None,
    weight_dtype: Any = "float8_e4m3fn",
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
) -> Report:
    """Replace linear layers of a model by `Linear`, in place.

    Layers are replaced one after the other, so that the memory of one weight is needed beside the model. What is not
    ``torch.nn.Linear`` itself stays: subclasses, tied weights and sharded ones, layers with hooks (of calls or of
    states), another forward, or more tensors than a weight and a bias, layers that accelerate has offloaded, and layers
    whose weights ``torch.nn.MultiheadAttention`` or ``TransformerEncoderLayer`` read themselves. Layers that accelerate
    has dispatched keep the hooks by which it brings their inputs to their device. What saves the model has to be told
    that it is FP8: `quantization_config`.

    Args:
        model: holds the layers; it may be on any device, the meta device, too.
        scheme: as for `Linear`.
        include: which layers, by glob patterns or, after ``re:``, regular expressions over their names. Without it all
            but those whose names say that they are embeddings, heads, routers, or vision or audio towers
            (the table of `fp8core quantize`).
        exclude: patterns of layers to leave alone.
        input_scales: the scales of static quantization, by layer, as `calibrate` gives them; other layers are dynamic.
        weight_dtype: as for `Linear`.
        use_fast_accum: as for `Linear`.
        batch_invariant: as for `Linear`.

    Raises:
        CheckpointError: there is no such scheme, a regular expression is not valid, or a pattern matches no layer.
        LayoutError: model is itself a linear layer, which nothing holds.
        ScaleError: input_scales name something else than layers to be quantized, or are not positive numbers. Nothing
            has been replaced then.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> fp8core.torch.quantize_model_(model, exclude=["2"])
        Report(quantized=('0',), kept={'2': "its name matches exclude, '2'"})
    """
    if isinstance(model, nn.Linear):
        raise LayoutError("model needs to hold its layers, got a layer alone: Linear.from_linear quantizes it")
    if not isinstance(input_scales, Mapping | None):
        raise ScaleError(f"input_scales needs a mapping of layers to numbers, got {input_scales!r}")
    scales = dict(input_scales or {})
    options: dict[str, Any] = {
        "scheme": scheme,
        "weight_dtype": weight_dtype,
        "use_fast_accum": use_fast_accum,
        "batch_invariant": batch_invariant,
    }
    Linear(1, 1, device="meta", static=bool(scales), **options)  # checks them
    found = sorted_layers(model, include, exclude)
    for name, scale in scales.items():
        if name not in found.chosen:
            reason = found.kept.get(name, "the model has no such layer")
            raise ScaleError(f"input_scales needs layers to be quantized, got {name!r}: {reason}")
        if static_scale(scale) is None:
            raise ScaleError(f"input_scales needs numbers above 0 that float32 has, got {scale!r} for {name!r}")
    quantized = tuple(found.chosen)
    for name in quantized:
        places = found.chosen.pop(name)
        made = Linear.from_linear(places[0].layer, input_scale=scales.get(name), **options)
        replace(places, made)
    return Report(quantized, found.kept)


def dequantize_model_(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Replace every `Linear` of a model by ``torch.nn.Linear`` with the dequantized weight, in place.

    Args:
        model: holds the layers.
        dtype: of weights and biases; by default that which each layer's inputs are meant to have.

    Returns:
        The names of the layers.

    Raises:
        LayoutError: model is itself a layer, which nothing holds; or a layer has hooks, which would be lost. Nothing
            has been replaced then.
        DeviceError: accelerate has offloaded a layer. Nothing has been replaced then.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.dequantize_model_(model), type(model[0]).__module__
        (('0',), 'torch.nn.modules.linear')
    """
    if isinstance(model, Linear):
        raise LayoutError("model needs to hold its layers, got a layer alone: its to_linear dequantizes it")
    names, found, offloaded = [], list(layers_of(model)), Offloaded(model)
    for name, places in found:
        if isinstance(places[0].layer, Linear):
            offloaded.refuse(name, places[0].layer)
            if has_hooks(places[0].layer):
                raise LayoutError(f"model needs layers without hooks, got some on {name}: remove them first")
    for name, places in found:
        layer = places[0].layer
        if isinstance(layer, Linear):
            made = layer.to_linear(dtype)
            replace(places, made)
            names.append(name)
    return tuple(names)


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return what belongs under "quantization_config" in config.json beside the model's saved state.

    It is what ``fp8core quantize`` writes for the same layers, in the form of compressed-tensors, which vLLM and
    transformers read.

    Args:
        model: holds at least one `Linear`; all of them of one scheme, and all static or none.

    Raises:
        CheckpointError: it holds none, or layers of several kinds, for which one config has no words; or weights that
            are not float8_e4m3fn.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> config = fp8core.torch.quantization_config(model)
        >>> config["config_groups"]["group_0"]["weights"]["strategy"]
        'channel'
    """
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear)}
    kinds = {(layer.scheme, layer.input_scale is not None, str(layer.weight.dtype)) for layer in layers.values()}
    if len(kinds) != 1:
        got = ", ".join(f"{scheme} of {dtype}{', static' * static}" for scheme, static, dtype in sorted(kinds))
        raise CheckpointError(f"model needs FP8 layers of one scheme, all static or none, got {got or 'no FP8 layer'}")
    [(scheme, static, dtype)] = kinds
    if dtype != "torch.float8_e4m3fn":
        raise CheckpointError(f"model needs weights of float8_e4m3fn, which compressed-tensors has, got {dtype}")
    own = {id(parameter) for layer in layers.values() for parameter in layer.parameters(recurse=False)}
    kept: dict[int, tuple[str, tuple[int, ...]]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept.setdefault(id(tensor), (name, tuple(tensor.shape)))  # tied ones are stored once
    others = [stored for key, stored in kept.items() if key not in own]
    known = scheme_of(scheme)
    return schemes.quantization_config(known.with_static_activations() if static else known, others, layers)


def warm_up(model: nn.Module, rows: Iterable[int] = (1, 16), dtype: torch.dtype | None = None) -> None:
    """Call every `Linear` of a model with zeros of so many rows, so that its kernels are compiled and loaded.

    The first call of a kind compiles and loads kernels, which must not happen while a stream is captured into a graph.

    Args:
        model: a model, or a `Linear` itself.
        rows: how many rows, or tokens, calls will have.
        dtype: of the inputs; by default that of the weights that each layer was made of (`Linear.compute_dtype`).

    Raises:
        ShapeError: rows are not whole numbers from 0 to 2**31 - 1.
        DeviceError: a layer has no memory, as one that accelerate has offloaded.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8, dtype=torch.bfloat16))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.warm_up(model, rows=[1, 16])
    """
    sizes = counts(rows, "rows")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, Linear):
                if layer.weight.is_meta:
                    raise DeviceError(f"model needs its weights in memory, got {name or 'a layer'} on the meta device")
                own = layer.compute_dtype if dtype is None else dtype
                for m in sizes:
                    layer(torch.zeros(m, layer.in_features, dtype=own, device=layer.weight.device))
