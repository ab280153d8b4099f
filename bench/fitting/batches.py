"""Evaluates a formula for many arguments and many constants at once: written for numbers, it gets arrays of them.

A formula may branch on its arguments, as in `if k % 128`: a `Batch` whose elements take different branches interrupts
the call, and each part of them is evaluated by a call of its own.
"""

import builtins
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from types import ModuleType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Formula = Callable[..., float]


class SplitError(Exception):
    """Says which elements of a batch take a branch; the others take the other one."""

    def __init__(self, taken: NDArray[np.bool_]) -> None:
        super().__init__()
        self.taken = taken


class Batch:
    """Numbers that a formula computes with as with one: a row of arguments, a column of constants, or both.

    It is not hashable: a cache or a dictionary refuses it.
    """

    def __init__(self, values: NDArray[Any]) -> None:
        self.values = values

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        values = np.atleast_2d(self.values).astype(bool)
        if values.all() or not values.any():
            return bool(values.flat[0])
        if (values != values[0]).any():
            raise ValueError("the branch of a formula depends on its constants")
        raise SplitError(values[0])

    def __neg__(self) -> "Batch":
        return Batch(-self.values)

    def __ceil__(self) -> "Batch":
        return Batch(np.ceil(self.values))


COMPARISONS: Final = "lt", "le", "gt", "ge", "eq", "ne"
ARITHMETIC: Final = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_"


def _number(value: Any) -> Any:
    return value.values if isinstance(value, Batch) else value


def _define(name: str) -> None:
    """Define an operator of `Batch`, and arithmetic of a number with a batch."""
    of = getattr(operator, name)
    setattr(Batch, f"__{name.strip('_')}__", lambda self, other: Batch(of(self.values, _number(other))))
    if name in ARITHMETIC:
        setattr(Batch, f"__r{name.strip('_')}__", lambda self, other: Batch(of(_number(other), self.values)))


for _name in (*COMPARISONS, *ARITHMETIC):
    _define(_name)


@contextmanager
def elementwise(module: ModuleType) -> Iterator[None]:
    """Let `max` and `min` in a module's formulas take batches, within the block."""

    def of(name: str, array: Any) -> Callable[..., Any]:
        def chosen(*values: Any, **options: Any) -> Any:
            if any(isinstance(value, Batch) for value in values):
                return Batch(reduce(array, map(_number, values)))
            return vars(builtins)[name](*values, **options)

        return chosen

    names = {name: of(name, array) for name, array in (("max", np.maximum), ("min", np.minimum))}
    vars(module).update(names)
    try:
        yield
    finally:
        for name in names:
            del vars(module)[name]


class Call(NamedTuple):
    """A call of a formula."""

    formula: Formula
    arguments: tuple[Any, ...] = ()


class Part(NamedTuple):
    """Calls that take the same branches."""

    formula: Formula
    arguments: tuple[Any, ...]
    places: NDArray[np.int64]


class Calls:
    """Calls that are made again and again, as constants in the modules of their formulas change.

    Args:
        calls: formulas and arguments: numbers, and tuples of them.
        whole: types of tuples that a formula needs as they are, as the key of a dictionary for example.
    """

    def __init__(self, calls: Sequence[Call], whole: tuple[type, ...] = ()) -> None:
        number: dict[Call, int] = {}
        self._places = np.array([number.setdefault(call, len(number)) for call in calls])
        alike = defaultdict[Any, list[Call]](list)
        for call in number:
            alike[call.formula, kind(call.arguments, whole)].append(call)
        self._parts = [
            Part(some[0].formula, stacked([call.arguments for call in some]), np.array([number[call] for call in some]))
            for some in alike.values()
        ]
        self._count = len(number)

    def results(self, rows: int = 1) -> NDArray[np.float64]:
        """Return the results of all calls for each row of constants, which are batches of shape ``[rows, 1]``."""
        found, left, done = np.empty((rows, self._count)), [*self._parts], list[Part]()
        while left:
            part = left.pop()
            try:
                found[:, part.places] = _number(part.formula(*part.arguments))
                done.append(part)
            except SplitError as split:
                for which in (split.taken, ~split.taken):
                    left.append(Part(part.formula, taken(part.arguments, which), part.places[which]))
        self._parts = done
        return found[:, self._places]


def kind(value: Any, whole: tuple[type, ...]) -> Any:
    """Return what the arguments of calls have in common whose numbers can be put into arrays."""
    if isinstance(value, tuple) and not isinstance(value, whole):
        return type(value), *(kind(one, whole) for one in value)
    return type(value) if type(value) in (int, float) else value


def stacked(values: Sequence[Any]) -> Any:
    """Return values of one kind as one value, whose numbers are batches where they differ."""
    first = values[0]
    if all(value == first for value in values):
        return first
    return like(first, map(stacked, zip(*values, strict=True))) if isinstance(first, tuple) else Batch(np.array(values))


def taken(value: Any, which: NDArray[np.bool_]) -> Any:
    """Return a value with the elements of its batches that are taken."""
    if isinstance(value, Batch):
        return Batch(value.values[which])
    return like(value, (taken(one, which) for one in value)) if isinstance(value, tuple) else value


def like(some: Any, values: Any) -> Any:
    """Return a tuple of the type of another one."""
    return type(some)._make(values) if hasattr(some, "_make") else tuple(values)
