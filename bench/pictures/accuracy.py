"""Plots the error of products by k, with a line for each kernel, with and without fast accumulation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.labels import BLOCK, DECODE, LIBRARY
from bench.pictures import style
from bench.results import Record, Results

LINES: Final = (
    (LIBRARY, True, "-", style.COLOURS[LIBRARY], "cuBLASLt"),
    (BLOCK, True, "-", "#56B4E9", "fp8core, m = 512"),
    (DECODE, True, "-", style.COLOURS[DECODE], "fp8core, m = 64"),
    (LIBRARY, False, ":", style.COLOURS[LIBRARY], "cuBLASLt, use_fast_accum=False"),
    (BLOCK, False, ":", "#56B4E9", "fp8core, m = 512, use_fast_accum=False"),
)
"""Kernel, use_fast_accum, line style, colour and label of each line."""
MODES: Final = {"tensor": "one scale each", "row": "per token x per channel"}
BOUND: Final = 4e-3
"""A reference line."""


def points(records: Sequence[Record], mode: str, kernel: str, fast: bool) -> list[tuple[int, float]]:
    """Return k and the error of a kernel on random data with bfloat16 results, at its largest measured m."""
    found = [
        r
        for r in records
        if (r["mode"], r["kernel"], r["fast"], r["data"], r["out"]) == (mode, kernel, fast, "random", "bfloat16")
    ]
    rows = max((r["m"] for r in found if kernel != DECODE or r["m"] <= 64), default=0)
    return sorted((r["k"], r["error"]) for r in found if r["m"] == rows)


def draw(found: Results, folder: Path) -> Path:
    """Draw the errors, with a panel for each mode of scales for which the library accumulates in one chain."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    figure, panels = plt.subplots(1, len(MODES), figsize=(style.WIDTH, 3.0), sharey=True)
    rounding = min(r["rounded"] for r in found.accuracy if r["out"] == "bfloat16" and r["data"] == "random")
    for axes, (mode, title) in zip(panels, MODES.items(), strict=True):
        axes.set(xscale="log", title=title, xlabel="k")
        axes.axhline(1e3 * rounding, color="#8C8C8C", linewidth=3)
        axes.axhline(1e3 * BOUND, color="#5A5A5A", linewidth=1, linestyle=(0, (4, 3)))
        for kernel, fast, drawn, colour, label in LINES:
            line = points(found.accuracy, mode, kernel, fast)
            if line:
                ks, errors = zip(*line, strict=True)
                width = 4 if kernel == LIBRARY else 1.5  # so that lines on top of each other are visible
                dots: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3, "linewidth": width}
                axes.plot(ks, [1e3 * e for e in errors], drawn, label=label, **dots)
        axes.minorticks_off()
        axes.set_xticks([512, 2048, 8192, 21504, 53248])
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panels[0].set_ylabel("relative error, 1e-3")
    panels[0].set_ylim(0, 10)
    panels[0].legend(loc="upper left", fontsize=7.5)
    panels[1].text(512, 1e3 * BOUND + 0.08, "4e-3", fontsize=7.5, color="#5A5A5A")
    panels[1].text(512, 1e3 * rounding - 0.75, "rounding to bfloat16 alone", fontsize=7.5, color="#5A5A5A")
    style.title(
        figure,
        "Fast accumulation in one chain loses accuracy with k, sums of 128 do not",
        found,
        found.accuracy,
        "Error of bfloat16 products of random data against float64.",
    )
    figure.subplots_adjust(left=0.06, right=0.985, top=0.78, bottom=0.14, wspace=0.05)
    return style.save(figure, folder / "accuracy.png")
