"""Draws a benchmark's results as PNG files.

    python -m bench.plot FILE.jsonl [--out FOLDER]

quantize and fused: bytes per second by bytes, with the copy. products: time above the floor. crossover: time by rows.
decoder-layer: time of the linear path of a layer. Plots without records in the file are not drawn.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench import results
from bench.labels import PRODUCTS
from bench.pictures import layer, products, rooflines, style
from bench.results import Results

PICTURES: Final[dict[str, Callable[[Results, Path], Path]]] = {
    "decoder-layer": layer.draw,
    "quantize": rooflines.quantize,
    "fused": rooflines.fused,
    **{f"products-{mode}": partial(products.draw, mode=mode) for mode in PRODUCTS},
    "crossover": products.crossover,
}


def drawable(found: Results) -> list[str]:
    """Return the names of the plots for which there are records."""
    few = {r["mode"] for r in products.few(found)}
    records = {
        "decoder-layer": layer.timed(found),
        "quantize": found.quantize,
        "fused": found.fused,
        "crossover": products.crossings(found),
    }
    records |= {f"products-{mode}": [mode] if mode in few else [] for mode in PRODUCTS}
    return [name for name in PICTURES if records[name]]


def draw(found: Results, folder: Path) -> list[Path]:
    """Draw all plots with records into ``folder``, and return the files."""
    import matplotlib as mpl
    from matplotlib import pyplot as plt

    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(style.STYLE):
        drawn = [PICTURES[name](found, folder) for name in drawable(found)]
    plt.close("all")
    return drawn


def main() -> int:
    """Draw the plots of a file; the exit status is 1 if there is nothing to draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of the pictures (here)")
    asked = parser.parse_args()
    drawn = draw(results.read(asked.file), asked.out)
    print("\n".join(map(str, drawn)) or f"{asked.file} has no records to draw")
    return 0 if drawn else 1


if __name__ == "__main__":
    sys.exit(main())
