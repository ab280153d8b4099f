"""Interop with CuPy, and with Float8Array, which stands for the FP8 arrays that CuPy does not have."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from fp8core.dtypes import ITEMSIZE
from fp8core.interop import numpy_arrays
from fp8core.interop.float8 import DTYPES, Float8Array
from fp8core.interop.frameworks import Framework, only_instance
from fp8core.interop.tensor import (
    Allocator,
    Result,
    TensorView,
    bytes_spanned,
    check_aligned,
    check_memory,
    in_elements,
)
from fp8core.runtime import device
from fp8core.target import Target


class Cupy(Framework):
    """``cupy.ndarray``; results of dtypes that CuPy lacks are Float8Array."""

    name = "cupy"

    def __init__(self) -> None:
        self._cupy = device.cupy()
        self._dtypes = numpy_arrays.dtypes()

    def view(self, x: Any, name: str) -> TensorView:
        """Return a view of a cupy.ndarray."""
        memory = x.data
        strides = in_elements(x.shape, x.strides, x.itemsize, name)
        dtype = numpy_arrays.dtype_of(x.dtype, name)
        check_memory(memory.ptr, x.shape, name)
        check_aligned(memory.ptr, dtype, name)
        return TensorView(memory.ptr, dtype, x.shape, strides, device.target(memory.device_id), self, x)

    def signature(self, x: Any) -> tuple[int, Any]:
        """Return the address of a cupy.ndarray, and the properties that `view` checks."""
        memory = x.data
        pointer: int = memory.ptr
        if not pointer or pointer % x.itemsize:  # `view` raises the error
            return 0, None
        return pointer, (x.dtype, x.shape, x.strides, memory.device_id)

    def stream(self, target: Target) -> int:
        """Return CuPy's current stream on the device of ``target``."""
        return device.stream(target.device)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return a cupy.ndarray or a Float8Array in memory of CuPy's pool."""
        eight = dtype in DTYPES
        with _allocating(target, stream):
            array = self.storage(shape, self._dtypes["uint8" if eight else dtype], strides, dtype)
        return Result(array.data.ptr, Float8Array(array, dtype) if eight else array)

    def allocator(
        self, shape: tuple[int, ...], dtype: str, target: Target, strides: tuple[int, ...] | None = None
    ) -> Allocator:
        """Return a function that allocates such an array on each call."""
        eight = dtype in DTYPES
        make = partial(self.storage, shape, self._dtypes["uint8" if eight else dtype], strides, dtype)
        current = device.current_getter()

        def new(stream: int | None) -> tuple[int, Any]:
            if stream is not None or current() != target.device:
                return self.empty(shape, dtype, target, strides, stream)
            array = make()
            return array.data.ptr, Float8Array(array, dtype) if eight else array

        return new

    def storage(self, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None, name: str) -> Any:
        """Return an uninitialized cupy.ndarray on the current device; strides in elements of the dtype ``name``."""
        if strides is None:
            return self._cupy.empty(shape, dtype)
        itemsize = ITEMSIZE[name]
        memory = self._cupy.cuda.alloc(bytes_spanned(shape, strides, name))
        return self._cupy.ndarray(shape, dtype, memory, tuple(stride * itemsize for stride in strides))

    def reinterpret(self, x: Any, dtype: str) -> Any:
        """Return a Float8Array over the same memory, or its bytes."""
        codes = x.codes if isinstance(x, Float8Array) else x.view("uint8")
        return codes if dtype == "uint8" else Float8Array(codes, dtype)


def _allocating(target: Target, stream: int | None) -> AbstractContextManager[object]:
    if stream is not None and stream != device.stream(target.device):
        return device.allocating(stream, target.device)
    return device.on(target.device) if device.current() != target.device else nullcontext()


@only_instance
def framework() -> Cupy:
    """Return the only instance of `Cupy`."""
    return Cupy()


def view_float8(x: Float8Array, name: str) -> TensorView:
    """Return a view of a Float8Array; its framework is that of its bytes: CuPy, or NumPy on the host."""
    host = isinstance(x.codes, np.ndarray)
    codes = (numpy_arrays.framework() if host else framework()).view(x.codes, name)
    return codes._replace(dtype=x.dtype, owner=x)
