"""What the pictures share: colours, titles, lines and their labels."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from bench.labels import DECODE, LABELS, LIBRARY
from bench.results import Record, Results, dates

COLOURS: Final = {
    "fp8core": "#0072B2",
    DECODE: "#0072B2",
    LIBRARY: "#E69F00",
    "copy": "#8C8C8C",
    "vllm": "#D55E00",
    "sgl": "#009E73",
    "torch": "#CC79A7",
    "torch.compile": "#CC79A7",
    "deep_gemm": "#56B4E9",
    "sgl_deep_gemm": "#009E73",
    "flashinfer": "#D55E00",
    "triton": "#56B4E9",
    "baseline": "#D55E00",
    "floor": "#5A5A5A",
}
"""Of Okabe and Ito, which colour-blind readers can tell apart."""
WIDTH: Final = 8.6
"""Inches, at 150 dots each: as wide as a README shows, twice as fine."""
LETTERS: Final = 100
"""How many letters of a title fit beside each other; longer titles are smaller."""

LETTER, LINE = 0.025, 0.1
"""Of a line's name: about how wide a letter is and how high a line, as parts of the axes."""
OURS: Final = ("fp8core", DECODE, LIBRARY)
STYLE: Final = {
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.edgecolor": "#999999",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#E6E6E6",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "legend.frameon": False,
}


def title(figure: Any, claim: str, found: Results, records: Iterable[Record], under: str) -> None:
    """Write what a figure shows, and below it on what and when its records were measured, and how to read it."""
    height = figure.get_size_inches()[1]
    size = min(10, 10 * LETTERS / len(claim))
    figure.suptitle(claim, x=0.012, y=1 - 0.08 / height, ha="left", va="top", fontsize=size, weight="bold")
    where = ", ".join(part for part in (found.device, dates(records)) if part)
    figure.text(0.012, 1 - 0.32 / height, f"{where}. {under}", ha="left", va="top", fontsize=8.5, color="#555555")


def save(figure: Any, path: Path) -> Path:
    """Write a figure to a file, without what differs from version to version."""
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def end_labels(axes: Any, ends: Iterable[tuple[str, float, float]]) -> None:
    """Write each line's name right of its end (name, x, y), apart from the others, in its colour."""
    taken: list[tuple[float, float, float]] = []
    to_axes = axes.transData + axes.transAxes.inverted()
    for name, x, y in sorted(ends, key=lambda end: end[2]):
        shown = LABELS.get(name, name)
        left, at = to_axes.transform((x, y))
        right = left + LETTER * len(shown)
        for first, last, height in taken:  # from the lowest to the highest
            if first < right and left < last and abs(at - height) < LINE:
                at = height + LINE
        taken = sorted([*taken, (left, right, at)], key=lambda place: place[2])
        weight = "bold" if name in OURS else "normal"
        axes.text(
            *(left + 0.025, at, shown),
            transform=axes.transAxes,
            color=COLOURS[name],
            fontsize=7.5,
            va="center",
            weight=weight,
        )


def line(axes: Any, points: Sequence[tuple[float, float]], name: str) -> tuple[str, float, float]:
    """Draw a variant's line and return its end."""
    wide = {"copy": 4.5, **dict.fromkeys(OURS, 2.0)}.get(name, 0.9)
    dot = 0 if name == "copy" else 1.2 + wide
    axes.plot(
        *zip(*points, strict=True),
        color="#CFCFCF" if name == "copy" else COLOURS[name],
        linewidth=wide,
        marker="o",
        markersize=dot,
    )
    return name, *points[-1]
