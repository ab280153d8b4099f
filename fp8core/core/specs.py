"""Specs of operands: everything that checks and the choice of a kernel may depend on, and nothing else.

A `TensorSpec` has no address. A call's plan is made from specs and cached under them, so it cannot hold an address, and
its key cannot lack an alignment. Addresses are passed to a launch when it is made.
"""

import math
import operator
from collections.abc import Collection
from typing import Any, NamedTuple

from fp8core.errors import DeviceError, DTypeError, LayoutError, ShapeError
from fp8core.interop import TensorView, scalar
from fp8core.problem import FORMATS, HIGH_PRECISION, ITEMSIZE, GroupShape, Target

ALIGNMENT = 32
"""The largest alignment, in bytes, that specs distinguish; no kernel requires more."""


LARGEST = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite number of float32."""
BEYOND = 2.0**128 - 2.0**103
"""Numbers from here on are rounded to infinity in float32. (`torch.compile` can trace a comparison, but not
`struct`.)"""
BELOW = 2.0**-150
"""Numbers up to this are rounded to zero."""


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
    same_device(beside, given)
    return written(given, shape, dtype).stride


def check_written(x: TensorSpec, shape: tuple[int, ...], dtype: str) -> None:
    """Refuse an array that cannot receive a result of this shape and dtype."""
    if x.dtype != dtype:
        raise DTypeError(f"{x.name} needs {dtype}, got {x.dtype}")
    if x.shape != shape:
        raise ShapeError(f"{x.name} needs shape {shape}, got {x.shape}")


def no_element_twice(x: TensorSpec, strides: tuple[int, int]) -> None:
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


def alignment(*multiples: int) -> int:
    """Return the largest power of two up to 16 that divides every number."""
    bits = 16
    for number in multiples:
        bits |= number
    return bits & -bits


def same_device(first: TensorSpec, *others: TensorSpec | None) -> None:
    """Refuse operands on different devices."""
    for other in others:
        if other is not None and other.target != first.target:
            raise DeviceError(f"{other.name} needs to be where {first.name} is, on {first.target}, got {other.target}")


def is_fp8(x: TensorSpec) -> None:
    """Refuse an operand whose dtype is not one of the four FP8 formats."""
    if x.dtype not in FORMATS:
        raise DTypeError(f"{x.name} needs an FP8 dtype ({', '.join(FORMATS)}), got {x.dtype}")


def is_wide(x: TensorSpec) -> None:
    """Refuse an operand whose dtype is not one of `HIGH_PRECISION`, the formats that can be quantized."""
    if x.dtype not in HIGH_PRECISION:
        raise DTypeError(f"{x.name} needs {', '.join(HIGH_PRECISION)}, got {x.dtype}")


def required(x: TensorSpec | None, name: str) -> TensorSpec:
    """Return the spec of an operand that every call needs; refuse None."""
    if x is None:
        raise DTypeError(f"{name} needs an array, got None")
    return x


def group(group_shape: object, name: str = "group_shape") -> GroupShape:
    """Check and return a group shape: two whole numbers, each -1, or positive and at most what a kernel's int holds."""
    pair = tuple(group_shape) if isinstance(group_shape, tuple | list) else ()
    sides = [whole_number(side) for side in pair]
    if len(sides) != 2 or any(side is None or not (side == -1 or 0 < side < 1 << 31) for side in sides):
        raise ShapeError(f"{name} needs a pair of whole numbers, each -1 or 1 to 2**31 - 1, got {group_shape!r}")
    return GroupShape(*map(int, pair))


def count(number: object, name: str) -> int:
    """Check and return the extent of an axis: a whole number of at most 31 bits."""
    extent = whole_number(number)
    if extent is None or not 0 <= extent < 1 << 31:
        raise ShapeError(f"{name} needs a whole number from 0 to 2**31 - 1, got {number!r}")
    return extent


def counts(numbers: object, name: str, least: int = 0) -> tuple[int, ...]:
    """Return how many elements some axes have: whole numbers of at least ``least`` and at most 31 bits."""
    extents = whole_numbers(numbers)
    if extents is None or any(not least <= extent < 1 << 31 for extent in extents):
        raise ShapeError(f"{name} needs whole numbers from {least} to 2**31 - 1, got {numbers!r}")
    return extents


def least_rows(number: object, name: str) -> int:
    """Check and return the least number of rows of a result: a whole number of at most 31 bits."""
    rows = whole_number(number)
    if rows is None or rows >= 1 << 31:
        raise ShapeError(f"{name} needs a whole number, at most 2**31 - 1, got {number!r}")
    return rows


def in_float32(number: float) -> bool:
    """Return whether a number can be rounded to float32 without becoming zero or infinity, unless it is one of them."""
    size = abs(number)
    return not (BEYOND <= size < math.inf or 0 < size <= BELOW)


def one_of(x: object, known: Collection[str]) -> bool:
    """Return whether something is one of these names; what is no text is not asked for a hash or compared."""
    return isinstance(x, str) and x in known


def flag(x: Any, name: str) -> bool:
    """Return ``x`` as a bool; it may be a bool of Python or NumPy, or 1 or 0."""
    known = isinstance(x, int) and x in (0, 1)
    if not known and type(x).__name__ not in ("bool", "bool_"):
        raise DTypeError(f"{name} needs True or False, got {x!r}")
    return bool(x)


def extent(x: Any) -> int:
    """Return a whole number as an int, also from an array of one element; raise TypeError for anything else."""
    number = whole_number(x)
    return operator.index(x) if number is None else number


def whole_numbers(x: Any) -> tuple[int, ...] | None:
    """Return the items of ``x`` as ints; None if ``x`` is not iterable, or an item is not a whole number."""
    try:
        given = tuple(x)
    except TypeError:
        return None
    return None if None in map(whole_number, given) else tuple(map(int, given))


def whole_number(x: Any) -> int | None:
    """Return a whole number as an int, otherwise None.

    2.0 and True count as whole numbers: they equal ints, so a cached call accepts them as well.
    """
    number = scalar(x) if x is not True and x is not False else float(x)
    return None if number is None or not number.is_integer() else int(number)
