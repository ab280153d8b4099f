"""Checks of arguments that are not arrays: group shapes, extents, flags, names and numbers."""

import math
import operator
from collections.abc import Collection
from numbers import Number
from typing import Any, Final

from fp8core.errors import DTypeError, ShapeError
from fp8core.interop import scalar
from fp8core.problem import GroupShape

LARGEST_FLOAT32: Final = (2.0 - 2.0**-23) * 2.0**127
"""The largest finite number of float32."""
INFINITE: Final = (math.inf, -math.inf)


def group_shape(given: object, name: str = "group_shape") -> GroupShape:
    """Return a group shape: two whole numbers, each -1, or positive and at most what a kernel's int holds."""
    sides = whole_numbers(given) if isinstance(given, tuple | list) else None
    if sides is None or len(sides) != 2 or any(side != -1 and not 0 < side < 1 << 31 for side in sides):
        raise ShapeError(f"{name} needs a pair of whole numbers, each -1 or 1 to 2**31 - 1, got {given!r}")
    return GroupShape(*sides)


def extent(given: object, name: str) -> int:
    """Return the extent of an axis: a whole number of at most 31 bits."""
    number = whole_number(given)
    if number is None or not 0 <= number < 1 << 31:
        raise ShapeError(f"{name} needs a whole number from 0 to 2**31 - 1, got {given!r}")
    return number


def extents(given: object, name: str, least: int = 0) -> tuple[int, ...]:
    """Return the extents of several axes: whole numbers of at least ``least`` and at most 31 bits."""
    numbers = whole_numbers(given)
    if numbers is None or any(not least <= number < 1 << 31 for number in numbers):
        raise ShapeError(f"{name} needs whole numbers from {least} to 2**31 - 1, got {given!r}")
    return numbers


def least_rows(given: object, name: str) -> int:
    """Return the least number of rows of a result: a whole number of at most 31 bits, or negative."""
    rows = whole_number(given)
    if rows is None or rows >= 1 << 31:
        raise ShapeError(f"{name} needs a whole number, at most 2**31 - 1, got {given!r}")
    return rows


def in_float32(number: float) -> bool:
    """Return whether a number can be rounded to float32 without becoming zero or infinity, unless it is one of them."""
    # `torch.compile` can trace comparisons, but not `struct`, and makes a float of a module an input of a dynamic graph
    magnitude, becomes_infinity, becomes_zero = abs(number), 2.0**128 - 2.0**103, 2.0**-150
    return not (becomes_infinity <= magnitude < math.inf or 0 < magnitude <= becomes_zero)


def became_infinite(given: Any, number: float) -> bool:
    """Return whether the float of a given number is infinite because the number is too large for a float."""
    return number in INFINITE and given not in INFINITE


def is_one_of(x: object, known: Collection[str]) -> bool:
    """Return whether ``x`` is a string among these; anything else is neither hashed nor compared."""
    return isinstance(x, str) and x in known


def flag(x: Any, name: str) -> bool:
    """Return ``x`` as a bool; it may be anything that equals True or False, which a cached call accepts as well."""
    if x is True or x is False:  # torch.compile cannot tell the type of what a constant function returns
        return x
    # Symbols of torch are named "bool" to torch.compile, and "SymBool" while torch.export traces without it.
    if type(x).__name__ not in ("bool", "bool_", "SymBool") and whole_number(x) not in (0, 1):
        raise DTypeError(f"{name} needs True or False, got {x!r}")
    return bool(x)


def number(x: Any, name: str) -> float:
    """Return a number of Python or NumPy as a float.

    A public function calls this for an option that is not a float before it looks up a cached call: True equals 1.0.
    """
    known = scalar(x)
    if known is None:
        raise not_a_number(x, name)
    return known


def not_a_number(x: Any, name: str) -> DTypeError:
    """Return the error for an option that has to be a number and is none."""
    return DTypeError(f"{name} needs a number, got {type(x).__name__}")


def as_int(x: Any) -> int:
    """Return a whole number as an int, also from an array of one element; raise TypeError for anything else."""
    number = whole_number(x)
    return operator.index(x) if number is None else number


def whole_numbers(x: Any) -> tuple[int, ...] | None:
    """Return the items of ``x`` as ints; None if ``x`` is not iterable, or an item is not a whole number."""
    try:
        given = [whole_number(item) for item in x]
    except TypeError:
        return None
    known = tuple([item for item in given if item is not None])
    return known if len(known) == len(given) else None


def ordered(x: Any) -> tuple[Any, ...]:
    """Return the items of ``x``; raise TypeError for text, bytes, sets and mappings, which are no shapes."""
    if isinstance(x, (str, bytes, bytearray, set, frozenset, dict)):
        raise TypeError(f"{type(x).__name__} is not a sequence of items")
    return tuple(x)


def whole_number(x: Any) -> int | None:
    """Return a whole number as an int, otherwise None.

    2.0, True and Fraction(2) count as whole numbers: they equal ints, so a cached call accepts them as well.
    """
    number = scalar(x)
    if number is not None:
        return int(number) if number.is_integer() else None
    if not (isinstance(x, Number) or type(x).__name__ in ("bool", "bool_")):
        return None
    try:
        number = float(getattr(x, "real", x))
    except (OverflowError, TypeError, ValueError):  # such as a large Fraction, or a signaling NaN of Decimal
        return None
    return int(number) if number.is_integer() and int(number) == x else None
