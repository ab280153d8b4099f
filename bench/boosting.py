"""Boosted oblivious decision trees: each tree is fitted to the residuals of those before it.

All nodes of one level of a tree have the same test. So a tree of depth d consists of d pairs of a feature and a
threshold, and of 2 ** d leaves: it is small to store and quick to evaluate.
"""

import random
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Numbers = NDArray[np.int64]
Tree = tuple[list[tuple[int, float]], list[int]]
"""Pairs of a feature's index and a threshold, and the leaves in units of `How.unit`."""
BINS: Final = 32


class How(NamedTuple):
    """The hyperparameters of fitting."""

    trees: int = 200
    depth: int = 4
    rate: float = 0.15
    """The learning rate: the fraction of the residual that a tree corrects."""
    prior: float = 5.0
    """The weight of a row with residual 0 that is added to each leaf (regularization)."""
    rows: float = 0.6
    """The fraction of the rows that a tree is fitted to."""
    columns: float = 0.5
    """The fraction of the features that a tree may use."""
    most: float = 0.5
    """Residuals are clipped to this magnitude."""
    unit: float = 1e-4
    """Leaves are rounded to multiples of this."""
    greatest: int = 10_000
    """Leaves are clipped to this many units."""


def thresholds(column: Floats) -> Floats:
    """Return at most `BINS` - 1 thresholds for a feature, rounded to six digits."""
    values = np.unique(column)
    if len(values) > BINS:
        values = np.unique(np.quantile(column, np.linspace(0, 1, BINS + 1)[1:-1], method="lower"))
    else:
        values = (values[1:] + values[:-1]) / 2
    return np.unique([float(f"{value:.6g}") for value in values])


def fit(asked: Floats, wanted: Floats, weights: Floats, how: How | None = None) -> list[Tree]:
    """Return trees whose sum approximates ``wanted``; ``asked`` has a row of features for each of its elements.

    The same rows give the same trees: rows and features are sampled with a fixed seed.
    """
    how, chance = how or How(), random.Random(0)
    edges = [thresholds(column) for column in asked.T]
    codes = np.stack([np.searchsorted(edge, column) for edge, column in zip(edges, asked.T, strict=True)])
    sums, made = np.zeros(len(wanted)), list[Tree]()
    for _ in range(how.trees):
        left = np.clip(wanted - sums, -how.most, how.most)
        seen = np.flatnonzero(weights * np.array([chance.random() < how.rows for _ in wanted]))
        columns = [c for c in chance.sample(range(len(edges)), round(how.columns * len(edges))) if len(edges[c])]
        own = Seen(codes[:, seen], weights[seen], weights[seen] * left[seen])
        leaf: Numbers = np.zeros(len(seen), dtype=np.int64)
        cuts, places = list[tuple[int, float]](), np.zeros(len(wanted), dtype=np.int64)
        for _ in range(how.depth):
            column, at = _best(own, columns, edges, leaf, how)
            leaf = 2 * leaf + (own.codes[column] > at)
            places = 2 * places + (codes[column] > at)
            cuts.append((column, float(edges[column][at])))
        totals = np.bincount(leaf, own.wanted, 1 << how.depth)
        counts = np.bincount(leaf, own.weights, 1 << how.depth)
        leaves = np.clip(np.rint(how.rate * totals / (counts + how.prior) / how.unit), -how.greatest, how.greatest)
        sums = sums + how.unit * leaves[places]
        made.append((cuts, [int(value) for value in leaves]))
    return made


def sums(trees: Iterable[Tree], asked: Floats, how: How) -> Floats:
    """Return the predictions of trees for rows of features."""
    found = np.zeros(len(asked))
    for cuts, leaves in trees:
        places: Numbers = np.zeros(len(asked), dtype=np.int64)
        for column, above in cuts:
            places = 2 * places + (asked[:, column] > above)
        found += how.unit * np.array(leaves)[places]
    return found


class Seen(NamedTuple):
    """The rows that a tree is fitted to."""

    codes: Numbers
    weights: Floats
    wanted: Floats
    """The residual of each row, times its weight."""


def _best(own: Seen, columns: list[int], edges: list[Floats], leaf: Numbers, how: How) -> tuple[int, int]:
    """Return the feature and the index of the threshold with the largest gain, as a test for all leaves of a level."""
    best, gain = (columns[0], 0), -1.0
    size = (int(leaf.max()) + 1) * BINS
    for column in columns:
        places = leaf * BINS + own.codes[column]
        totals: Any = np.bincount(places, own.wanted, size).reshape(-1, BINS).cumsum(1)
        counts: Any = np.bincount(places, own.weights, size).reshape(-1, BINS).cumsum(1)
        above, more = totals[:, -1:] - totals, counts[:, -1:] - counts
        gains = (totals**2 / (counts + how.prior) + above**2 / (more + how.prior)).sum(0)[: len(edges[column])]
        at = int(np.argmax(gains))
        if gains[at] > gain:
            best, gain = (column, at), float(gains[at])
    return best
