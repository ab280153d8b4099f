"""Whole models: quantize, dequantize, describe and warm up their linear layers."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fp8core.checkpoint.formats import schemes
from fp8core.checkpoint.formats.schemes import scheme_of, static_scale
from fp8core.core import checks
from fp8core.errors import CheckpointError, DeviceError, LayoutError, ScaleError
from fp8core.torch.dispatched import Offloaded
from fp8core.torch.grouped import GroupedLinear
from fp8core.torch.input_dtypes import high_precision
from fp8core.torch.layers import check_model, layers_of, not_finite, refuse_additions, refused, replace, sorted_layers
from fp8core.torch.linear import Linear


class Report(NamedTuple):
    """The result of `quantize_model_`.

    Examples:
        >>> from fp8core.torch import Report
        >>> Report(("up",), {"lm_head": "excluded"}).quantized
        ('up',)
    """

    quantized: tuple[str, ...]
    """The names of the layers that were quantized."""
    kept: dict[str, str]
    """The names of the linear layers, and of stacked experts' parameters, that were not, each with the reason."""


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

    Layers are replaced one at a time, so the peak of memory is the model and one FP8 weight. Layers that are not plain
    ``torch.nn.Linear`` are kept: subclasses; layers with tied or sharded weights, with hooks (of calls or of states),
    another forward, or more tensors than a weight and a bias; layers that accelerate has offloaded; and layers whose
    weights ``torch.nn.MultiheadAttention`` or ``TransformerEncoderLayer`` read themselves. Layers that accelerate has
    dispatched keep its hooks, which move inputs to their device. A program that saves the model needs to store
    `quantization_config`, too, so that readers know that the weights are FP8.

    Args:
        model: the model that holds the layers, on any device, including the meta device.
        scheme: as for `Linear`.
        include: the layers to quantize: glob patterns over their names, or regular expressions after ``re:``. By
            default all layers whose names do not say that they are embeddings, heads, routers, or vision or audio
            towers (the table of `fp8core quantize`).
        exclude: patterns of layers to keep, in the same syntax.
        input_scales: static input scales by layer name, as `calibrate` returns them; other layers are dynamic.
        weight_dtype: as for `Linear`.
        use_fast_accum: as for `Linear`.
        batch_invariant: as for `Linear`.

    Returns:
        The names of the quantized layers, and why other linear layers and stacked experts were kept.

    Raises:
        CheckpointError: scheme or a regular expression is not valid, or a pattern matches no layer; or a weight to be
            quantized holds NaN or infinities. No layer has been replaced then.
        LayoutError: model is itself a linear layer, so that there is no parent to put a new layer into.
        ScaleError: input_scales names a layer that is not to be quantized, holds a scale that is not a positive
            number, or is given with the scheme "block". No layer has been replaced then.
        DTypeError: model is no ``torch.nn.Module``, weight_dtype is not an FP8 format, or an option is not True or
            False.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> fp8core.torch.quantize_model_(model, exclude=["2"])
        Report(quantized=('0',), kept={'2': "its name matches exclude, '2'"})
    """
    check_model(model)
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
            raise ScaleError(f"input_scales needs numbers above 0 that float32 holds, got {scale!r} for {name!r}")
    quantized = tuple(found.chosen)
    bad = [f"{name}.weight" for name, places in found.chosen.items() if not_finite(places[0].layer.weight)]
    if bad:
        raise refused(bad)
    for name in quantized:
        places = found.chosen.pop(name)
        made = Linear.from_linear(places[0].layer, input_scale=scales.get(name), **options)
        replace(places, made)
    return Report(quantized, found.kept)


def dequantize_model_(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Replace every `Linear` of a model by ``torch.nn.Linear`` with the dequantized weight, in place.

    Args:
        model: the model that holds the layers.
        dtype: the dtype of weights and biases; by default the `Linear.compute_dtype` of each layer.

    Returns:
        The names of the replaced layers.

    Raises:
        LayoutError: model is itself a `Linear`, so that there is no parent to put a new layer into; or a layer has
            hooks or a forward of its own, which would be lost; or it holds `GroupedLinear`. No layer has been replaced
            then.
        DeviceError: accelerate has offloaded a layer. No layer has been replaced then.
        DTypeError: model is no ``torch.nn.Module``; or dtype, or that of a layer, is not float32, float16 or bfloat16
            of torch. No layer has been replaced then.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.dequantize_model_(model), type(model[0]).__module__
        (('0',), 'torch.nn.modules.linear')
    """
    check_model(model)
    if isinstance(model, Linear):
        raise LayoutError("model needs to hold its layers, got a layer alone: its to_linear dequantizes it")
    _refuse_grouped(model)
    names, layers, offloaded = [], layers_of(model), Offloaded(model)
    for name, places in layers.items():
        layer = places[0].layer
        if isinstance(layer, Linear):
            offloaded.refuse(name, layer)
            high_precision(layer.compute_dtype if dtype is None else dtype)
            refuse_additions(name, layer)
    for name, places in layers.items():
        layer = places[0].layer
        if isinstance(layer, Linear):
            made = layer.to_linear(dtype)
            replace(places, made)
            names.append(name)
    return tuple(names)


def quantization_config(model: nn.Module) -> dict[str, Any]:
    """Return the value of "quantization_config" in config.json for the model's saved state.

    It is in the format of compressed-tensors, which vLLM and transformers read, and equals what ``fp8core quantize``
    writes for the same layers, but for names that transformers gives to layers while it loads a checkpoint.

    Args:
        model: a model with at least one `Linear`. All of them need the same scheme, and all or none a static scale.

    Raises:
        CheckpointError: the model holds no `Linear`, or layers of several kinds, which one config cannot describe; or
            a weight is not float8_e4m3fn.
        LayoutError: the model holds `GroupedLinear`, which has weights of several layers.
        DTypeError: model is no ``torch.nn.Module``.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> config = fp8core.torch.quantization_config(model)
        >>> config["config_groups"]["group_0"]["weights"]["strategy"]
        'channel'
    """
    check_model(model)
    _refuse_grouped(model)
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


def _refuse_grouped(model: nn.Module) -> None:
    """Refuse a model with grouped layers, for each of which torch.nn and compressed-tensors have several."""
    name = next((name for name, module in model.named_modules() if isinstance(module, GroupedLinear)), None)
    if name is not None:
        raise LayoutError(
            f"model needs a layer for each weight, got the grouped layers {name}: "
            "fp8core.transformers.split_experts_ separates those of a mixture of experts"
        )


def warm_up(model: nn.Module, rows: Iterable[int] = (1, 16), dtype: torch.dtype | None = None) -> None:
    """Call every `Linear` of a model with zeros, so that its kernels are compiled and loaded.

    The first call of a kind compiles and loads kernels, which must not happen while a stream is captured into a graph.

    Args:
        model: a model, or a `Linear` itself.
        rows: the numbers of rows (tokens) that later calls will have.
        dtype: the dtype of the inputs; by default the `Linear.compute_dtype` of each layer.

    Raises:
        ShapeError: rows holds something else than whole numbers from 0 to 2**31 - 1.
        DTypeError: model is no ``torch.nn.Module``; or dtype, or that of a layer, is not float32, float16 or bfloat16
            of torch.
        DeviceError: a layer is on the meta device, such as a layer that accelerate has offloaded.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8, dtype=torch.bfloat16))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.warm_up(model, rows=[1, 16])
    """
    check_model(model)
    sizes = checks.extents(rows, "rows")
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, Linear):
                if layer.weight.is_meta:
                    raise DeviceError(f"model needs its weights in memory, got {name or 'a layer'} on the meta device")
                own = high_precision(layer.compute_dtype if dtype is None else dtype)
                for m in sizes:
                    layer(torch.zeros(m, layer.in_features, dtype=own, device=layer.weight.device))
