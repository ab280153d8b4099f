"""Fits the trees that correct the estimates to the residuals of the formulas, and writes the file that holds them.

All candidates of a product that were timed in one run share a part of their residual: the clock, and what the formulas
do not know about the product. No choice depends on this part. So each product of a run has an offset, which is fitted
together with the trees of all kernels, and the trees are fitted to the rest: how candidates of a product differ.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from bench.choice_records import Record
from bench.fitting import boosting
from bench.fitting.boosting import Floats
from bench.fitting.samples import Asked, asked_of_decode, asked_of_library, asked_of_tiles
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.corrections import DIGITS, Grown

CORRECTIONS: Final = Path(corrections.__file__).with_name(corrections.FILE)
FEW: Final = boosting.How(trees=200, depth=4, rate=0.15, unit=corrections.LEAF, greatest=corrections.MOST)
MANY: Final = FEW._replace(trees=400, depth=6, rate=0.12)
ASKED: Final[dict[str, tuple[Callable[[Iterable[Record]], Iterable[Asked]], boosting.How]]] = {
    "cublaslt": (asked_of_library, MANY),
    "sm90_tiled": (asked_of_tiles, MANY),
    "sm90_decode": (asked_of_decode, FEW),
}
"""By kernel: the samples that its trees are fitted to, and the hyperparameters."""
ROUGH: Final = FEW._replace(trees=100, rate=0.3)
"""The hyperparameters of the trees that are fitted together with the offsets of products."""
ROUNDS: Final = 2
"""How often these trees and the offsets are fitted in turn."""
FAR: Final = 0.7
"""Times whose logarithm differs by more than this from that of the estimate are outliers, and left out."""
NEAR_FALL: Final = 8.0
"""The weight of a candidate for its product's offset is exp(-NEAR_FALL * (time / least - 1)), least of all kernels."""
OF_NONE: Final = 0.3
"""The weight of an offset of 0 (regularization), where the fastest candidate has weight 1."""


class Times(NamedTuple):
    """The samples that the trees of a kernel are fitted to, one row for each time."""

    names: tuple[str, ...]
    features: Floats
    left: Floats
    """The residuals: logarithms of time over estimate."""
    us: Floats
    weights: Floats
    products: boosting.Numbers


def times_of(all_: Sequence[Iterable[Asked]]) -> list[Times]:
    """Return the samples of each kernel without outliers; the products of runs are numbered from 0."""
    kept = [[one for one in asked if abs(math.log(one.us / one.estimate)) <= FAR] for asked in all_]
    known = dict.fromkeys(one.product for some in kept for one in some)
    number = {product: place for place, product in enumerate(known)}
    return [
        Times(
            some[0].features._fields,  # type: ignore[attr-defined]
            np.array([one.features for one in some], dtype=np.float64),
            np.array([math.log(one.us / one.estimate) for one in some]),
            np.array([one.us for one in some]),
            np.array([one.weight for one in some]),
            np.array([number[one.product] for one in some]),
        )
        for some in kept
    ]


def shared(times: Sequence[Times]) -> Floats:
    """Return the offset of each product: the part of the residual that all its candidates share, beside trees."""
    products = np.concatenate([some.products for some in times])
    us = np.concatenate([some.us for some in times])
    least = np.full(products.max() + 1, np.inf)
    np.minimum.at(least, products, us)
    # Not NumPy's exp: its last bit depends on the processor, and the trees would depend on it.
    near = np.array([math.exp(-NEAR_FALL * slower) for slower in us / least[products] - 1])
    counts, found = np.bincount(products, near), np.zeros(len(least))
    for _ in range(ROUNDS):
        left = []
        for some in times:
            trees = boosting.fit(some.features, some.left - found[some.products], some.weights, ROUGH)
            left.append(some.left - boosting.sums(trees, some.features, ROUGH))
        found = np.bincount(products, near * np.concatenate(left)) / (counts + OF_NONE)
    return found


def grown(records: Sequence[Record]) -> dict[str, Grown]:
    """Return the fitted trees of each kernel that has trees."""
    times = times_of([asked(records) for asked, _ in ASKED.values()])
    alike = shared(times)
    return {
        kernel: packed(boosting.fit(some.features, some.left - alike[some.products], some.weights, how), some.names)
        for (kernel, (_, how)), some in zip(ASKED.items(), times, strict=True)
    }


def packed(trees: Sequence[boosting.Tree], names: Sequence[str]) -> Grown:
    """Return trees in the encoding of the file, which `fp8core.kernels.gemm.corrections` describes."""
    asked: dict[int, set[float]] = {}
    for cuts, _ in trees:
        for column, above in cuts:
            asked.setdefault(column, set()).add(above)
    columns = sorted(asked, key=lambda column: names[column])  # as in the file
    thresholds = {column: sorted(asked[column]) for column in columns}
    lines = []
    for cuts, leaves in trees:
        digits = [place for column, above in cuts for place in (columns.index(column), thresholds[column].index(above))]
        digits += [corrections.MOST + leaf for leaf in leaves]
        lines.append("".join(DIGITS[digit] for digit in digits))
    return Grown({names[column]: thresholds[column] for column in columns}, len(trees[0][0]), lines)


def written(made: dict[str, Grown], gpu: str) -> str:
    """Return the text of the file with these trees for a model of GPU; those of other models stay as they are."""
    known: dict[str, Any] = json.loads(CORRECTIONS.read_text(encoding="utf-8"))["trees"]
    mine = {kernel: some._asdict() for kernel, some in made.items()}

    def text_of(kernels: dict[str, Any]) -> str:
        return members({kernel: text_of_trees(**some) for kernel, some in kernels.items()})

    texts = members({name: text_of(kernels) for name, kernels in {**known, gpu: mine}.items()})
    return f'{{"made by": "python -m bench.fit_estimates --write", "trees": {texts}}}\n'


def text_of_trees(thresholds: dict[str, Sequence[float]], questions: int, trees: Sequence[str]) -> str:
    """Return the trees of a kernel as JSON: one line for each tree, and one for the thresholds of each feature."""
    asked = members({name: json.dumps(values, separators=(",", ":")) for name, values in thresholds.items()})
    lines = "[\n" + ",\n".join(map(json.dumps, trees)) + "]"
    return f'{{"thresholds": {asked},\n"questions": {questions}, "trees": {lines}}}'


def members(texts: dict[str, str]) -> str:
    """Return a JSON object of values that are JSON already, one line each, sorted by name."""
    return "{\n" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in sorted(texts.items())) + "}"
