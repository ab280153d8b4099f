"""Interop with NumPy and the dtypes of ml_dtypes; also allocates the host memory that other frameworks receive."""

import sys
from functools import cache
from typing import Any, Final

import ml_dtypes
import numpy as np

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DTypeError, LayoutError
from fp8core.interop.float8 import Float8Array
from fp8core.interop.frameworks import Framework, only_instance
from fp8core.interop.tensor import (
    Result,
    TensorView,
    bytes_spanned,
    check_aligned,
    in_elements,
    refused_dtype,
    strides_or_contiguous,
)
from fp8core.target import HOST, Target

ALIGNMENT: Final = 64
"""The alignment of host memory in bytes: a cache line, and what XLA requires to take memory over without a copy."""


@cache
def dtypes() -> dict[str, np.dtype[Any]]:
    """Return the NumPy dtype of each name in `dtypes.ITEMSIZE`."""
    return {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ITEMSIZE}


@cache
def names() -> dict[np.dtype[Any], str]:
    """Return the name in `dtypes.ITEMSIZE` of each NumPy dtype that has one."""
    return {dtype: name for name, dtype in dtypes().items()}


def dtype_of(dtype: Any, name: str) -> str:
    """Return the name of the dtype of the operand ``name``; raise DTypeError if it has none in `dtypes.ITEMSIZE`."""
    known = names().get(dtype)
    if known is not None:
        return known
    if getattr(dtype, "byteorder", "=") not in "=|" and names().get(dtype.newbyteorder("=")):
        raise DTypeError(f"{name} needs the machine's byte order ({sys.byteorder} endian), got {dtype!r}")
    raise refused_dtype(name, dtype)


def memory(
    shape: tuple[int, ...], dtype: np.dtype[Any], strides: tuple[int, ...] | None, nbytes: int
) -> np.ndarray[Any, Any]:
    """Return an uninitialized array over ``nbytes`` of memory aligned to 64 bytes; strides in elements."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    offset = -raw.ctypes.data % ALIGNMENT
    steps = None if strides is None else tuple(stride * dtype.itemsize for stride in strides)
    return np.ndarray(shape, dtype, raw, offset, steps)


class Numpy(Framework):
    """NumPy arrays and their subclasses, masked arrays excepted."""

    name = "numpy"

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of a NumPy array; masked arrays are refused, as their mask would be lost."""
        if isinstance(x, np.ma.MaskedArray):
            raise LayoutError(f"{name} needs a plain array, got a masked one, whose mask would be lost")
        dtype = dtype_of(x.dtype, name)
        strides = in_elements(x.shape, x.strides, x.itemsize, name)
        pointer = x.ctypes.data
        check_aligned(pointer, dtype, name)
        return TensorView(pointer, dtype, x.shape, strides, HOST, self, x)

    def stream(self, target: Target) -> int:
        """Return 0: the host has no streams."""
        del target
        return 0

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return an uninitialized NumPy array, aligned to 64 bytes."""
        del target, stream
        nbytes = bytes_spanned(shape, strides_or_contiguous(shape, strides), dtype)
        array = memory(shape, dtypes()[dtype], strides, nbytes)
        return Result(array.ctypes.data, array)

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return an array over the same memory; for a Float8Array another Float8Array, or its bytes for "uint8"."""
        if isinstance(x, Float8Array):
            return x.codes if dtype == "uint8" else Float8Array(x.codes, dtype)
        return x.view(dtypes()[dtype])

    def check_writable(self, x: Any, name: str) -> None:
        """Raise LayoutError if ``x`` is read-only."""
        if not x.flags.writeable:
            raise LayoutError(f"{name} needs to be writable, got a read-only array")


@only_instance
def framework() -> Numpy:
    """Return the only instance of `Numpy`."""
    return Numpy()
