"""NumPy arrays over memory given by its address, and the temporary memory of a launch."""

import ctypes
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from fp8core.dtypes import FORMATS

Array = NDArray[Any]
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]

CHUNK: Final = 1 << 16
"""The number of elements processed at a time: with their temporaries they fit into a core's L2 cache."""


@cache
def storage(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype that holds elements of ``dtype``: uint8 for FP8, otherwise the dtype itself."""
    if dtype in FORMATS:
        return np.dtype(np.uint8)
    return np.dtype(getattr(ml_dtypes, dtype)) if dtype in ("bfloat16", "float8_e8m0fnu") else np.dtype(dtype)


def matrix(pointer: int, dtype: str, shape: tuple[int, int], strides: tuple[int, int]) -> Array:
    """Return the matrix at ``pointer``, with strides in elements, without a copy."""
    held = storage(dtype)
    if not all(shape):
        return np.empty(shape, held)
    reach = [stride * (count - 1) for stride, count in zip(strides, shape, strict=True)]
    below = -sum(min(r, 0) for r in reach) * held.itemsize
    above = (sum(max(r, 0) for r in reach) + 1) * held.itemsize
    buffer = (ctypes.c_char * (below + above)).from_address(pointer - below)
    return np.ndarray(shape, held, memoryview(buffer), below, [stride * held.itemsize for stride in strides])


def vector(pointer: int, dtype: str, count: int) -> Array:
    """Return the ``count`` elements that begin at ``pointer``."""
    return matrix(pointer, dtype, (1, count), (count, 1)).reshape(count)


class Workspace:
    """The temporary memory of one launch, for conversions of up to ``size`` elements at a time."""

    def __init__(self, size: int) -> None:
        self.wide = np.empty(size, np.float32)
        self.bits = np.empty(size, np.uint32)
        self.index = np.empty(size, np.intp)

    @classmethod
    def of(cls, elements: int) -> "Workspace":
        """Return the workspace of a launch over ``elements`` elements, which it processes in chunks."""
        return cls(min(elements, CHUNK))
