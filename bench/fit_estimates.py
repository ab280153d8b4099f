"""Fit the estimates behind the choice without tuning to measured times, and print the constants for the sources.

    python -m bench.fit_estimates [--check] [--write] [--only NAME ...] [--gpu NAME] [--cross PARTS] [RECORDS ...]

RECORDS are files of `bench.choice`, by default those of docs/results/choice; records of blind halves are left out. The
lines of `ordering`, `tiled_cost`, `decode_cost` and `fallback_cost` that hold constants are printed, and --write puts
them into these sources; it also writes `corrections.json`, the trees that correct the first three formulas. The search
begins at the constants of the sources. With --check the exit status is 0 if the sources are current: their trees are
those that the records give, and their constants are nearly as good as those that the search finds. The constants are of
an H200. Other models of GPU have trees alone, which are fitted again whenever the constants move, as trees correct the
formulas with these constants; --gpu fits those of one model alone (docs/dev/fitting-estimates.md).
"""

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from scipy.optimize import least_squares

from bench.choice_records import MEASURED, Record, report
from bench.fitting import batches, boosting
from bench.fitting.models import MODELS, Model, put_in_place, rounded
from bench.fitting.samples import CONSTANTS_FALL, Sample, records_of
from bench.fitting.trees import CORRECTIONS, grown, written
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.target import Target

ROOT: Final = Path(__file__).resolve().parent.parent
RUNS: Final = ROOT / "docs" / "results" / "choice"
ERROR: Final = 0.04
"""Errors of the logarithm of a time count by their square below this, and linearly above it."""
PRIOR: Final = 0.02
"""The error that counts as much as moving the logarithm of a constant by 1 from its start (regularization)."""
FARTHEST: Final = 3
"""The most that the logarithm of a constant may move."""
STEP: Final = 2.0**-26
"""The step of a constant's logarithm by which derivatives are computed."""
STEPS: Final = 30
GAIN: Final = 0.005
"""Constants are current if a search reduces the loss by no more than this fraction."""


class Fit(NamedTuple):
    """The result of a search for constants."""

    gained: float
    """The reduction of the loss, as a fraction of the loss at the constants of the sources."""
    error: float
    """The standard deviation of the logarithm of estimate over time, for candidates near the fastest."""


def search(model: Model, samples: list[Sample], steps: int = STEPS) -> Fit:
    """Search for the constants with the least loss, and leave them set in their modules."""
    constants = list(model.constants())
    start = np.array([constant.value for constant in constants])
    roots = np.sqrt([sample.weight for sample in samples])
    wanted = np.log([sample.us for sample in samples])
    calls = batches.Calls([sample.ask for sample in samples], (Target, Tile))

    def put(values: Iterable[float | batches.Batch]) -> None:
        for constant, value in zip(constants, values, strict=True):
            constant.put(value)

    def errors(moved: boosting.Floats) -> boosting.Floats:
        put(map(float, start * np.exp(moved)))
        return np.log(calls.results()[0]) - wanted

    def slopes(moved: boosting.Floats) -> boosting.Floats:
        """Return the derivatives of the errors: the differences that a step of each constant makes."""
        steps = np.where(moved + STEP > FARTHEST, -STEP, STEP)
        values = start * np.exp(moved + np.vstack([np.zeros(len(steps)), np.diag(steps)]))
        put(batches.Batch(column[:, None]) for column in values.T)
        found = np.log(calls.results(len(values)))
        return ((found[1:] - found[0]) / steps[:, None]).T

    def loss(moved: boosting.Floats) -> float:
        scaled = np.concatenate([roots * errors(moved), PRIOR * moved]) / ERROR
        return float(np.sum(np.sqrt(1 + scaled**2) - 1))

    with batches.elementwise(model.module):
        found = least_squares(
            lambda moved: np.concatenate([roots * errors(moved), PRIOR * moved]),
            np.zeros(len(start)),
            lambda moved: np.concatenate([roots[:, None] * slopes(moved), PRIOR * np.eye(len(moved))]),
            loss="soft_l1",
            f_scale=ERROR,
            max_nfev=steps,
            bounds=(-FARTHEST, FARTHEST),
        )
        before, after = loss(np.zeros(len(start))), loss(found.x)
        put(rounded(float(value)) for value in start * np.exp(found.x))
        last = np.log(calls.results()[0]) - wanted
    near = roots > math.exp(-CONSTANTS_FALL * 0.15 / 2)
    return Fit(1 - after / before if before else 0.0, float(np.std(last[near])))


def main() -> int:
    """Fit and print; with --check, return 1 if the sources are not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="*", help="files of records; else those in docs/results/choice")
    parser.add_argument("--check", action="store_true", help="exit with 1 where the sources are not current")
    parser.add_argument("--write", action="store_true", help="put what was found into the sources")
    parser.add_argument("--only", nargs="+", choices=(*MODELS, "trees"), default=(*MODELS, "trees"))
    parser.add_argument("--steps", type=int, default=STEPS, help="of a search for constants")
    parser.add_argument("--cross", type=int, default=0, help="into so many parts: fit to all but one, choose for that")
    parser.add_argument("--gpu", help="fit to times of this model of GPU alone, not to those of each")
    arguments = parser.parse_args()
    records: dict[str, list[Record]] = {}
    for record in records_of(arguments.records or sorted(RUNS.glob("*.jsonl"))):
        records.setdefault(record["device"], []).append(record)
    wanted = arguments.gpu or (MEASURED if arguments.cross else None)
    if not records or wanted not in (None, *records):
        parser.error(f"no record that may be fitted to is of {wanted or 'any GPU'}")
    if arguments.cross:
        from bench.fitting import cross_validation

        report(cross_validation.crossed(records[wanted], arguments.cross, arguments.steps))
        return 0
    gpus = sorted(records) if wanted is None else [wanted]
    of_trees, old = gpus if "trees" in arguments.only else [], False
    if arguments.check:  # before constants move
        for gpu in of_trees:
            differ = written(grown(records[gpu]), gpu) != CORRECTIONS.read_text(encoding="utf-8")
            print(f"trees of {gpu} are {'old' if differ else 'current'}", flush=True)
            old = old or differ
    for name in (name for name in MODELS if name in arguments.only and MEASURED in gpus):
        samples = MODELS[name].samples(records[MEASURED])
        found = search(MODELS[name], samples, arguments.steps)
        print(f"{name}: {len(samples)} times, error {found.error:.2%}, loss {-found.gained:+.2%}")
        print(*MODELS[name].lines(), sep="\n", flush=True)
        if arguments.write:
            put_in_place(MODELS[name])
        old = old or found.gained > GAIN
    if not arguments.check:
        for gpu in of_trees:
            text = written(grown(records[gpu]), gpu)
            print(f"{CORRECTIONS.name}: {len(text)} bytes with trees of {gpu}", flush=True)
            if arguments.write:
                CORRECTIONS.write_text(text, encoding="utf-8")
    return int(old and arguments.check)


if __name__ == "__main__":
    sys.exit(main())
