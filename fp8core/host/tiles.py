"""Cuts a matrix into tiles that fit a workspace; the columns of a tile are whole groups, or within one group."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from fp8core.host.memory import CHUNK, Array, Floats
from fp8core.problem import GroupShape

PANEL: Final = 4 * CHUNK
"""Elements whose scales are computed before the elements are converted: the second pass reads them from a cache."""


class Tile(NamedTuple):
    """Rows and columns of a matrix; the columns are whole groups, or within one group."""

    rows: slice
    cols: slice
    groups: slice
    """The columns of the scale matrix for the tile's columns."""

    def split(self, x: Array) -> Array:
        """Return the tile's elements ``x`` as ``[rows, groups, columns of a group]``, without a copy."""
        groups = self.groups.stop - self.groups.start
        return x.reshape(x.shape[0], groups, x.shape[1] // groups)

    def row_groups(self, group_rows: int) -> slice:
        """Return the rows of the scale matrix for the tile's rows."""
        if group_rows < 0:
            return slice(0, 1)
        return slice(self.rows.start // group_rows, -(-self.rows.stop // group_rows))

    def scales(self, scales: Floats, group_rows: int) -> Floats:
        """Return the tile's part of a matrix of scales, to broadcast with `split`: ``[rows or 1, groups, 1]``."""
        part = scales[self.row_groups(group_rows), self.groups]
        if group_rows > 1 and len(part) > 1:
            part = part[np.arange(self.rows.start, self.rows.stop) // group_rows - self.rows.start // group_rows]
        return part[:, :, None]


def columns(cols: int, group_cols: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive ranges of at most `CHUNK` columns, with the range of their groups."""
    if 0 < group_cols <= CHUNK:
        whole = cols // group_cols
        at_once = CHUNK // group_cols
        for first in range(0, whole, at_once):
            last = min(first + at_once, whole)
            yield slice(first * group_cols, last * group_cols), slice(first, last)
        if cols % group_cols:
            yield slice(whole * group_cols, cols), slice(whole, whole + 1)
        return
    width = cols if group_cols < 0 else group_cols
    for start in range(0, cols, width or 1):
        stop, group = min(start + width, cols), start // width
        for first in range(start, stop, CHUNK):
            yield slice(first, min(first + CHUNK, stop)), slice(group, group + 1)


def tiles(shape: tuple[int, int], group_shape: GroupShape) -> Iterator[Tile]:
    """Yield tiles of at most `CHUNK` elements that cover a matrix."""
    rows, cols = shape
    for wide, groups in columns(cols, group_shape.cols):
        height = max(CHUNK // (wide.stop - wide.start), 1)
        for first in range(0, rows, height):
            yield Tile(slice(first, min(first + height, rows)), wide, groups)


def panels(shape: tuple[int, int], group_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield consecutive ranges of rows, of whole groups and about `PANEL` elements, with the rows of their scales."""
    rows, cols = shape
    if group_rows < 0:
        yield slice(0, rows), slice(0, 1)
        return
    at_once = max(PANEL // max(group_rows * cols, 1), 1)
    for group in range(0, -(-rows // group_rows), at_once):
        stop = min((group + at_once) * group_rows, rows)
        yield slice(group * group_rows, stop), slice(group, -(-stop // group_rows))
