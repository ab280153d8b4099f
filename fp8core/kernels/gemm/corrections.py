"""Corrections of estimated times: decision trees for each measured model of GPU and each kernel.

The terms of an estimate leave errors that depend on the tile, on how full the device is, and on the kernel
(experiments/2026-11-choice). `python -m bench.fit_estimates --write` writes `corrections.json`: for each kernel the
thresholds with which its features are compared, and a line of text per tree. A line has two characters per question,
the numbers of a feature and of one of its thresholds, followed by one character, the leaf, for every combination of
answers. A character stands for its index in `DIGITS`; for a leaf `MOST` is subtracted.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from itertools import accumulate
from operator import getitem, or_
from typing import Any, Final, NamedTuple

from fp8core.runtime import device
from fp8core.target import Target

FILE: Final = "corrections.json"
DIGITS: Final = "".join(chr(code) for code in range(ord("#"), ord("~") + 1) if chr(code) != "\\")
"""The characters that JSON does not escape."""
MOST: Final = len(DIGITS) // 2
"""The greatest leaf."""
LEAF: Final = 2e-4
"""The unit of leaves, which are added to the logarithm of a time."""
_VALUES: Final = {ord(digit): value for value, digit in enumerate(DIGITS)}
_BITS: Final = 8
"""Bits for the answers to a tree's questions, and so the most questions of a tree."""


class Grown(NamedTuple):
    """The trees of a kernel, as the file has them."""

    thresholds: Mapping[str, Sequence[float]]
    """The thresholds of each feature that is used, by its name, in ascending order."""
    questions: int
    """Questions of each tree."""
    trees: Sequence[str]
    """A line per tree."""


class Forest(NamedTuple):
    """Trees in the form in which they are evaluated: one look-up per feature gives all its answers, for all trees."""

    features: tuple[tuple[int, tuple[float, ...], tuple[int, ...]], ...]
    """For each feature: its number, its thresholds, and the answers of all trees, a byte each, by the number of
    thresholds that a value is above."""
    leaves: tuple[bytes, ...]
    """The leaves of each tree by its answers, plus `MOST`."""

    def sum_of(self, asked: tuple[float, ...]) -> int:
        """Return the sum of the leaves for some features."""
        answers = 0
        for number, thresholds, given in self.features:
            answers |= given[bisect_left(thresholds, asked[number])]
        count = len(self.leaves)
        return sum(map(getitem, self.leaves, answers.to_bytes(count, "little"))) - MOST * count


@cache
def trees() -> Mapping[str, Mapping[str, Grown]]:
    """Return the trees of the file, by the names of the measured models of GPU and by kernels."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return {gpu: {name: Grown(**kernel) for name, kernel in kernels.items()} for gpu, kernels in found["trees"].items()}


@cache
def forest_of(kernel: str, fields: tuple[str, ...], gpu: str | None) -> Forest | None:
    """Return the trees of a kernel on a model of GPU, or None if it was not measured; ``fields`` name the features."""
    grown = trees().get(gpu, {}).get(kernel) if gpu is not None else None
    return None if grown is None else forest(grown, fields)


def forest(grown: Grown, fields: tuple[str, ...]) -> Forest:
    """Return trees in the form for evaluation, with features by their numbers in ``fields``.

    Raises:
        ValueError: ``fields`` lacks the name of a feature.
    """
    above = [[0] * (len(thresholds) + 1) for thresholds in grown.thresholds.values()]
    leaves = []
    for place, line in enumerate(grown.trees):
        digits = line.translate(_VALUES).encode("latin-1")
        asked, made = digits[: 2 * grown.questions], digits[2 * grown.questions :]
        for question in range(grown.questions):
            feature, threshold = asked[2 * question : 2 * question + 2]
            above[feature][threshold + 1] |= 1 << (_BITS * place + grown.questions - 1 - question)
        leaves.append(made)
    features = []
    for (name, thresholds), answers in zip(grown.thresholds.items(), above, strict=True):
        features.append((fields.index(name), tuple(thresholds), tuple(accumulate(answers, or_))))
    return Forest(tuple(features), tuple(leaves))


def factor(kernel: str, asked: tuple[float, ...], fields: tuple[str, ...], gpu: str | None) -> float:
    """Return the factor on the estimate of a product on a model of GPU: 1 if it was not measured."""
    found = forest_of(kernel, fields, gpu)
    return 1.0 if found is None else math.exp(LEAF * found.sum_of(tuple(asked)))


@cache
def gpu_of(target: Target) -> str | None:
    """Return the model of the target's GPU if it is known and was measured, or None."""
    model = device.name(target.device) if 0 <= target.device < device.count() else target.model
    return model if model in trees() else None


def measured_models(target: Target) -> tuple[str, ...]:
    """Return the measured models of GPU of an architecture; all measured ones are of sm_90."""
    return tuple(trees()) if (target.platform, target.arch) == ("cuda", 90) else ()
