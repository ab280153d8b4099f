"""Whole models: their linear layers quantized, dequantized, calibrated and warmed up."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from fp8core.checkpoint import kinds
from fp8core.checkpoint.selection import Selection, selection
from fp8core.errors import LayoutError, ScaleError
from fp8core.interop import dtype_name
from fp8core.ops.linear import input_format
from fp8core.problem import FORMATS, WIDE
from fp8core.torch.linear import Linear

READ_WEIGHTS: Final = nn.MultiheadAttention, nn.TransformerEncoderLayer
"""Modules that hand the weights of their layers to kernels of torch."""
_LINEAR: Final = kinds.LINEAR, kinds.CONV1D, kinds.MAYBE_CONV1D
"""Names that say nothing against a layer: what may be a Conv1D in a file is known to be none here."""


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
    ``torch.nn.Linear`` itself stays: subclasses, tied weights, layers with hooks, and layers whose weights
    ``torch.nn.MultiheadAttention`` or ``TransformerEncoderLayer`` read themselves.

    Args:
        model: holds the layers; it may be on any device, the meta device, too.
        scheme: as for `Linear`.
        include: which layers, by glob patterns or, after ``re:``, regular expressions over their names. Without it all
            but those whose names say that they are embeddings, heads, routers, or towers of images or sound
            (the table of `fp8core quantize`).
        exclude: patterns of layers to leave alone.
        input_scales: the scales of static quantization, by layer, as `calibrate` gives them; other layers are dynamic.
        weight_dtype: as for `Linear`.
        use_fast_accum: as for `Linear`.
        batch_invariant: as for `Linear`.

    Raises:
        CheckpointError: there is no such scheme, a regular expression is none, or a pattern matches no layer.
        LayoutError: model is itself a linear layer, which nothing holds.
        ScaleError: input_scales name something else than layers to be quantized, or are no positive numbers. Nothing
            has been replaced then.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
        >>> fp8core.torch.quantize_model_(model, exclude=["2"])
        Report(quantized=('0',), kept={'2': "its name matches exclude, '2'"})
    """
    if isinstance(model, nn.Linear):
        raise LayoutError("model needs to hold its layers, got a layer alone: Linear.from_linear quantizes it")
    scales = dict(input_scales or {})
    options: dict[str, Any] = {
        "scheme": scheme,
        "weight_dtype": weight_dtype,
        "use_fast_accum": use_fast_accum,
        "batch_invariant": batch_invariant,
    }
    Linear(1, 1, device="meta", static=bool(scales), **options)  # checks them
    chosen, shared = _chosen(model, include, exclude), _shared_weights(model)
    layers = dict(_layers(model))
    kept = {
        name: reason
        for name, places in layers.items()
        if (reason := _reason_to_keep(name, places, chosen, shared)) is not None
    }
    for name, scale in scales.items():
        if name not in layers or name in kept:
            reason = kept.get(name, "the model has no such layer")
            raise ScaleError(f"input_scales needs layers to be quantized, got {name!r}: {reason}")
        if not 0 < scale < float("inf"):
            raise ScaleError(f"input_scales needs positive numbers, got {scale} for {name!r}")
    quantized = tuple(name for name in layers if name not in kept)
    for name in quantized:
        places = layers.pop(name)
        made = Linear.from_linear(places[0].layer, input_scale=scales.get(name), **options)
        for place in places:
            setattr(place.parent, place.attribute, made)
    return Report(quantized, kept)


def dequantize_model_(model: nn.Module, dtype: torch.dtype | None = None) -> tuple[str, ...]:
    """Replace every `Linear` of a model by ``torch.nn.Linear`` with the dequantized weight, in place.

    Args:
        model: holds the layers.
        dtype: of weights and biases; by default that of each layer's bias, else bfloat16.

    Returns:
        The names of the layers.

    Raises:
        LayoutError: model is itself a layer, which nothing holds.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.dequantize_model_(model), type(model[0]).__module__
        (('0',), 'torch.nn.modules.linear')
    """
    if isinstance(model, Linear):
        raise LayoutError("model needs to hold its layers, got a layer alone: its to_linear dequantizes it")
    names = []
    for name, places in list(_layers(model)):
        layer = places[0].layer
        if isinstance(layer, Linear):
            made = layer.to_linear(dtype)
            for place in places:
                setattr(place.parent, place.attribute, made)
            names.append(name)
    return tuple(names)


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    weight_dtype: Any = "float8_e4m3fn",
) -> dict[str, float]:
    """Return static scales of the inputs of linear layers, from runs of the model that is not yet quantized.

    A scale is ``amax / MAX``: the largest magnitude that a layer's input had in any batch, over the largest value of
    the format that inputs are quantized to. Magnitudes stay on the model's device until all batches have run.

    Args:
        model: runs without gradients, in the mode (training or not) that it is in.
        batches: what the model is called with: a tuple is its arguments, a mapping its keyword arguments, all else its
            one argument.
        include: as for `quantize_model_`.
        exclude: as for `quantize_model_`.
        weight_dtype: the FP8 format of the weights, which decides that of inputs.

    Returns:
        By layer, for ``quantize_model_(input_scales=...)``. Layers that were not called, or saw zeros only, are left
        out.

    Raises:
        ScaleError: a layer's input was not finite.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
        >>> fp8core.torch.calibrate(model, [torch.tensor([[1.0, -448.0, 0.0, 2.0]])])
        {'0': 1.0}
    """
    chosen, shared = _chosen(model, include, exclude), _shared_weights(model)
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = args[0] if args else kwargs["input"]
            largest = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
            known = seen.get(name)
            seen[name] = largest if known is None else torch.maximum(known, largest)  # a NaN stays

        return before

    watched = [
        (name, places[0].layer)
        for name, places in _layers(model)
        if _reason_to_keep(name, places, chosen, shared) is None
    ]
    hooks = [layer.register_forward_pre_hook(watch(name), with_kwargs=True) for name, layer in watched]
    try:
        with torch.no_grad():
            for batch in batches:
                _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    largest = {name: float(amax) for name, amax in seen.items()}
    for name, amax in largest.items():
        if not amax < float("inf"):
            raise ScaleError(f"calibrate needs finite inputs, got {amax} in {name}")
    maximum = FORMATS[input_format(dtype_name(weight_dtype, "weight_dtype", FORMATS))].maximum
    return {name: amax / maximum for name, amax in largest.items() if amax}


def warm_up(model: nn.Module, rows: Iterable[int] = (1, 16), dtype: torch.dtype = torch.bfloat16) -> None:
    """Call every `Linear` of a model with zeros of so many rows, so that its kernels are compiled and loaded.

    The first call of a kind compiles and loads kernels, which must not happen while a stream is captured into a graph.

    Args:
        model: a model, or a `Linear` itself.
        rows: how many rows, or tokens, calls will have.
        dtype: of the inputs.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 8, dtype=torch.bfloat16))
        >>> report = fp8core.torch.quantize_model_(model)
        >>> fp8core.torch.warm_up(model, rows=[1, 16])
    """
    sizes = tuple(rows)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, Linear):
                for m in sizes:
                    layer(torch.zeros(m, layer.in_features, dtype=dtype, device=layer.weight.device))


class Place(NamedTuple):
    """Where a module is held."""

    parent: nn.Module
    attribute: str
    layer: nn.Linear


def _layers(model: nn.Module) -> Iterator[tuple[str, list[Place]]]:
    """Yield every linear layer by its first name, with all places that hold it."""
    places: dict[int, list[Place]] = {}
    for parent in model.modules():
        for attribute, layer in parent._modules.items():
            if isinstance(layer, nn.Linear):
                places.setdefault(id(layer), []).append(Place(parent, attribute, layer))
    for name, module in model.named_modules():
        if id(module) in places:
            yield name, places[id(module)]


def _shared_weights(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, one for every module that holds it."""
    names: dict[int, list[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append(f"{prefix}.{name}" if prefix else name)
    return names


class _Chosen(NamedTuple):
    """What decides about a layer by its name: patterns, and what is known of the model's names."""

    patterns: Selection
    names: kinds.Names

    def reason_to_keep(self, name: str, shape: tuple[int, ...]) -> str | None:
        """Return why a layer of this name stays as it is, or None."""
        excluded = self.patterns.excluded_by(name)
        if excluded is not None:
            return f"its name matches exclude, {excluded!r}"
        if self.patterns.include is not None:
            return "its name matches no pattern of include" if self.patterns.included_by(name) is None else None
        kind = kinds.kind_of(name, shape, self.names)
        return None if kind in _LINEAR else f"its name says {kind.name}"


def _chosen(model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str]) -> _Chosen:
    patterns = selection(include, exclude, (name for name, _ in _layers(model)))
    model_type = str(getattr(getattr(model, "config", None), "model_type", ""))
    return _Chosen(patterns, kinds.names_of((), (), {"model_type": model_type}))


def _reason_to_keep(name: str, places: list[Place], chosen: _Chosen, shared: dict[int, list[str]]) -> str | None:
    """Return why a layer stays as it is, or None."""
    layer, kind = places[0].layer, type(places[0].layer)
    if kind is not nn.Linear:
        return "it is FP8 already" if issubclass(kind, Linear) else f"it is a {kind.__name__}, not a Linear of torch.nn"
    for place in places:
        if isinstance(place.parent, READ_WEIGHTS):
            return f"its {type(place.parent).__name__} reads the weight itself"
    weight = layer.weight
    others = [other for other in shared[id(weight)] if other != f"{name}.weight"]
    if others:
        return f"its weight is that of {others[0].removesuffix('.weight')}, too"
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "it has hooks"
    if str(weight.dtype).removeprefix("torch.") not in WIDE:
        return f"its weight is {weight.dtype}"
    if not weight.numel():
        return "its weight has no elements"
    return chosen.reason_to_keep(name, tuple(weight.shape))


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple):
        model(*batch)
    else:
        model(batch)
