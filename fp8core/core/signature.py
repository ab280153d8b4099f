"""Signatures: arrays of equal signature pass the same checks, wherever they lie.

The signature of an array is all that `fp8core.interop.view` asks of it but its address. Reading dtype, shape, strides
and device of every operand is half of the host time of a small call, so where a framework can compare all operands in
one question (the guards of torch's compiled graphs, a tenth of that time) signatures are recognized by guards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

from fp8core.interop import Framework, eager_only, framework_of
from fp8core.interop.float8 import Float8Array

Signature = tuple[list[int], int | None]
"""The addresses of operands, 0 of None, and a number for their signatures; None where they are viewed each time."""

SIZES_KEPT: Final = 2048
"""Of first operands; past these the guards start anew."""
GUARDS_PER_SIZE: Final = 8
"""For one size of the first operand: a model's weights that take the same input."""
NUMBERS_KEPT: Final = 16_384


@dataclass(frozen=True, slots=True)
class Guard:
    """Operands met before, and what recognizes others of the same signatures."""

    holds: Callable[..., bool]
    """Of the operands that are there. It may say no where signatures are equal, and never yes where they are not."""
    address: Callable[[Any], int]
    missing: list[bool]
    """Which of the operands are None."""
    absent: int
    """How many of them."""
    number: int


_GUARDS: Final[dict[tuple[int, int], tuple[Guard, ...]]] = {}
_NUMBERS: Final[dict[tuple[Any, ...], int]] = {}
_next: Final[Iterator[int]] = count()


@eager_only
def signature(operands: Sequence[Any]) -> Signature:
    """Return the addresses of ``operands`` (0 of None), and a number for all of their signatures.

    Operands of equal number pass the same checks. The number is None where they have to be viewed each time, as those
    of several frameworks have, each of which has work of its own to be waited for.
    """
    try:
        size = operands[0].nbytes, len(operands)
        known = _GUARDS.get(size, ())
    except (AttributeError, TypeError, RuntimeError):  # no array, or none with a size: `view` has the words
        return _one_by_one(operands)
    for guard in known:
        if not guard.absent:
            there: Sequence[Any] = operands
        elif [x is None for x in operands] == guard.missing:
            there = [x for x in operands if x is not None]
        else:
            continue
        if guard.holds(*there):
            address = guard.address
            addresses = [0 if x is None else address(x) for x in operands]
            if addresses.count(0) > guard.absent:  # memory that was taken away, which `view` refuses
                break
            return addresses, guard.number
    found = _one_by_one(operands)
    if found[1] is not None and len(known) < GUARDS_PER_SIZE:
        _remember(size, operands, found[1])
    return found


def _one_by_one(operands: Sequence[Any]) -> Signature:
    readers = _READERS
    seen = [readers[type(x)](x) for x in operands]
    addresses, each = [at for at, _ in seen], tuple(one for _, one in seen)
    if None in each:
        return addresses, None
    number = _NUMBERS.get(each)
    if number is None and _framework_of_all(operands) is not None:
        if len(_NUMBERS) >= NUMBERS_KEPT:
            _NUMBERS.clear()  # a number is never given twice
        number = _NUMBERS.setdefault(each, next(_next))
    return addresses, number


def _framework_of_all(operands: Sequence[Any]) -> Framework | None:
    """Return the one framework of all operands, or None: among several, each call has to wait for their streams."""
    memories = (x.codes if isinstance(x, Float8Array) else x for x in operands if x is not None)
    found = {framework_of(type(memory)) for memory in memories}
    return found.pop() if len(found) == 1 else None


def _remember(size: tuple[int, int], operands: Sequence[Any], number: int) -> None:
    framework = framework_of(type(operands[0]))  # of all: they have a number
    if framework is None or framework.address is None:
        return
    there = tuple(x for x in operands if x is not None)
    holds = framework.guard(there)
    if not holds(*there):  # one tensor twice, which torch's guards do not take
        return
    if len(_GUARDS) >= SIZES_KEPT:
        _GUARDS.clear()
    missing = [x is None for x in operands]
    absent = sum(missing)
    guard = Guard(holds, framework.address, missing, absent, number)
    known = _GUARDS.get(size, ())
    _GUARDS[size] = (*known, guard) if absent else (guard, *known)  # those without None, which cost less, first


class _Readers(dict[type, Callable[[Any], tuple[int, Any]]]):
    """How the address and the signature of an array of a type are read, found out on the first."""

    def __missing__(self, cls: type) -> Callable[[Any], tuple[int, Any]]:
        framework = framework_of(cls)
        reader: Callable[[Any], tuple[int, Any]] = _unknown if framework is None else framework.look
        if issubclass(cls, Float8Array):
            reader = _read_float8
        self[cls] = reader
        return reader


def _read_float8(x: Float8Array) -> tuple[int, Any]:
    codes: Any = x.codes
    pointer, seen = _READERS[type(codes)](codes)
    return pointer, None if seen is None else (x.dtype, seen)


def _unknown(x: Any) -> tuple[int, None]:
    """Leave it to `view` to say what is wrong with ``x``."""
    del x
    return 0, None


_READERS: Final = _Readers({type(None): lambda _: (0, ())})
