"""Pictures of a benchmark's results, as PNG files.

    python -m bench.plot FILE.jsonl [--out FOLDER]

quantize and fused: bytes a second against bytes, beside the copy. products: time above the floor. crossover: time by
rows. What the file has no records of is not drawn.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from bench import claims, results
from bench.results import DECODE, LABELS, LIBRARY, PEERS, PRODUCTS, Record, Results

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
    "triton": "#56B4E9",
    "peer": "#D55E00",
    "floor": "#5A5A5A",
}
"""Of Okabe and Ito, which colour-blind readers can tell apart."""
WIDTH: Final = 8.6
"""Inches, at 150 dots each: as wide as a README shows, twice as fine."""

OURS: Final = ("fp8core", DECODE, LIBRARY)
MOST_ROWS: Final = 256
"""Of products by their rows."""
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
PANELS: Final = (1, 16, 64)
"""The numbers of rows that bars are drawn for."""
GOALS: Final = {"tensor": (1.7, 2.5), "row": (1.7, 2.5), "block": (2.0, 3.0)}
"""Microseconds above the floor that products are to take at most, up to 16 and up to 64 rows."""


def bytes_named(count: float, _: object = None) -> str:
    """Return a number of bytes as a reader says it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"


def _title(figure: Any, claim: str, found: Results, under: str = "") -> None:
    height = figure.get_size_inches()[1]
    figure.suptitle(claim, x=0.012, y=1 - 0.08 / height, ha="left", va="top", fontsize=10, weight="bold")
    where = ", ".join(str(part) for part in (found.device, found.machine.get("date")) if part)
    line = f"{where}. {under}"
    figure.text(0.012, 1 - 0.32 / height, line, ha="left", va="top", fontsize=8.5, color="#555555")


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return path


def _end_labels(axes: Any, ends: Iterable[tuple[str, float, float]]) -> None:
    """Write each line's name right of its end (name, x, y), apart from the others at the same x, in its colour."""
    taken: dict[float, float] = {}
    to_axes = axes.transData + axes.transAxes.inverted()
    for name, x, y in sorted(ends, key=lambda end: end[2]):
        right, height = to_axes.transform((x, y))
        at = max(height, taken.get(x, -1) + 0.1)
        taken[x] = at
        weight = "bold" if name in OURS else "normal"
        axes.text(
            *(right + 0.025, at, LABELS.get(name, name)),
            transform=axes.transAxes,
            color=COLOURS[name],
            fontsize=7.5,
            va="center",
            weight=weight,
        )


def _line(axes: Any, points: Sequence[tuple[float, float]], name: str) -> tuple[str, float, float]:
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


def _roofline(axes: Any, records: Sequence[Record], title: str) -> None:
    """Draw bytes a second of each variant of one mode."""
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
        ends.append(_line(axes, [(size, size / time / 1e6) for size, time in timed], name))
    last = max(x for _, x, _ in ends)
    _end_labels(axes, [(name, last, y) for name, _, y in ends])


def _rooflines(panels: Sequence[tuple[str, Sequence[Record]]], columns: int, found: Results, claim: str) -> Any:
    from matplotlib import pyplot as plt

    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(WIDTH, 0.75 + 1.95 * lines), squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, records) in zip(grid.flat, panels, strict=False):
        _roofline(axes, records, title)
    for axes in grid[:, 0]:
        axes.set_ylabel("TB/s")
    _title(figure, claim, found, "TB/s read and written against the bytes that a call has to move; bfloat16 to e4m3fn")
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.05, right=0.915, top=1 - 0.85 / height, bottom=0.3 / height, wspace=0.36, hspace=0.42)
    return figure


def quantize(found: Results, folder: Path) -> Path:
    """Draw quantization, a panel a mode."""
    panels = [(label, [r for r in found.quantize if r["mode"] == mode]) for mode, label in results.MODES.items()]
    figure = _rooflines([p for p in panels if p[1]], 3, found, claims.quantize(found))
    return _save(figure, folder / "quantize.png")


def fused(found: Results, folder: Path) -> Path:
    """Draw the fused producers, a panel a kind and mode."""
    panels = [
        (
            f"{label}, {results.MODES.get(mode, mode)}",
            [r for r in found.fused if (r["kind"], r["mode"]) == (kind, mode)],
        )
        for kind, label in results.KINDS.items()
        for mode in dict.fromkeys(r["mode"] for r in found.fused)
    ]
    figure = _rooflines([p for p in panels if p[1]], 3, found, claims.fused(found))
    return _save(figure, folder / "fused.png")


def _bars(axes: Any, records: Sequence[Record], m: int, mode: str, limit: float) -> None:
    """Draw the time above the floor of each shape, three bars each, cut at ``limit``."""
    sides: tuple[tuple[str, Callable[[Record], float | None]], ...] = (
        (DECODE, lambda r: claims.above(r, DECODE)),
        ("peer", claims.above_peer),
        (LIBRARY, lambda r: claims.above(r, LIBRARY)),
    )
    for place, record in enumerate(records):
        for offset, (name, of) in zip((-0.28, 0, 0.28), sides, strict=True):
            time = of(record)
            if time is None:
                continue
            axes.barh(place + offset, min(time, limit), 0.26, color=COLOURS[name])
            if time > limit or name == DECODE:
                inside = time > limit
                axes.text(
                    min(max(time, 0), limit) + (-0.1 if inside else 0.1),
                    place + offset + 0.02,
                    f"{time:.0f} ▸" if inside else f"{time:.1f}",
                    va="center",
                    ha="right" if inside else "left",
                    fontsize=6,
                    color="black" if inside and name == LIBRARY else "white" if inside else COLOURS[name],
                    bbox=None if inside else {"facecolor": "white", "edgecolor": "none", "pad": -0.6},
                )
    goal = GOALS[mode][m > 16]
    axes.axvline(goal, color="#5A5A5A", linewidth=1, linestyle=(0, (4, 3)))
    axes.text(goal, -0.62, f"goal {goal:g}", fontsize=7, color="#5A5A5A", ha="center", va="bottom")
    axes.set(xlim=(0, limit), ylim=(len(records) - 0.45, -0.6), xlabel="us above the floor")
    axes.set_title(f"m = {m}", pad=14)
    axes.grid(visible=False, axis="y")


def _few(found: Results) -> list[Record]:
    """Return the records that bars are drawn of, from the least weight to the largest."""
    few = [r for r in found.decode if r["m"] in PANELS and results.us(r, DECODE) is not None]
    return sorted(few, key=lambda r: (r["n"] * r["k"], r["n"]))


def products(found: Results, folder: Path, mode: str) -> Path:
    """Draw the products of few rows, a panel a number of rows."""
    from matplotlib import pyplot as plt

    records = [r for r in _few(found) if r["mode"] == mode]
    counts = [m for m in PANELS if any(r["m"] == m for r in records)]
    shapes = list(dict.fromkeys((r["n"], r["k"]) for r in records))
    figure, grid = plt.subplots(1, len(counts), figsize=(WIDTH, 1.5 + 0.34 * len(shapes)), squeeze=False, sharey=True)
    blank = {"floor_us": 0.0}
    for axes, m in zip(grid[0], counts, strict=True):
        of_shape = {(r["n"], r["k"]): r for r in records if r["m"] == m}
        _bars(axes, [of_shape.get(s, blank) for s in shapes], m, mode, 12.0)
    grid[0][0].set_yticks(range(len(shapes)), [f"{n} x {k}" for n, k in shapes])
    _title(
        figure,
        claims.products(records),
        found,
        f"{PRODUCTS[mode]} scales; a shape is n x k; the floor is the bytes at 4.3 TB/s",
    )
    height = figure.get_size_inches()[1]
    peers = ", ".join(LABELS[name] for name in results.names(records, PEERS))
    key = [
        (DECODE, "fp8core kernel"),
        (LIBRARY, LABELS[LIBRARY]),
        *([("peer", f"best of {peers}")] if peers else []),
    ]
    for x, (name, label) in zip((0.012, 0.21, 0.32), key, strict=False):
        figure.text(x, 1 - 0.68 / height, f"■ {label}", color=COLOURS[name], fontsize=8.5, weight="bold")
    figure.subplots_adjust(left=0.122, right=0.985, top=1 - 1.12 / height, bottom=0.42 / height, wspace=0.08)
    return _save(figure, folder / f"products-{mode}.png")


def crossings(found: Results, least: int = 4) -> list[tuple[str, Sequence[Record]]]:
    """Return the modes and shapes that were measured at many numbers of rows up to 256, of the most first."""
    drawn = [r for r in found.decode if r["m"] <= MOST_ROWS]
    by_shape = sorted(drawn, key=lambda r: (r["mode"] == "block", r["n"] * r["k"], r["mode"], r["n"], r["m"]))
    groups = [list(g) for _, g in groupby(by_shape, key=lambda r: (r["mode"], r["n"], r["k"]))]
    many = [g for g in groups if sum(results.us(r, DECODE) is not None for r in g) >= least and len(g) > least]
    most = max(map(len, many), default=0)
    return [(f"{g[0]['n']} x {g[0]['k']}, {PRODUCTS[g[0]['mode']]}", g) for g in many if len(g) == most][:4]


def crossover(found: Results, folder: Path) -> Path:
    """Draw the time of products by their rows."""
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    panels = crossings(found)
    lines = -(-len(panels) // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(WIDTH, 0.8 + 2.2 * lines), squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, records) in zip(grid.flat, panels, strict=False):
        axes.set(xscale="log", yscale="log", title=title)
        axes.plot([r["m"] for r in records], [r["floor_us"] for r in records], "--", color="#5A5A5A", linewidth=1)
        ends = [("floor", records[-1]["m"], records[-1]["floor_us"])]
        for name in results.names(records, (*PEERS, LIBRARY)):
            ends.append(_line(axes, [(r["m"], t) for r in records if (t := results.us(r, name))], name))
        ends.append(_line(axes, [(r["m"], t) for r in records if (t := results.own_kernel(r))], DECODE))
        axes.set_xlim(0.9, records[-1]["m"] * 1.15)
        axes.minorticks_off()
        for axis, ticks in ((axes.xaxis, (1, 4, 16, 64, 256)), (axes.yaxis, (3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100))):
            lowest, highest = axis.get_view_interval()
            axis.set_ticks([tick for tick in ticks if lowest <= tick <= highest])
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(xlabel="rows m" if axes in grid[-1] else "", ylabel="us" if axes in grid[:, 0] else "")
        _end_labels(axes, ends)
    _title(figure, claims.crossover(panels), found, "Time of one product by its rows.")
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.06, right=0.87, top=1 - 0.8 / height, bottom=0.42 / height, wspace=0.42, hspace=0.4)
    return _save(figure, folder / "crossover.png")


PICTURES: Final[dict[str, Callable[[Results, Path], Path]]] = {
    "quantize": quantize,
    "fused": fused,
    **{f"products-{mode}": partial(products, mode=mode) for mode in PRODUCTS},
    "crossover": crossover,
}


def drawable(found: Results) -> list[str]:
    """Return the names of the pictures that there are records for."""
    few = {r["mode"] for r in _few(found)}
    records = {"quantize": found.quantize, "fused": found.fused, "crossover": crossings(found)}
    records |= {f"products-{mode}": [mode] if mode in few else [] for mode in PRODUCTS}
    return [name for name in PICTURES if records[name]]


def draw(found: Results, folder: Path) -> list[Path]:
    """Draw what there are records of into ``folder`` and return the files."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(STYLE):
        drawn = [PICTURES[name](found, folder) for name in drawable(found)]
    plt.close("all")
    return drawn


def main() -> int:
    """Draw the pictures of a file; the exit status is 1 if it has nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the pictures (here)")
    asked = parser.parse_args()
    drawn = draw(results.read(asked.file), asked.out)
    print("\n".join(map(str, drawn)) or f"{asked.file} has no records to draw")
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
