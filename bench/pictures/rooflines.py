"""Plots quantization and the fused producers: bytes per second by bytes, compared with the copy."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench import labels, results
from bench.pictures import style
from bench.report import claims
from bench.results import Record, Results

COLUMNS: Final = 3
"""Panels side by side."""


def bytes_named(count: float, _: object = None) -> str:
    """Return a number of bytes with a suitable unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _roofline(axes: Any, records: Sequence[Record], title: str) -> None:
    """Draw the bytes per second of each variant of one mode."""
    from matplotlib.ticker import FuncFormatter

    records = sorted(records, key=results.moved)
    axes.set(xscale="log", title=title, xlim=(5e3, 4e9), ylim=(0, 5))
    axes.xaxis.set_major_formatter(FuncFormatter(bytes_named))
    axes.minorticks_off()
    axes.set_xticks([1e4, 1e6, 1e8])
    axes.set_yticks(range(6))
    ends = []
    for name in results.names(records, ("copy", "torch.compile", "triton", "sgl", "vllm", "fp8core")):
        timed = [(results.moved(r), t) for r in records if (t := results.us(r, name))]
        ends.append(style.line(axes, [(size, size / time / 1e6) for size, time in timed], name))
    last = max(x for _, x, _ in ends)
    style.end_labels(axes, [(name, last, y) for name, _, y in ends])


def _rooflines(panels: Sequence[tuple[str, Sequence[Record]]], found: Results, claim: str) -> Any:
    from matplotlib import pyplot as plt

    panels = [panel for panel in panels if panel[1]]
    lines = -(-len(panels) // COLUMNS)
    figure, grid = plt.subplots(lines, COLUMNS, figsize=(style.WIDTH, 0.75 + 1.95 * lines), squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, records) in zip(grid.flat, panels, strict=False):
        _roofline(axes, records, title)
    for axes in grid[:, 0]:
        axes.set_ylabel("TB/s")
    drawn = [r for _, records in panels for r in records]
    under = "TB/s read and written against the bytes that a call has to move; bfloat16 to e4m3fn"
    style.title(figure, claim, found, drawn, under)
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.05, right=0.915, top=1 - 0.85 / height, bottom=0.3 / height, wspace=0.36, hspace=0.42)
    return figure


def quantize(found: Results, folder: Path) -> Path:
    """Draw quantization, with a panel for each mode."""
    panels = [(label, [r for r in found.quantize if r["mode"] == mode]) for mode, label in labels.MODES.items()]
    figure = _rooflines(panels, found, claims.quantize(found))
    return style.save(figure, folder / "quantize.png")


def fused(found: Results, folder: Path) -> Path:
    """Draw the fused producers, with a panel for each kind and mode."""
    panels = [
        (
            f"{label}, {labels.MODES.get(mode, mode)}",
            [r for r in found.fused if (r["kind"], r["mode"]) == (kind, mode)],
        )
        for kind, label in labels.KINDS.items()
        for mode in dict.fromkeys(r["mode"] for r in found.fused)
    ]
    figure = _rooflines(panels, found, claims.fused(found))
    return style.save(figure, folder / "fused.png")
