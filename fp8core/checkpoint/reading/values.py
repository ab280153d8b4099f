"""The numbers of a layer: dequantizes it, some rows at a time."""

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.disk.files import Entry, read_rows
from fp8core.checkpoint.reading.layers import Layer
from fp8core.errors import CheckpointError
from fp8core.ops import dequantize
from fp8core.problem import GroupShape
from fp8core.types import WideName

MOST_ITEMSIZE: Final = 8
"""The assumed bytes per element (those of float64), if files of different dtypes have to be read in equal pieces."""


def rows_of_a_group(layer: Layer) -> int:
    """Return the number of rows that share scales; 1 if all rows do."""
    if layer.group_shape is None:
        raise CheckpointError(layer.fault())
    return max(layer.group_shape.rows, 1)


def scales_of_rows(scales: NDArray[np.float32], group: GroupShape, first: int, rows: int) -> NDArray[np.float32]:
    """Return the scales of some rows of a matrix; row ``first`` is the first of a group."""
    return scales if group.rows < 0 else scales[first // group.rows : -(-(first + rows) // group.rows)]


def are_powers_of_two(scales: NDArray[np.float32]) -> bool:
    """Return whether all scales are powers of two."""
    return bool((np.frexp(scales)[0] == 0.5).all())


def sum_of_squares(values: NDArray[np.float32]) -> float:
    """Return the sum of the squares, in float64."""
    return float(np.square(values, dtype=np.float64).sum())


def dequantized(
    layer: Layer,
    index: int,
    matrix: Entry,
    dtype: WideName = "float32",
    itemsize: int = MOST_ITEMSIZE,
    multiple: int = 0,
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield ``float32(code) * scale``, rounded once to ``dtype``: the index of the first row, and some rows.

    Args:
        layer: the layer.
        index: the index of the matrix among stacked experts; 0 for a single matrix.
        matrix: the matrix, one of `Layer.matrices`.
        dtype: float32, float16 or bfloat16.
        itemsize: see `stored_rows`.
        multiple: the number of rows of which pieces have a multiple; itself a multiple of the rows of a group, which
            are the default.
    """
    scales, group_shape = layer.scales(index), layer.group_shape
    assert group_shape is not None
    with layer.weight.path.open("rb") as file:
        for first, codes in read_rows(file, matrix, multiple or rows_of_a_group(layer), itemsize):
            part = np.ascontiguousarray(scales_of_rows(scales, group_shape, first, len(codes)))
            yield first, np.asarray(dequantize(codes, part, group_shape=group_shape, dtype=dtype))
