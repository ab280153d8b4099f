"""Fit the costs of a k that several blocks of sm90_tiled split, and judge the choice among its tiles.

    python -m bench.split_costs [RECORDS ...]

RECORDS are files of `bench.choice --list narrow --wide`, by default those of docs/results/split. The numbers of
`tiled_cost` that the products of the half "fit" give are printed: least squares of the logarithm of estimate over time.
Times of unsplit tiles are estimated with the corrections for the GPU of a record. For the half "judge" follows how much
longer the tile of the least estimate takes than the fastest candidate that was timed, cuBLASLt's among them: with the
numbers of the source, with those found, and by the fastest tile. No GPU is needed.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np
from scipy.optimize import least_squares

from bench.choice_records import Record, problem_of, read, tile_of
from bench.fitting.samples import mean_us
from bench.unaligned_layouts import summary
from fp8core.kernels.gemm.sm90 import tiled_choice, tiled_cost
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.problem import ScaledMm

RUNS: Final = Path(__file__).resolve().parent.parent / "docs" / "results" / "split"
ERROR: Final = 0.05
"""Errors of the logarithm of a time count by their square below this, and linearly above it."""
SCALES: Final = "chain", "block"
"""The kinds of scales of the list. The factors of the others follow these: "promoted" has that of "chain", and "group"
1.19 times that of "block", by times that are not kept."""


class Timed(NamedTuple):
    """A tile of a product."""

    problem: ScaledMm
    tile: Tile
    unsplit_us: float
    """The estimate for as many tiles of as little k, or of the tile itself if k is not split."""
    us: float


Costs = Sequence[float]
"""The factor of each of `SCALES`, the addition for each of `tiled_cost.SPLITS`, and the time per million sums."""


def current() -> list[float]:
    """Return the costs of the source."""
    factors, shares = (tiled_cost.SPLIT_FACTORS[scales] for scales in SCALES), tiled_cost.SPLIT_US.values()
    return [*factors, *shares, 1e6 * tiled_cost.EXCHANGE_US]


def using(costs: Costs) -> AbstractContextManager[object]:
    """Put costs in the place of the source's within the block."""
    return patch.multiple(
        tiled_cost,
        SPLIT_FACTORS=dict(zip(SCALES, costs, strict=False)),
        SPLIT_US=dict(zip(tiled_cost.SPLITS, costs[len(SCALES) : -1], strict=True)),
        EXCHANGE_US=costs[-1] / 1e6,
    )


def estimate(one: Timed, costs: Costs) -> float:
    """Return the microseconds of a tile by some costs."""
    if one.tile.split_k == 1:
        return one.unsplit_us
    with using(costs):
        return tiled_cost.split_us(one.problem, one.tile, one.unsplit_us)


def tiles_of(record: Record) -> list[Timed]:
    """Return the tiles of a record."""
    found, p = list[Timed](), problem_of(record)
    for row in record["rows"]:
        tile = tile_of(row) if row["kernel"] == "sm90_tiled" else None
        if tile is None:
            continue
        apart, alone = (p, tile) if tile.split_k == 1 else (tiled_cost.unsplit(p, tile), tile._replace(split_k=1))
        us = tiled_choice.corrected_us(apart, alone, record["device"])
        found.append(Timed(p, tile, us, mean_us(row)))
    return found


def fitted(timed: Iterable[Timed]) -> list[float]:
    """Return the costs that fit times best."""
    shared = [one for one in timed if one.tile.split_k > 1]

    def errors(costs: Costs) -> list[float]:
        with using(costs):
            return [np.log(tiled_cost.split_us(one.problem, one.tile, one.unsplit_us) / one.us) for one in shared]

    found = least_squares(errors, current(), loss="soft_l1", f_scale=ERROR)
    return [float(f"{cost:.3g}") for cost in found.x]


def losses(pairs: Iterable[tuple[Record, list[Timed]]], us: Callable[[Timed], float]) -> list[float]:
    """Return by how much the tile for which ``us`` is least exceeds the fastest candidate, in ascending order."""
    return sorted(min(tiles, key=us).us / min(map(mean_us, record["rows"])) for record, tiles in pairs if tiles)


def main() -> None:
    """Fit and judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", help="files of records; else those in docs/results/split")
    files = parser.parse_args().records or sorted(RUNS.glob("*.jsonl"))
    pairs = [(record, tiles_of(record)) for record in read(files)]
    costs = fitted(one for record, tiles in pairs if record["half"] == "fit" for one in tiles)
    names = (*SCALES, *(f"{count} blocks" for count in tiled_cost.SPLITS), "a million sums")
    print(", ".join(f"{name} {cost:g}" for name, cost in zip(names, costs, strict=True)))
    ways: dict[str, Callable[[Timed], float]] = {
        "source": lambda one: estimate(one, current()),
        "found": lambda one: estimate(one, costs),
        "fastest tile": lambda one: one.us,
    }
    for way, us in ways.items():
        print(summary(way, losses((pair for pair in pairs if pair[0]["half"] == "judge"), us)))


if __name__ == "__main__":
    main()
