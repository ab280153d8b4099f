"""What times of kernels differ from their estimates by: decision trees, for a model of GPU and a kernel.

An estimate is off by what its terms cannot say, in a way that depends on the tile, on how full the device is, and on
the kernel (experiments/2026-11-choice). `corrections.json` is written by `python -m bench.fit_estimates --write`.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, Final

from fp8core.problem import Target
from fp8core.runtime import device

FILE: Final = "corrections.json"
LEAF: Final = 1e-4
"""Leaves are whole multiples of this, of the logarithm of a time."""
Raw = tuple[Sequence[tuple[str, float]], Sequence[int]]
"""A tree of the file: pairs of a feature's name and a threshold, and a leaf for each answer to all of them."""


Tree = tuple[int, float, int, float, int, float, int, float, tuple[int, ...]]
"""Four questions, each whether a feature, by its number, is above a threshold, and the 16 leaves."""


@cache
def trees() -> Mapping[str, Mapping[str, Sequence[Raw]]]:
    """Return the trees of the file by the names of the GPU models whose times were measured, and by kernels."""
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    made: Mapping[str, Mapping[str, Sequence[Raw]]] = found["trees"]
    return made


@cache
def trees_of(kernel: str, fields: tuple[str, ...], gpu: str | None) -> tuple[Tree, ...]:
    """Return the trees of a kernel on a model of GPU, none where it was not measured; ``fields`` name the features."""
    if gpu is None:
        return ()
    return read(trees().get(gpu, {}).get(kernel, ()), fields)


def read(grown: Iterable[Raw], fields: tuple[str, ...]) -> tuple[Tree, ...]:
    """Return trees that ask for features by their names as ones that ask for them by their numbers."""
    made = []
    for cuts, leaves in grown:
        a, b, c, d = ((fields.index(name), above) for name, above in cuts)
        made.append((*a, *b, *c, *d, tuple(leaves)))
    return tuple(made)


def factor(kernel: str, asked: tuple[float, ...], fields: tuple[str, ...], gpu: str | None) -> float:
    """Return how many times its estimate a product takes on a model of GPU: 1 on one that was not measured."""
    total, asked = 0, tuple(asked)  # a named tuple is read at half the speed
    for a, above_a, b, above_b, c, above_c, d, above_d, leaves in trees_of(kernel, fields, gpu):
        total += leaves[
            8 * (asked[a] > above_a) + 4 * (asked[b] > above_b) + 2 * (asked[c] > above_c) + (asked[d] > above_d)
        ]
    return math.exp(LEAF * total)


@cache
def gpu_of(target: Target) -> str | None:
    """Return the name of a GPU of this machine if kernels were measured on its model, or None."""
    if not 0 <= target.device < device.count():
        return None
    name = device.name(target.device)
    return name if name in trees() else None
