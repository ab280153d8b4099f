"""Boosted oblivious decision trees: each tree is fitted to the residuals of those before it.

All nodes of one level of a tree have the same test. So a tree of depth d consists of d pairs of a feature and a
threshold, and of 2 ** d leaves: it is small to store and quick to evaluate.
"""

import random
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csc_array

Floats = NDArray[np.float64]
Numbers = NDArray[np.int32]
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
    codes = [np.searchsorted(edge, column).astype(np.int32) for edge, column in zip(edges, asked.T, strict=True)]
    sums, made = np.zeros(len(wanted)), list[Tree]()
    for _ in range(how.trees):
        left = np.clip(wanted - sums, -how.most, how.most)
        seen = np.flatnonzero(weights * (_randoms(chance, len(wanted)) < how.rows))
        columns = [c for c in chance.sample(range(len(edges)), round(how.columns * len(edges))) if len(edges[c])]
        bins = np.empty((len(seen), len(columns)), dtype=np.int32)
        for place, column in enumerate(columns):
            bins[:, place] = codes[column][seen] + place * BINS
        own = Seen(bins, np.ones(bins.size), weights[seen], weights[seen] * left[seen])
        leaf: Numbers = np.zeros(len(seen), dtype=np.int32)
        cuts, places = list[tuple[int, float]](), np.zeros(len(wanted), dtype=np.int32)
        for level in range(how.depth):
            which, at = _best(own, [len(edges[c]) for c in columns], leaf, 1 << level, how)
            leaf = 2 * leaf + (own.bins[:, which] > which * BINS + at)
            places = 2 * places + (codes[columns[which]] > at)
            cuts.append((columns[which], float(edges[columns[which]][at])))
        totals = np.bincount(leaf, own.wanted, 1 << how.depth)
        counts = np.bincount(leaf, own.weights, 1 << how.depth)
        leaves = np.clip(np.rint(how.rate * totals / (counts + how.prior) / how.unit), -how.greatest, how.greatest)
        sums = sums + how.unit * leaves[places]
        made.append((cuts, [int(value) for value in leaves]))
    return made


def _randoms(chance: random.Random, count: int) -> Floats:
    """Return the results of ``count`` calls of ``chance.random()``, which NumPy's generator makes of the same state."""
    version, state, gauss = chance.getstate()
    drawn = np.random.RandomState()
    drawn.set_state(("MT19937", state[:-1], state[-1]))
    found = drawn.random_sample(count)
    _, words, place = drawn.get_state(legacy=True)[:3]
    chance.setstate((version, (*map(int, words), place), gauss))
    return found


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

    bins: Numbers
    """For each row, its code in each column that the tree may use; those of the second column begin at `BINS`, etc."""
    ones: Floats
    """A one for each of them."""
    weights: Floats
    wanted: Floats
    """The residual of each row, times its weight."""


def _best(own: Seen, cuts: list[int], leaf: Numbers, leaves: int, how: How) -> tuple[int, int]:
    """Return the column and the index of the threshold with the largest gain, as a test for all leaves of a level.

    ``cuts``: how many thresholds each column has. Rows are added in their order, as the trees depend on each bit of the
    sums. A product with a sparse matrix does that; it has a column for each row of ``own``, with a one in the row of
    each bin that counts it.
    """
    rows, columns = own.bins.shape
    bins = (leaf * np.int32(columns * BINS))[:, None] + own.bins
    starts = np.arange(0, bins.size + 1, columns, dtype=np.int32)
    counted = csc_array((own.ones, bins.ravel(), starts), (leaves * columns * BINS, rows))
    found = (counted @ np.stack([own.wanted, own.weights], axis=1)).reshape(leaves, columns, BINS, 2).cumsum(2)
    totals, counts = found[..., 0], found[..., 1]
    above, more = totals[..., -1:] - totals, counts[..., -1:] - counts
    gains = (totals**2 / (counts + how.prior) + above**2 / (more + how.prior)).sum(0)
    gains[np.arange(BINS) >= np.array(cuts)[:, None]] = -1.0
    which, at = np.unravel_index(np.argmax(gains), gains.shape)
    return int(which), int(at)
