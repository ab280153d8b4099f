"""Plots products: the time above the floor by shape, and the time by rows across the change of kernels."""

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from bench import results
from bench.labels import BASELINES, DECODE, LABELS, LIBRARY, PRODUCTS
from bench.pictures import style
from bench.report import claims
from bench.report.goals import PRODUCT_BOUNDS
from bench.results import Record, Results

MOST_ROWS: Final = 256
"""The largest number of rows in the plot of time by rows."""
PANELS: Final = (1, 16, 64)
"""The numbers of rows for which bars are drawn."""
LIMIT: Final = 12.0
"""The microseconds at which bars are cut off."""
LEAST: Final = 4
"""Fewer numbers of rows make no line in the plot of time by rows."""


def _bars(axes: Any, records: Sequence[Record], m: int, mode: str) -> None:
    """Draw the time above the floor of each shape as three bars, cut off at `LIMIT`."""
    sides: tuple[tuple[str, Callable[[Record], float | None]], ...] = (
        (DECODE, claims.above_by_own),
        (LIBRARY, claims.above_by_library),
        ("baseline", claims.above_by_baseline),
    )
    for place, record in enumerate(records):
        for offset, (name, of) in zip((-0.28, 0, 0.28), sides, strict=True):
            time = of(record)
            if time is None:
                continue
            axes.barh(place + offset, min(time, LIMIT), 0.26, color=style.COLOURS[name])
            if time > LIMIT or name == DECODE:
                inside = time > LIMIT
                axes.text(
                    min(max(time, 0), LIMIT) + (-0.1 if inside else 0.1),
                    place + offset + 0.02,
                    f"{time:.0f} ▸" if inside else f"{time:.1f}",
                    va="center",
                    ha="right" if inside else "left",
                    fontsize=6,
                    color="black" if inside and name == LIBRARY else "white" if inside else style.COLOURS[name],
                    bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": -0.6},
                )
    goal = PRODUCT_BOUNDS[mode][m > 16]
    axes.axvline(goal, color="#5A5A5A", linewidth=1, linestyle=(0, (4, 3)))
    axes.text(goal, -0.62, f"goal {goal:g}", fontsize=7, color="#5A5A5A", ha="center", va="bottom")
    axes.set(xlim=(0, LIMIT), ylim=(len(records) - 0.45, -0.6), xlabel="us above the floor")
    axes.set_title(f"m = {m}", pad=14)
    axes.grid(visible=False, axis="y")


def few(found: Results) -> list[Record]:
    """Return the records for which bars are drawn, sorted by the size of the weight."""
    drawn = [r for r in found.decode if r["m"] in PANELS and results.own_kernel(r) is not None]
    return sorted(drawn, key=lambda r: (r["n"] * r["k"], r["n"]))


def draw(found: Results, folder: Path, mode: str) -> Path:
    """Draw the products of few rows, with a panel for each number of rows."""
    from matplotlib import pyplot as plt

    records = [r for r in few(found) if r["mode"] == mode]
    counts = [m for m in PANELS if any(r["m"] == m for r in records)]
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in records))
    figure, grid = plt.subplots(
        1, len(counts), figsize=(style.WIDTH, 1.5 + 0.34 * len(shapes)), squeeze=False, sharey=True
    )
    blank = {"floor_us": 0.0}
    for axes, m in zip(grid[0], counts, strict=True):
        of_shape = {(r["n"], r["k"]): r for r in records if r["m"] == m}
        _bars(axes, [of_shape.get(s, blank) for s in shapes], m, mode)
    grid[0][0].set_yticks(range(len(shapes)), [f"{n} x {k}" for n, k in shapes])
    style.title(
        figure,
        claims.products(records),
        found,
        records,
        f"Scales {PRODUCTS[mode]}; a shape is n x k; the floor is the bytes at {found.memory}",
    )
    height = figure.get_size_inches()[1]
    others = ", ".join(LABELS[name] for name in results.names(records, BASELINES))
    key = [
        (DECODE, "fp8core kernel"),
        (LIBRARY, LABELS[LIBRARY]),
        *([("baseline", f"best of {others}" if "," in others else others)] if others else []),
    ]
    for x, (name, label) in zip((0.012, 0.16, 0.26), key, strict=False):
        figure.text(x, 1 - 0.68 / height, f"■ {label}", color=style.COLOURS[name], fontsize=8.5, weight="bold")
    figure.subplots_adjust(left=0.122, right=0.985, top=1 - 1.12 / height, bottom=0.42 / height, wspace=0.08)
    return style.save(figure, folder / f"products-{mode}.png")


def crossings(found: Results) -> list[tuple[str, Sequence[Record]]]:
    """Return up to four modes and shapes that were measured at the most numbers of rows up to 256."""
    drawn = [r for r in found.decode if r["m"] <= MOST_ROWS]
    by_shape = sorted(drawn, key=lambda r: (r["mode"] == "block", r["n"] * r["k"], r["mode"], r["n"], r["m"]))
    groups = [list(g) for _, g in groupby(by_shape, key=lambda r: (r["mode"], r["n"], r["k"]))]
    many = [g for g in groups if sum(results.us(r, DECODE) is not None for r in g) >= LEAST and len(g) > LEAST]
    most = max(map(len, many), default=0)
    return [(f"{g[0]['n']} x {g[0]['k']}, {PRODUCTS[g[0]['mode']]}", g) for g in many if len(g) == most][:4]


def crossover(found: Results, folder: Path) -> Path:
    """Draw the time of products by their rows."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    panels = crossings(found)
    lines = -(-len(panels) // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(style.WIDTH, 0.8 + 2.2 * lines), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, records) in zip(grid.flat, panels, strict=False):
        axes.set(xscale="log", yscale="log", title=title)
        axes.plot([r["m"] for r in records], [r["floor_us"] for r in records], "--", color="#5A5A5A", linewidth=1)
        ends = [("floor", records[-1]["m"], records[-1]["floor_us"])]
        for name in results.names(records, (*BASELINES, LIBRARY)):
            ends.append(style.line(axes, [(r["m"], t) for r in records if (t := results.us(r, name))], name))
        ends.append(style.line(axes, [(r["m"], t) for r in records if (t := results.own_kernel(r))], DECODE))
        axes.set_xlim(0.9, records[-1]["m"] * 1.15)
        axes.minorticks_off()
        for axis, ticks in ((axes.xaxis, (1, 4, 16, 64, 256)), (axes.yaxis, (3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100))):
            lowest, highest = axis.get_view_interval()
            axis.set_ticks([tick for tick in ticks if lowest <= tick <= highest])
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(xlabel="rows m" if axes in grid[-1] else "", ylabel="us" if axes in grid[:, 0] else "")
        style.end_labels(axes, ends)
    drawn = [r for _, records in panels for r in records]
    style.title(figure, claims.crossover(panels), found, drawn, "Time of one product by its rows.")
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.06, right=0.87, top=1 - 0.8 / height, bottom=0.42 / height, wspace=0.42, hspace=0.4)
    return style.save(figure, folder / "crossover.png")
