"""How operands look: arrays that look like checked ones pass the same checks.

A look is all that `view` asks of an array but its address. Reading dtype, shape, strides and device of every operand is
half of the host time of a small call, so what a framework can compare in one question about all operands is recognized
at a glance: the guards of torch's compiled graphs take a tenth of that time.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from fp8core.interop.float8 import Float8Array
from fp8core.interop.frameworks import framework_of
from fp8core.interop.tensor import Framework

Looks = tuple[Sequence[int], int | None]
"""The addresses of operands, 0 of None, and a number for how they look; None where one has to be viewed each time."""

SIZES_KEPT: Final = 4096
"""Of first operands; past these the glances start anew."""
ALIKE: Final = 8
"""Glances for one size of the first operand: a model's weights that take the same input."""
LOOKS_KEPT: Final = 16_384


@dataclass(frozen=True, slots=True)
class Glance:
    """Operands met before, and what recognizes others that look the same."""

    alike: Callable[..., bool]
    """Of the operands that are there. It may say no where looks are equal, and never yes where they are not."""
    address: Callable[[Any], int]
    missing: list[bool]
    """Which of the operands are None."""
    absent: int
    """How many of them."""
    number: int


_GLANCES: Final[dict[tuple[int, int], tuple[Glance, ...]]] = {}
_NUMBERS: Final[dict[tuple[Any, ...], int]] = {}
_next: Final[Iterator[int]] = count()


def looks(*operands: Any) -> Looks:
    """Return the addresses of ``operands`` (0 of None), and a number for how all of them look.

    Operands of equal number pass the same checks. The number is None where one has to be viewed each time, as those of
    several frameworks are.
    """
    try:
        size = operands[0].nbytes, len(operands)
        known = _GLANCES.get(size, ())
    except (AttributeError, TypeError, RuntimeError):  # no array, or none with a size: `view` has the words
        return _one_by_one(operands)
    for glance in known:
        if not glance.absent:
            there: Sequence[Any] = operands
        elif [x is None for x in operands] == glance.missing:
            there = [x for x in operands if x is not None]
        else:
            continue
        if glance.alike(*there):
            address = glance.address
            addresses = [0 if x is None else address(x) for x in operands]
            if addresses.count(0) > glance.absent:  # memory that was taken away, which `view` refuses
                break
            return addresses, glance.number
    found = _one_by_one(operands)
    if found[1] is not None and len(known) < ALIKE:
        _remember(size, operands, found[1])
    return found


def _one_by_one(operands: tuple[Any, ...]) -> Looks:
    lookers = _LOOKERS
    seen = [lookers[type(x)](x) for x in operands]
    addresses, each = zip(*seen, strict=True)
    if None in each:
        return addresses, None
    number = _NUMBERS.get(each)
    if number is None and _framework_of_all(operands) is not None:
        if len(_NUMBERS) >= LOOKS_KEPT:
            _NUMBERS.clear()  # a number is never given twice
        number = _NUMBERS.setdefault(each, next(_next))
    return addresses, number


def _framework_of_all(operands: tuple[Any, ...]) -> Framework | None:
    """Return the one framework of all operands, or None: among several, each call has to wait for their streams."""
    memories = (x.codes if isinstance(x, Float8Array) else x for x in operands if x is not None)
    found = {framework_of(type(memory)) for memory in memories}
    return found.pop() if len(found) == 1 else None


def _remember(size: tuple[int, int], operands: tuple[Any, ...], number: int) -> None:
    framework = framework_of(type(operands[0]))  # of all: they have a number
    if framework is None or framework.address is None:
        return
    there = tuple(x for x in operands if x is not None)
    alike = framework.guard(there)
    if not alike(*there):  # one tensor twice, which torch's guards do not take
        return
    if len(_GLANCES) >= SIZES_KEPT:
        _GLANCES.clear()
    missing = [x is None for x in operands]
    absent = sum(missing)
    glance = Glance(alike, framework.address, missing, absent, number)
    known = _GLANCES.get(size, ())
    _GLANCES[size] = (*known, glance) if absent else (glance, *known)  # those without None, which cost less, first


class _Lookers(dict[type, Callable[[Any], tuple[int, Any]]]):
    """How arrays of a type are looked at, found out on the first."""

    def __missing__(self, cls: type) -> Callable[[Any], tuple[int, Any]]:
        framework = framework_of(cls)
        look: Callable[[Any], tuple[int, Any]] = _unknown if framework is None else framework.look
        if issubclass(cls, Float8Array):
            look = _look_of_float8
        self[cls] = look
        return look


def _look_of_float8(x: Float8Array) -> tuple[int, Any]:
    codes: Any = x.codes
    pointer, look = _LOOKERS[type(codes)](codes)
    return pointer, None if look is None else (x.dtype, look)


def _unknown(x: Any) -> tuple[int, None]:
    """Leave it to `view` to say what is wrong with ``x``."""
    del x
    return 0, None


_LOOKERS: Final = _Lookers({type(None): lambda _: (0, ())})
