"""The common style of the plots: colours, titles, lines and their labels."""

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
"""The palette of Okabe and Ito, whose colours colour-blind readers can distinguish."""
WIDTH: Final = 8.6
"""The width of a figure in inches, at 150 dots per inch: the width of a README, at twice its resolution."""
LETTERS: Final = 100
"""The number of letters in a title of full size; longer titles are smaller."""

LETTER, LINE = 0.025, 0.1
"""The approximate width of a letter and height of a line in labels, as fractions of the axes."""
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
    """Write a figure's title, and below it the device and date of its records, and how to read the figure."""
    height = figure.get_size_inches()[1]
    size = min(10, 10 * LETTERS / len(claim))
    figure.suptitle(claim, x=0.012, y=1 - 0.08 / height, ha="left", va="top", fontsize=size, weight="bold")
    where = ", ".join(part for part in (found.device, dates(records)) if part)
    figure.text(0.012, 1 - 0.32 / height, f"{where}. {under}", ha="left", va="top", fontsize=8.5, color="#555555")


def save(figure: Any, path: Path) -> Path:
    """Write a figure to a file, without metadata that depends on the version of matplotlib."""
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def end_labels(axes: Any, ends: Iterable[tuple[str, float, float]]) -> None:
    """Write each line's name to the right of its end (name, x, y), in its colour and without overlaps."""
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
    """Draw a variant's line, and return its name and end."""
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
