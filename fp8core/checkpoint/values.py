"""What the codes and scales of a layer stand for, some rows at a time."""

from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.files import Entry, read_rows
from fp8core.checkpoint.layers import Layer
from fp8core.errors import CheckpointError
from fp8core.ops import dequantize

Wide = Literal["float32", "float16", "bfloat16"]
WIDEST: Final = 8
"""What an element is taken to need where pieces of several files have to be alike: as float64."""


def rows_of_a_group(layer: Layer) -> int:
    """Return how many rows share scales; 1 where all do."""
    if layer.group_shape is None:
        raise CheckpointError(layer.fault())
    return max(layer.group_shape.rows, 1)


def scales_of_rows(layer: Layer, scales: NDArray[np.float32], first: int, rows: int) -> NDArray[np.float32]:
    """Return those of a matrix's scales that some rows have; ``first`` begins a group."""
    if layer.group_shape is None:
        raise CheckpointError(layer.fault())
    if layer.group_shape.rows < 0:
        return scales
    step = layer.group_shape.rows
    return scales[first // step : -(-(first + rows) // step)]


def dequantized(
    layer: Layer, index: int, matrix: Entry, dtype: Wide = "float32", itemsize: int = WIDEST, multiple: int = 0
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Give ``float32(code) * scale``, rounded once to ``dtype``: the number of the first row, and some rows.

    Args:
        layer: whose weight it is.
        index: the matrix's number, of experts that are stacked; 0 of one matrix.
        matrix: one of `Layer.matrices`.
        dtype: float32, float16 or bfloat16.
        itemsize: see `read_rows`.
        multiple: of how many rows pieces are: a multiple of those of a group, which is the default.
    """
    scales, group_shape = layer.scales(index), layer.group_shape
    assert group_shape is not None
    with layer.weight.path.open("rb") as file:
        for first, codes in read_rows(file, matrix, multiple or rows_of_a_group(layer), itemsize):
            part = np.ascontiguousarray(scales_of_rows(layer, scales, first, len(codes)))
            yield first, np.asarray(dequantize(codes, part, group_shape=group_shape, dtype=dtype))
