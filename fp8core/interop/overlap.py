"""Tests whether two arrays share memory, by their elements and not only by their first and last addresses."""

from typing import Any

from fp8core.dtypes import ITEMSIZE

Layout = tuple[int, tuple[int, ...], tuple[int, ...], str]
"""The address, shape, strides in elements and dtype of an array."""


class _Memory:
    """Memory of any device behind NumPy's array interface; only its addresses are used, the memory is never read."""

    def __init__(self, layout: Layout) -> None:
        pointer, shape, strides, dtype = layout
        size = ITEMSIZE[dtype]
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (pointer, False),
            "shape": shape,
            "strides": tuple(stride * size for stride in strides),
            "typestr": f"|V{size}",
        }


def share_memory(one: Layout, other: Layout) -> bool:
    """Return whether any byte belongs to both arrays; rows of one may lie between rows of the other without sharing."""
    import numpy as np

    return np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), max_work=-1)
