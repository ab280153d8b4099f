"""The types of interop: views of input arrays and new results, and the checks of addresses and strides."""

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.errors import DTypeError, LayoutError
from fp8core.interop import dlpack
from fp8core.runtime import streams
from fp8core.target import Target

if TYPE_CHECKING:
    from fp8core.interop.frameworks import Framework

new_tuple: Any = tuple.__new__
"""Makes a named tuple in a third of the time of its own constructor."""


class TensorView(NamedTuple):
    """An array as kernels see it. Making a view copies nothing and waits for nothing."""

    pointer: int
    """The address of the first element; may be 0 if there are no elements."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements; 0 along a broadcast axis, negative along a reversed one."""
    target: Target
    framework: "Framework"
    owner: Any
    """The array."""
    held: object = None
    """Another object that keeps the memory alive; it must live until the launch has been made."""


class Result(NamedTuple):
    """New, uninitialized memory from a framework's allocator."""

    pointer: int
    array: Any
    """The array, which `Framework.wrap` turns into the one that the caller gets."""


Allocator = Callable[[int | None], tuple[int, Any]]
"""Allocates an array. Takes the stream that will write it, or None for the framework's current stream; returns address
and array."""


def fill_number(pointer: int, value: float, target: Target, stream: int) -> None:
    """Write one fp32 number, on ``stream`` if the target has streams."""
    if target.platform == "host":
        ctypes.c_float.from_address(pointer).value = value
    else:
        streams.fill_float32(pointer, value, stream, target.device)


def bytes_spanned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> int:
    """Return the number of bytes from the first to the last element, both included."""
    if 0 in shape:
        return 0
    return (sum((extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)) + 1) * ITEMSIZE[dtype]


def bytes_reached(shape: tuple[int, ...], strides: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Return where an array begins and ends, in bytes from the address of its first element.

    With negative strides the first element may be the last in memory, and the beginning is negative.
    """
    if 0 in shape:
        return 0, 0
    reach = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    itemsize = ITEMSIZE[dtype]
    return sum(r for r in reach if r < 0) * itemsize, (sum(r for r in reach if r > 0) + 1) * itemsize


def strides_or_contiguous(shape: tuple[int, ...], strides: tuple[int, ...] | None) -> tuple[int, ...]:
    """Return ``strides``, or those of a row-major array."""
    return dlpack.contiguous(shape) if strides is None else strides


def in_elements(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int, name: str) -> tuple[int, ...]:
    """Convert strides from bytes to elements; that of an axis of one element has no meaning.

    Raises:
        LayoutError: they are not multiples of the element size, as in a field of a structured array.
    """
    if itemsize == 1:
        return strides
    for stride in strides:
        if stride % itemsize and any(s % itemsize and extent > 1 for s, extent in zip(strides, shape, strict=True)):
            raise LayoutError(f"{name} needs strides of whole elements of {itemsize} bytes, got {strides} bytes")
    return tuple([stride // itemsize for stride in strides])


def check_memory(pointer: int, shape: tuple[int, ...], name: str) -> None:
    """Refuse an array that has elements but no memory: an exporter's null pointer, or a storage that was freed.

    Raises:
        LayoutError: the address is 0.
    """
    if not pointer and all(shape):
        raise LayoutError(f"{name} needs memory, got address 0 for shape {shape}")


def check_aligned(pointer: int, dtype: str, name: str) -> None:
    """Refuse an address at which a GPU cannot load or store an element.

    Raises:
        LayoutError: the address is not a multiple of the element size.
    """
    itemsize = ITEMSIZE[dtype]
    if pointer % itemsize:
        raise LayoutError(f"{name} needs elements at multiples of {itemsize} bytes, got address {pointer:#x}")


def refused_gaps(framework: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> LayoutError:
    """Return the error for a new array with gaps, which arrays of a framework cannot have."""
    return LayoutError(f"an array of {framework} needs elements without gaps, got shape {shape} with strides {strides}")


def refused_dtype(name: str, dtype: object) -> DTypeError:
    """Return the error for an operand, named by a string or an `Operand`, whose dtype is not supported."""
    return DTypeError(f"{name} needs an array of {', '.join(getattr(name, 'takes', ITEMSIZE))}, got {dtype}")
