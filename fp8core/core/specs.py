"""Specs of operands: everything that checks and the choice of a kernel may depend on, and nothing else.

A `TensorSpec` has no address. A call's plan is made from specs and cached under them, so it cannot hold an address, and
its key cannot lack an alignment. Addresses are passed to a launch when it is made.
"""

import math
from typing import Final, NamedTuple

from fp8core.dtypes import FORMATS, HIGH_PRECISION, ITEMSIZE
from fp8core.errors import DeviceError, DTypeError, LayoutError, ShapeError
from fp8core.interop import TensorView
from fp8core.target import Target

ALIGNMENT: Final = 32
"""The largest alignment, in bytes, that specs distinguish; no kernel requires more."""


class TensorSpec(NamedTuple):
    """An array without its memory."""

    name: str
    """The name of the operand in error messages."""
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    target: Target
    alignment: int = ALIGNMENT
    """The largest power of two, up to `ALIGNMENT`, that divides the address; `ALIGNMENT` for memory yet to be
    allocated."""

    @property
    def itemsize(self) -> int:
        """The bytes of one element."""
        return ITEMSIZE[self.dtype]


class Matrix(NamedTuple):
    """A tensor folded to two axes; ``stride`` counts the elements from row to row."""

    rows: int
    cols: int
    stride: int


def alignment_of(x: TensorSpec | None) -> int:
    """Return the alignment of an array; None stands for an array yet to be allocated."""
    return ALIGNMENT if x is None else x.alignment


def spec_of(view: TensorView, name: str) -> TensorSpec:
    """Return the spec of an array."""
    bits = view.pointer | ALIGNMENT
    return TensorSpec(name, view.dtype, view.shape, view.strides, view.target, bits & -bits)


def matrix(x: TensorSpec) -> Matrix:
    """Return ``x`` as a matrix: its leading axes are folded into rows, without a copy.

    Raises:
        ShapeError: the array has no axes.
        LayoutError: the last axis is not contiguous, a stride is negative, or the leading axes do not fold.
    """
    shape, strides = x.shape, x.strides
    if not shape:
        raise ShapeError(f"{x.name} needs at least one axis, got a 0-d array")
    cols = shape[-1]
    if 0 in shape:
        return Matrix(math.prod(shape[:-1]), cols, cols)
    if cols > 1 and strides[-1] != 1:
        raise LayoutError(f"{x.name} needs a contiguous last axis, got shape {shape} with strides {strides} (elements)")
    if len(shape) == 2:
        rows, stride = shape[0], strides[0]
    else:
        rows, stride = folded(x, cols)
    if rows <= 1:
        stride = cols
    if stride < 0:
        raise LayoutError(f"{x.name} needs rows in ascending order, got strides {strides} (elements)")
    return Matrix(rows, cols, stride)


def folded(x: TensorSpec, step: int = 0) -> tuple[int, int]:
    """Fold all axes but the last into one; return its extent and its stride (``step`` if the extent is at most 1).

    Raises:
        LayoutError: the axes do not fold without a copy.
    """
    if 0 in x.shape:  # the strides of an array without elements have no meaning
        return math.prod(x.shape[:-1]), step
    rows, stride = 1, step
    for extent, there in zip(reversed(x.shape[:-1]), reversed(x.strides[:-1]), strict=True):
        if extent == 1:
            continue
        if rows == 1:
            stride = there
        elif there != stride * rows:
            raise LayoutError(
                f"{x.name} needs leading axes that fold into rows without a copy, got shape {x.shape} "
                f"with strides {x.strides} (elements)"
            )
        rows *= extent
    return rows, stride


def written(x: TensorSpec, shape: tuple[int, ...], dtype: str) -> Matrix:
    """Check that an array of the caller can receive a result, and return the array as a matrix."""
    check_written(x, shape, dtype)
    rows = matrix(x)
    if rows.rows > 1 and rows.stride < rows.cols:
        raise LayoutError(f"{x.name} needs rows that do not overlap, got strides {x.strides} (elements)")
    return rows


def result_stride(given: TensorSpec | None, beside: TensorSpec, shape: tuple[int, ...], dtype: str) -> int:
    """Return the elements from row to row of a result: of the caller's array, which is checked, or of a new one.

    Args:
        given: the caller's array; None if the result is a new array.
        beside: an operand whose device the array has to be on.
        shape: the shape of the result, at least one axis.
        dtype: the dtype of the result.
    """
    if given is None:
        return shape[-1]
    check_same_device(beside, given)
    return written(given, shape, dtype).stride


def check_written(x: TensorSpec, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an array that cannot receive a result of this shape and dtype."""
    if x.dtype != dtype:
        raise DTypeError(f"{x.name} needs {dtype}, got {x.dtype}")
    if x.shape != shape:
        raise ShapeError(f"{x.name} needs shape {shape}, got {x.shape}")


def check_no_overlap(x: TensorSpec, strides: tuple[int, int]) -> None:
    """Refuse a result in which two elements share memory; ``strides`` are those of the result folded to two axes."""
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    apart, step = map(abs, strides)
    if not rows * cols:
        return
    if apart and step:  # the first i * apart == j * step is the least common multiple
        common = math.gcd(apart, step)
        twice = step // common < rows and apart // common < cols
    else:
        twice = (rows > 1 and not apart) or (cols > 1 and not step)
    if twice:
        raise LayoutError(
            f"{x.name} needs elements that do not overlap, got shape {x.shape} with strides {x.strides} (elements)"
        )


def contiguous_count(x: TensorSpec) -> int:
    """Return the number of elements of a contiguous array; refuse any other array."""
    count = 1
    for extent, step in zip(reversed(x.shape), reversed(x.strides), strict=True):
        if extent > 1 and step != count and 0 not in x.shape:
            raise LayoutError(f"{x.name} needs contiguous memory, got shape {x.shape} with strides {x.strides}")
        count *= extent
    return count


def check_vector(x: TensorSpec, count: int) -> None:
    """Refuse anything but ``count`` contiguous elements along one axis."""
    if x.shape != (count,) or (count > 1 and x.strides != (1,)):
        error = LayoutError if x.shape == (count,) else ShapeError
        raise error(f"{x.name} needs {count} contiguous elements, got shape {x.shape} with strides {x.strides}")


def alignment(*multiples: int) -> int:
    """Return the largest power of two up to 16 that divides every number."""
    bits = 16
    for number in multiples:
        bits |= number
    return bits & -bits


def check_same_device(first: TensorSpec, *others: TensorSpec | None) -> None:
    """Refuse operands on different devices."""
    for other in others:
        if other is not None and other.target != first.target:
            raise DeviceError(f"{other.name} needs to be where {first.name} is, on {first.target}, got {other.target}")


def check_fp8(x: TensorSpec) -> None:
    """Refuse an operand whose dtype is not one of the four FP8 formats."""
    if x.dtype not in FORMATS:
        how = ": fp8core.Float8Array gives bytes an FP8 dtype" if x.dtype == "uint8" else ""
        raise DTypeError(f"{x.name} needs an FP8 dtype ({', '.join(FORMATS)}), got {x.dtype}{how}")


def check_high_precision(x: TensorSpec) -> None:
    """Refuse an operand whose dtype is not one of `HIGH_PRECISION`, the formats that can be quantized."""
    if x.dtype not in HIGH_PRECISION:
        raise DTypeError(f"{x.name} needs {', '.join(HIGH_PRECISION)}, got {x.dtype}")


def required(x: TensorSpec | None, name: str) -> TensorSpec:
    """Return the spec of an operand that every call needs; refuse None."""
    if x is None:
        raise DTypeError(f"{name} needs an array, got None")
    return x
