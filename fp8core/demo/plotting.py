"""Draws the demo's report."""

import importlib.util
from pathlib import Path
from typing import Final

from fp8core.demo.comparing import Report
from fp8core.errors import CheckpointError

DRAWN: Final = (".png", ".pdf", ".svg")
"""The file types of a plot."""


def check_plot(path: Path) -> None:
    """Refuse a path that `plot` could not write to, before the work.

    Raises:
        CheckpointError: matplotlib is not installed, or no plot can be written to the path.
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
