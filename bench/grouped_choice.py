"""Judges the choice of tiles of grouped products by the times of all of them; needs no GPU.

    python -m bench.grouped_choice docs/results/grouped/*-tiles.jsonl

The files are those that `python -m bench.grouped --tiles --json FILE` writes. Printed is the chosen tile's time as a
multiple of the fastest one's.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import fp8core
from bench.grouped_cases import ALL, MODES
from bench.results import Record, us
from fp8core import ArraySpec
from fp8core.kernels.grouped import sm90
from fp8core.problem import BLOCK, GroupedMm


class Judged(NamedTuple):
    """A product, the tile that is chosen for it, and that tile's time as a multiple of the fastest one's."""

    record: Record
    tile: str
    loss: float


def problem(record: Record) -> GroupedMm:
    """Return the product of a record on an H200."""
    experts, rows, n, k = ALL[record["model"]].experts, record["rows"], record["n"], record["k"]
    blocks, blocked = -(-k // BLOCK), record["mode"] == "block"
    a, weight = ArraySpec((rows, k), "float8_e4m3fn"), ArraySpec((experts, n, k), "float8_e4m3fn")
    by_columns = ArraySpec((rows, blocks), "float32", strides=(1, -(-rows // 4) * 4))
    scale_a = by_columns if blocked else ArraySpec((rows, 1), "float32")
    scale_b = ArraySpec((experts, *((-(-n // BLOCK), blocks) if blocked else (n, 1))), "float32")
    ends = ArraySpec((experts,), "int32")
    asked = fp8core.explain(
        fp8core.grouped_scaled_mm_nt, a, weight, scale_a, scale_b, offs=ends, target="sm_90"
    ).problem
    assert isinstance(asked, GroupedMm)
    return asked


def judged(file: Path) -> Iterator[Judged]:
    """Yield the products that a file has times of tiles of."""
    for record in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
        times = {name: time for name in record.get("us", ()) if name != "fp8core" and (time := us(record, name))}
        if times:
            tile = next(str(tile) for tile in sm90.by_cost(problem(record)) if str(tile) in times)
            yield Judged(record, tile, times[tile] / min(times.values()))


def main() -> None:
    """Print the mean and the worst of the products of each file and mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        found = list(judged(file))
        for mode in MODES:
            some = [one for one in found if one.record["mode"] == mode]
            if some:
                print(f"{file.stem}: {summary(mode, some)}")


def summary(mode: str, some: Sequence[Judged]) -> str:
    """Return the mean and the worst of the products of a mode."""
    worst = max(some, key=lambda one: one.loss)
    r, average = worst.record, mean(one.loss for one in some)
    where = f"{r['model']}, {r['tokens']} tokens, {r['n']}x{r['k']}, {worst.tile}"
    return f"{len(some)} {mode}, mean {average:.4f}, worst {worst.loss:.3f} ({where})"


if __name__ == "__main__":
    main()
