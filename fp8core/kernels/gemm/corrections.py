"""What times of kernels differ from their estimates by: decision trees, for a model of GPU and a kernel.

An estimate is off by what its terms cannot say, in a way that depends on the tile, on how full the device is, and on
the kernel (experiments/2026-11-choice). `corrections.json` is written by `python -m bench.fit_estimates --write`: of
each kernel the thresholds that its features are compared with, and a line of text a tree. A line has two characters a
question, the number of a feature and that of one of its thresholds, and then a character for each answer to all of
them, the leaf. A character is its place among `DIGITS`; of a leaf less `MOST`.
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

from fp8core.problem import Target
from fp8core.runtime import device

FILE: Final = "corrections.json"
DIGITS: Final = "".join(chr(code) for code in range(ord("#"), ord("~") + 1) if chr(code) != "\\")
"""What JSON has as it is."""
MOST: Final = len(DIGITS) // 2
"""The greatest leaf."""
LEAF: Final = 2e-4
"""Leaves are whole multiples of this, of the logarithm of a time."""
_VALUES: Final = {ord(digit): value for value, digit in enumerate(DIGITS)}
_BITS: Final = 8
"""Of the answers to a tree's questions, which are that many at most."""


class Grown(NamedTuple):
    """Trees of a kernel, as the file has them."""

    thresholds: Mapping[str, Sequence[float]]
    """Of each feature that is asked for, by its name, in ascending order."""
    questions: int
    """Of each tree."""
    trees: Sequence[str]
    """A line for each."""


class Forest(NamedTuple):
    """Trees as they are walked: all answers that a value of a feature gives are looked up at once."""

    features: tuple[tuple[int, tuple[float, ...], tuple[int, ...]], ...]
    """The number of a feature, its thresholds, and by how many of these a value is above the answers of all trees, a
    byte each."""
    leaves: tuple[bytes, ...]
    """Of each tree by its answers, and `MOST` more."""

    def sum_of(self, asked: tuple[float, ...]) -> int:
        """Return the sum of the leaves that some features come to."""
        answers = 0
        for number, thresholds, given in self.features:
            answers |= given[bisect_left(thresholds, asked[number])]
        count = len(self.leaves)
        return sum(map(getitem, self.leaves, answers.to_bytes(count, "little"))) - MOST * count


@cache
def trees() -> Mapping[str, Mapping[str, Grown]]:
    """Return the trees of the file by the names of the GPU models whose times were measured, and by kernels."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return {gpu: {name: Grown(**kernel) for name, kernel in kernels.items()} for gpu, kernels in found["trees"].items()}


@cache
def forest_of(kernel: str, fields: tuple[str, ...], gpu: str | None) -> Forest | None:
    """Return the trees of a kernel on a model of GPU, None where it was not measured; ``fields`` name the features."""
    grown = trees().get(gpu, {}).get(kernel) if gpu is not None else None
    return None if grown is None else forest(grown, fields)


def forest(grown: Grown, fields: tuple[str, ...]) -> Forest:
    """Return trees that ask for features by their names as ones that ask for them by their numbers.

    Raises:
        ValueError: there is no feature of a name.
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
    """Return how many times its estimate a product takes on a model of GPU: 1 on one that was not measured."""
    found = forest_of(kernel, fields, gpu)
    return 1.0 if found is None else math.exp(LEAF * found.sum_of(tuple(asked)))


@cache
def gpu_of(target: Target) -> str | None:
    """Return the name of a GPU of this machine if kernels were measured on its model, or None."""
    if not 0 <= target.device < device.count():
        return None
    name = device.name(target.device)
    return name if name in trees() else None
