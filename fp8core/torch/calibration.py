"""Static input scales, measured by running a model before it is quantized."""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor, nn

from fp8core.checkpoint.formats.schemes import static_scale
from fp8core.core.checks import is_one_of
from fp8core.dtypes import FORMATS
from fp8core.errors import ScaleError
from fp8core.interop import dtype_name, scalar
from fp8core.ops.linear import input_format
from fp8core.torch.layers import check_model, sorted_layers

_BINS: Final = 0x8001
"""One bin for each magnitude of bfloat16, and one for float32 NaNs that round up past the last of them."""


class _Magnitudes(Protocol):
    """Statistics of the inputs of one layer, kept on the inputs' device until `bound` reads them."""

    def add(self, x: Tensor) -> None:
        """Add one input to the statistics."""

    def bound(self) -> float:
        """Return the magnitude to map to the largest value of the format; not finite if some input was not finite."""


class _Largest:
    def __init__(self) -> None:
        self._seen: Tensor | None = None

    def add(self, x: Tensor) -> None:
        largest = x.detach().abs().amax().float() if x.numel() else x.new_zeros((), dtype=torch.float32)
        self._seen = largest if self._seen is None else torch.maximum(self._seen, largest)  # a NaN stays

    def bound(self) -> float:
        return 0.0 if self._seen is None else float(self._seen)


class _Percentile:
    """A histogram of magnitudes, each rounded up to bfloat16; bfloat16 inputs are counted exactly."""

    def __init__(self, percent: float) -> None:
        self._percent = Fraction(repr(percent))  # the decimal: 99.9 as a float is more, and may be one element more
        self._counts: Tensor | None = None

    def add(self, x: Tensor) -> None:
        bits = x.detach().float().abs().flatten().view(torch.int32).long()
        counts = torch.bincount((bits + 0xFFFF) >> 16, minlength=_BINS)
        self._counts = counts if self._counts is None else self._counts + counts

    def bound(self) -> float:
        if self._counts is None or not self._counts.sum():
            return 0.0
        seen = self._counts.cpu()
        last = int(seen.nonzero().max())
        total = seen.cumsum(0)
        wanted = math.ceil(int(total[-1]) * self._percent / 100)
        found = int(torch.searchsorted(total, wanted))
        place = min(last, 0x7FFF) if last >= 0x7F80 else found  # an infinity or NaN counts even above the percentile
        return float(torch.tensor(place << 16, dtype=torch.int64, device="cpu").to(torch.int32).view(torch.float32))


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    method: Literal["max", "percentile"] = "max",
    percentile: float | None = None,
    weight_dtype: Any = "float8_e4m3fn",
) -> dict[str, float]:
    """Measure static input scales of linear layers by running the model, before it is quantized, on sample batches.

    A scale is ``amax / MAX``: the largest magnitude of a layer's input over all batches, divided by the largest value
    of the FP8 format that inputs are quantized to. With ``method="percentile"``, the smallest magnitude that at least
    ``percentile`` percent of the elements of all batches do not exceed takes the place of amax; quantization clamps
    larger elements. The statistics stay on the model's device until all batches have run.

    Args:
        model: the model. It runs without gradients, in its current mode (training or evaluation); modules compiled by
            torch.compile run eagerly.
        batches: the arguments of each call of the model: a tuple holds positional arguments, a mapping keyword
            arguments, and any other object is the only argument.
        include: as for `quantize_model_`.
        exclude: as for `quantize_model_`.
        method: "max" or "percentile".
        percentile: a number above 0 and at most 100, for the method "percentile" only; by default 99.99. Magnitudes are
            rounded up to bfloat16 before they are counted: the result is exact for bfloat16 inputs and up to a factor
            of 1 + 2^-7 too large for others.
        weight_dtype: the FP8 format of the weights, which determines the format of inputs.

    Returns:
        Scales by layer name, as ``quantize_model_(input_scales=...)`` takes them. Layers that were not called, or
        received only zeros or numbers so small that float32 does not hold the scale, are left out.

    Raises:
        ScaleError: a layer's input was not finite; method, percentile or batches is not valid; or percentile is given
            for another method.
        CheckpointError: a regular expression is not valid, or a pattern matches no layer.
        DTypeError: model is no ``torch.nn.Module``, or weight_dtype is not an FP8 format.

    Examples:
        >>> import torch, fp8core.torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8))
        >>> fp8core.torch.calibrate(model, [torch.tensor([[1.0, -448.0, 0.0, 2.0]])])
        {'0': 1.0}
    """
    check_model(model)
    if not is_one_of(method, ("max", "percentile")):
        raise ScaleError(f"method needs one of max, percentile, got {method!r}")
    _check_batches(batches)
    if method != "percentile" and percentile is not None:
        raise ScaleError(f"percentile needs method='percentile', got method={method!r}")
    percent = scalar(99.99 if percentile is None else percentile)
    if percent is None or not 0 < percent <= 100:
        raise ScaleError(f"percentile needs a number above 0 and at most 100, got {percentile!r}")
    maximum = FORMATS[input_format(dtype_name(weight_dtype, "weight_dtype", FORMATS))].maximum
    seen: dict[str, _Magnitudes] = {}

    def watch(name: str) -> Any:
        seen[name] = _Largest() if method == "max" else _Percentile(percent)

        def before(_layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[name].add(args[0] if args else kwargs["input"])

        return before

    watched = sorted_layers(model, include, exclude).chosen
    hooks = []
    try:
        for name, places in watched.items():
            hooks.append(places[0].layer.register_forward_pre_hook(watch(name), with_kwargs=True))
        with torch.no_grad(), _eagerly():
            for batch in batches:
                _call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    bounds = {name: magnitudes.bound() for name, magnitudes in seen.items()}
    for name, bound in bounds.items():
        if not bound < float("inf"):
            raise ScaleError(f"calibrate needs finite inputs, got {bound} in {name}")
    scales = {name: bound / maximum for name, bound in bounds.items()}
    return {name: scale for name, scale in scales.items() if static_scale(scale) is not None}


def _check_batches(batches: object) -> None:
    if isinstance(batches, Mapping):
        raise ScaleError("batches needs an iterable of batches, got a mapping, which is one batch: pass a list of it")
    items = ("__iter__", "__getitem__")  # a Dataset of torch has only the latter
    if isinstance(batches, str | bytes) or not any(hasattr(batches, one) for one in items):
        raise ScaleError(f"batches needs an iterable of batches, got {type(batches).__name__}")


def _eagerly() -> AbstractContextManager[Any]:
    """Return a context in which compiled modules run eagerly: compiled graphs do not call hooks added later."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple):
        model(*batch)
    else:
        model(batch)
