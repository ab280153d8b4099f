"""The linear path of a decoder layer: bars of time by rows, with the floor."""

from pathlib import Path
from typing import Final

from bench import claims, results
from bench.pictures import style
from bench.results import LAYER, Record, Results

COLOURS: Final = {"preallocated": style.COLOURS["fp8core"], "plain": "#56B4E9", "vllm": style.COLOURS["vllm"]}
HEIGHT: Final = 0.24
"""Of a bar; rows of the picture are 1 apart."""


def timed(found: Results) -> list[Record]:
    """Return the records that bars are drawn of, from few rows to many."""
    return sorted((r for r in found.layer if r.get("us")), key=lambda r: r["m"])


def draw(found: Results, folder: Path) -> Path:
    """Draw the time of a layer, a group of bars a number of rows."""
    from matplotlib import pyplot as plt

    records = timed(found)
    names = results.names(records, tuple(COLOURS))
    figure, axes = plt.subplots(figsize=(style.WIDTH, 1.15 + 0.28 * len(names) * len(records)))
    most = max(results.us(r, name) or 0.0 for r in records for name in names)
    for row, record in enumerate(records):
        top = row - (len(names) - 1) * HEIGHT * 0.55
        for place, name in enumerate(names):
            time = results.us(record, name)
            if time is None:
                continue
            y = top + place * HEIGHT * 1.1
            axes.barh(y, time, HEIGHT, color=COLOURS[name])
            axes.text(time + most / 120, y + 0.01, f"{time:.1f} us  {LAYER[name]}", va="center", fontsize=7.5)
        floor, half = record["floor_us"], len(names) * HEIGHT * 0.58
        axes.plot([floor, floor], [row - half, row + half], color="#222222", linewidth=1.4)
        if not row:
            axes.text(floor, row - half - 0.02, f"floor {floor:.1f}", fontsize=7, ha="center", va="bottom")
    axes.set_yticks(range(len(records)), [f"m = {r['m']}" for r in records])
    axes.set(xlim=(0, most * 1.34), ylim=(len(records) - 0.5, -0.62), xlabel="us")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    under = "RMS norms, SiLU, quantization and the four products of a layer in a CUDA graph; floor: bytes at 4.3 TB/s"
    style.title(figure, claims.layer(found), found, under)
    height = figure.get_size_inches()[1]
    figure.subplots_adjust(left=0.07, right=0.985, top=1 - 0.6 / height, bottom=0.42 / height)
    return style.save(figure, folder / "decoder-layer.png")
