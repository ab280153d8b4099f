"""Judges the choice of tiles of grouped products by the times of all of them; needs no GPU.

    python -m bench.grouped_choice docs/results/grouped/*-tiles.jsonl

The files are those that `python -m bench.grouped --tiles --json FILE` writes; of a product that several have, the last
one counts. Printed is the chosen tile's time as a multiple of the fastest one's.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import fp8core
from bench.grouped import ALL, MORE
from fp8core import ArraySpec
from fp8core.kernels.grouped import sm90
from fp8core.problem import BLOCK, GroupedMm

Record = Mapping[str, Any]


class Judged(NamedTuple):
    """A product, the tile that is chosen for it, and that tile's time as a multiple of the fastest one's."""

    record: Record
    tile: str
    loss: float

    @property
    def held_out(self) -> bool:
        """Whether the estimates were not fitted to it."""
        return self.record["model"] in MORE


def problem(record: Record) -> GroupedMm:
    """Return the product of a record on an H200."""
    model, n, k = ALL[record["model"]], record["n"], record["k"]
    rows, blocks = max(1, record["tokens"] * model.each // model.share), -(-k // BLOCK)
    blocked = record["mode"] == "block"
    a, weight = ArraySpec((rows, k), "float8_e4m3fn"), ArraySpec((model.experts, n, k), "float8_e4m3fn")
    by_columns = ArraySpec((rows, blocks), "float32", strides=(1, -(-rows // 4) * 4))
    scale_a = by_columns if blocked else ArraySpec((rows, 1), "float32")
    scale_b = ArraySpec((model.experts, *((-(-n // BLOCK), blocks) if blocked else (n, 1))), "float32")
    ends = ArraySpec((model.experts,), "int32")
    asked = fp8core.explain(
        fp8core.grouped_scaled_mm_nt, a, weight, scale_a, scale_b, offs=ends, target="sm_90"
    ).problem
    assert isinstance(asked, GroupedMm)
    return asked


def judged(files: Iterable[Path]) -> Iterator[Judged]:
    """Yield the products that files have times of tiles of."""
    found = {}
    for path in files:
        for record in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            if record.get("rows"):
                found[tuple(record[name] for name in ("model", "mode", "tokens", "n", "k"))] = record
    for record in found.values():
        us = {name: time["median"] for name, time in record["us"].items() if name != "fp8core"}
        tile = next(str(tile) for tile in sm90.by_cost(problem(record)) if str(tile) in us)
        yield Judged(record, tile, us[tile] / min(us.values()))


def main() -> None:
    """Print the mean and the worst of the products of each mode, fitted to and held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    found = list(judged(parser.parse_args().files))
    for held_out in (False, True):
        for mode in ("row", "block"):
            some = [one for one in found if one.held_out == held_out and one.record["mode"] == mode]
            if some:
                worst = max(some, key=lambda one: one.loss)
                r = worst.record
                where = f"{r['model']}, {r['tokens']} tokens, {r['n']}x{r['k']}, {worst.tile}"
                kind = "held out" if held_out else "fitted to"
                print(f"{len(some)} {mode}, {kind}: mean {mean(one.loss for one in some):.4f}, ", end="")
                print(f"worst {worst.loss:.3f} ({where})")


if __name__ == "__main__":
    main()
