"""Runs the encoder in fp32 and in FP8, and compares its embeddings and the outputs of its layers."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from fp8core.demo.model import encoder_module
from fp8core.errors import DeviceError
from fp8core.ops.explain import explain
from fp8core.runtime import device
from fp8core.table import Explanation

if TYPE_CHECKING:
    import minilm

SchemeName = Literal["channel", "tensor", "block", "static"]
Place = Literal["auto", "cpu", "gpu"]


class Sentence(NamedTuple):
    """A sentence, its number of tokens, and the cosine between its FP8 and fp32 embeddings."""

    text: str
    tokens: int
    cosine: float


class Layer(NamedTuple):
    """A linear layer. Errors are relative to the fp32 run's output, in the Frobenius norm."""

    name: str
    shape: tuple[int, int]
    kernels: str
    own: float
    """The error of the layer alone, with the input of the fp32 run."""
    total: float
    """The error in the FP8 run, which includes the errors of all layers before it."""


class Report(NamedTuple):
    """The results of the demo; bytes are those of the linear layers' weights and scales."""

    scheme: str
    meaning: str
    place: str
    sentences: list[Sentence]
    layers: list[Layer]
    bytes_before: int
    bytes_after: int
    explanations: dict[str, Explanation]
    """By chosen kernel ("NAME to quantize"): the explanation of the choice for the first layer that uses it."""


def array_module(place: Place) -> Any:
    """Return CuPy or NumPy; raises DeviceError if a GPU is requested and there is none."""
    if place == "gpu" and not device.count():
        raise DeviceError(f"the demo cannot run on a GPU: {device.why_none()}")
    return device.cupy() if place != "cpu" and device.count() else np


def ticks(scheme: SchemeName) -> int:
    """Return how often `compare` ticks: for three passes over 36 layers, for the weights, and for static scales."""
    return 3 * 36 + (2 if scheme == "static" else 1)


def compare(folder: Path, scheme: SchemeName, place: Place, tick: Callable[[str], None]) -> Report:
    """Run the encoder in fp32 and in FP8, and return the differences."""
    module = encoder_module()
    chosen: minilm.Scheme = module.SCHEMES[scheme]
    xp = array_module(place)
    encoder: minilm.Encoder = module.Encoder(folder, xp)
    tokenizer: minilm.Tokenizer = module.Tokenizer(folder / "vocab.txt")
    ids, mask = tokenizer(module.SENTENCES)
    seen: dict[str, tuple[Any, Any]] = {}

    def record(name: str, x: Any, y: Any) -> None:
        seen[name] = (x, y)
        tick("encoding in fp32")

    exact = encoder(ids, mask, record)
    scales = None
    if chosen.static:
        tick("calibrating")
        scales = module.calibrated(encoder, *tokenizer(module.CALIBRATION))
    before = sum(encoder.dense(name).weight.nbytes for name in encoder.linear_names())
    tick("quantizing weights")
    layers = module.quantized(encoder, chosen, scales)
    encoder.linears.update(layers)
    counted = xp.asarray(mask)
    totals: dict[str, float] = {}

    def measure(name: str, _: Any, y: Any) -> None:
        totals[name] = _difference(xp, y[counted], seen[name][1][counted])
        tick("encoding in FP8")

    near = encoder(ids, mask, measure)
    rows: list[Layer] = []
    explanations: dict[str, Explanation] = {}
    for name, layer in layers.items():
        x, y = seen[name]
        product = explain(layer, x)
        steps = {"quantize": product.before[0], "multiply": product}
        kernel = " + ".join(str(step.chosen) for step in steps.values())
        for step, explanation in steps.items():
            explanations.setdefault(f"{explanation.chosen} to {step}", explanation)
        own = _difference(xp, layer(x)[counted], y[counted])
        rows.append(Layer(name, tuple(layer.weight.shape), kernel, own, totals[name]))
        tick("measuring layers")
    after = sum(math.prod(layer.weight.shape) + layer.weight_scale.nbytes for layer in layers.values())
    cosines = [float(c) for c in (exact * near).sum(-1)]
    where = "the host, with NumPy" if xp is np else f"{device.target(device.current())}, with CuPy"
    lengths = mask.sum(-1).tolist()
    sentences = [Sentence(*row) for row in zip(module.SENTENCES, lengths, cosines, strict=True)]
    return Report(scheme, chosen.meaning, where, sentences, rows, before, after, explanations)


def _difference(xp: Any, got: Any, want: Any) -> float:
    return float(xp.linalg.norm(got - want) / xp.linalg.norm(want))
