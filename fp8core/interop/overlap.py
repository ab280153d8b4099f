"""Whether two arrays share memory, element by element and not by their ends alone."""

from typing import Any

from fp8core.problem import ITEMSIZE

Layout = tuple[int, tuple[int, ...], tuple[int, ...], str]
"""The address, shape, strides in elements and dtype of an array."""


class _Memory:
    """Memory of any device under NumPy's protocol; only its addresses are looked at."""

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
    """Return whether any byte belongs to both arrays, as in rows of one that stand between rows of the other."""
    import numpy as np

    return np.shares_memory(np.asarray(_Memory(one)), np.asarray(_Memory(other)), max_work=-1)
