"""Operands of grouped products in every mode of scales, and their exact products, group by group."""

from typing import Any, NamedTuple

import numpy as np

from support import reference
from support.engines import fresh_fp8, fresh_scale
from support.products import ceil

MODES = (
    *("tensor-tensor", "tensor-each", "tensor-row", "row-tensor", "row-each", "row-row"),
    *("group-block", "group-group"),
)
"""The granularities of both scales; "each" has one number for each group."""
SHAPES = {"tensor": (-1, -1), "each": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}
"""By granularity: the elements that share a scale."""


class Grouped(NamedTuple):
    """NumPy's operands of a grouped product."""

    a: np.ndarray
    weight: np.ndarray
    scale_a: np.ndarray
    scale_b: np.ndarray

    def on(self, engine: Any) -> tuple[Any, ...]:
        """Return the operands as arrays of an engine."""
        return tuple(engine.array(x) for x in self)

    def absolute(self) -> "Grouped":
        """Return the magnitudes of the operands, whose product bounds what sums may lose."""
        return Grouped(*(np.abs(x.astype(np.float32)).astype(x.dtype) for x in self))


def ends_of(sizes: tuple[int, ...]) -> np.ndarray:
    """Return where groups of these sizes end."""
    return np.cumsum(sizes).astype(np.int32)


def rows_of(ends: np.ndarray, rows: int) -> list[slice]:
    """Return the rows of each group, from the definition: an end lies between the one before it and the last row."""
    found, start = [], 0
    for end in ends.tolist():
        stop = min(max(end, start), rows)
        found.append(slice(start, stop))
        start = stop
    return found


def scale_shapes(mode: str, groups: int, rows: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of both scales of a mode."""
    of_a, of_b = mode.split("-")
    across, blocks = ceil(k, 128), ceil(n, 128)
    scale_b = {"tensor": (), "each": (1, 1), "row": (n, 1), "block": (blocks, across), "group": (n, across)}[of_b]
    return (
        {"tensor": (1,), "row": (rows, 1), "group": (rows, across)}[of_a],
        (1,) if of_b == "tensor" else (groups, *scale_b),
    )


def operands(
    groups: int, rows: int, n: int, k: int, mode: str, *formats: str, low: float = 0.001, high: float = 0.1
) -> Grouped:
    """Return operands in a mode with scales between ``low`` and ``high``.

    formats: those of a and of the weight, e4m3fn if left out.
    """
    a, weight = formats or ("float8_e4m3fn", "float8_e4m3fn")
    scale_a, scale_b = scale_shapes(mode, groups, rows, n, k)
    return Grouped(
        fresh_fp8((rows, k), a, salt=1),
        fresh_fp8((groups, n, k), weight, salt=2),
        fresh_scale(scale_a, low=low, high=high, salt=1),
        fresh_scale(scale_b, low=low, high=high, salt=2),
    )


def exact(of: Grouped, mode: str, ends: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    """Return the product in float64; rows of no group are NaN."""
    (rows, k), n = of.a.shape, of.weight.shape[1]
    kind_a, kind_b = mode.split("-")
    a = reference.decode(of.a.view(np.uint8), str(of.a.dtype))
    wide_a = reference.spread(np.atleast_2d(of.scale_a), SHAPES[kind_a], (rows, k))
    made = np.full((rows, n), np.nan)
    for i, part in enumerate(rows_of(ends, rows)):
        scale = of.scale_b.reshape(1, 1) if kind_b == "tensor" else of.scale_b[i]
        wide_b = reference.spread(scale, SHAPES[kind_b], (n, k))
        weight = reference.decode(of.weight[i].view(np.uint8), str(of.weight.dtype))
        added = None if bias is None else bias[i]
        made[part] = reference.scaled_mm(a[part], weight.T, wide_a[part], wide_b.T, added)
    return made
