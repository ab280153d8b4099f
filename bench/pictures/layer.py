"""Plots the time of decoder layers' linear paths as a multiple of the floor, by rows, with a panel for each model."""

from pathlib import Path
from typing import Final

from bench import results
from bench.labels import LAYER
from bench.pictures import style
from bench.report import claims
from bench.results import Record, Results

COLOURS: Final = {
    "plain": style.COLOURS["fp8core"],
    "vllm": style.COLOURS["vllm"],
    "torch": style.COLOURS["torch"],
}
ACROSS: Final = 2
"""The number of panels side by side."""
MOST: Final = 3.0
"""The largest multiple of the floor that is drawn; longer times are cut off."""


def timed(found: Results) -> list[Record]:
    """Return the records to draw, sorted by rows."""
    return sorted((r for r in found.layer if r.get("us")), key=lambda r: r["m"])


def draw(found: Results, folder: Path) -> Path:
    """Draw the time of layers by rows, relative to the sum of their launches' floors."""
    from matplotlib import pyplot as plt

    records = timed(found)
    models = list(dict.fromkeys(r["model"] for r in found.layer if r in records))
    down = -(-len(models) // ACROSS)
    height = 1.05 + 2.05 * down
    figure, panels = plt.subplots(down, ACROSS, figsize=(style.WIDTH, height), squeeze=False)
    for place, axes in enumerate(panels.flat):
        if place >= len(models):
            axes.set_visible(False)
            continue
        of_model = [r for r in records if r["model"] == models[place]]
        for name in results.names(of_model, tuple(COLOURS)):
            points = [(r["m"], min(time / r["floor_us"], MOST)) for r in of_model if (time := results.us(r, name))]
            wide = 2.0 if name == "plain" else 1.1
            axes.plot(*zip(*points, strict=True), color=COLOURS[name], linewidth=wide, marker="o", markersize=3)
        axes.axhline(1.0, color=style.COLOURS["floor"], linewidth=1.0)
        axes.set_xscale("log", base=2)
        rows = [r["m"] for r in of_model]
        axes.set_xticks(rows, [str(m) for m in rows])
        axes.minorticks_off()
        axes.set(ylim=(0.9, MOST * 1.02), title=models[place], xlabel="rows m" if place >= len(models) - ACROSS else "")
        axes.set_ylabel("" if place % ACROSS else "time / floor")
    names = results.names(records, tuple(COLOURS))
    lines = [plt.Line2D([], [], color=COLOURS[name], linewidth=2.0) for name in names]
    figure.legend(lines, [LAYER[name] for name in names], loc="lower center", ncols=4, fontsize=7.5)
    under = f"Norms, SiLU, quantization and products in a CUDA graph; longer times are drawn at {MOST:g}"
    style.title(figure, claims.layer(found), found, records, under)
    figure.subplots_adjust(left=0.06, right=0.985, top=1 - 0.75 / height, bottom=0.72 / height, hspace=0.35, wspace=0.1)
    return style.save(figure, folder / "decoder-layer.png")
