"""Signatures: arrays of equal signature pass the same checks, wherever they lie.

The signature of an array is all that `fp8core.interop.view` asks of it but its address. Reading dtype, shape, strides
and device of every operand is half of the host time of a small call, so where a framework can compare all operands in
one question (the guards of torch's compiled graphs, a tenth of that time) signatures are recognized by guards.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import count
from operator import itemgetter, or_
from typing import Any, Final, NamedTuple

from fp8core.core.specs import ALIGNMENT
from fp8core.interop import Framework, eager_only, framework_of
from fp8core.interop.float8 import Float8Array

Signature = tuple[list[int], int | None, Any]
"""The addresses of operands, 0 of None; a number for their signatures, None where they are viewed each time; and what
their addresses leave when divided by `ALIGNMENT`, each apart: 0 where all leave nothing."""

SIZES_KEPT: Final = 2048
"""Of first operands; past these the guards start anew."""
GUARDS_PER_SIZE: Final = 8
"""For one size of the first operand: a model's weights that take the same input."""
NUMBERS_KEPT: Final = 16_384
_OFFSETS: Final = ALIGNMENT - 1


class Guard(NamedTuple):
    """Operands met before, and what recognizes others of the same signatures; it is unpacked at once."""

    holds: Callable[..., bool]
    """Of the operands that are there. It may say no where signatures are equal, and never yes where they are not."""
    address: Callable[[Any], int]
    present: Callable[[Sequence[Any]], Sequence[Any]] | None
    """Picks the operands that are not None; None where all are there."""
    spread: Callable[[list[int]], tuple[int, ...]]
    """Puts the addresses of those, behind which stands a 0, in the places of all operands."""
    number: int


_GUARDS: Final[dict[tuple[int, tuple[type, ...]], tuple[Guard, ...]]] = {}
_NUMBERS: Final[dict[tuple[Any, ...], int]] = {}
_next: Final[Iterator[int]] = count()


@eager_only
def signature(operands: Sequence[Any]) -> Signature:
    """Return the addresses of ``operands`` (0 of None), and a number for all of their signatures.

    Operands of equal number pass the same checks. The number is None where they have to be viewed each time, as those
    of several frameworks have, each of which has work of its own to be waited for.
    """
    try:
        guards = _GUARDS[operands[0].nbytes, tuple(map(type, operands))]
    except (KeyError, AttributeError, TypeError, RuntimeError):  # not met before, or no array: `view` has the words
        return _one_by_one(operands)
    for holds, address, present, spread, number in guards:
        there = operands if present is None else present(operands)
        if holds(*there):
            found = list(map(address, there))
            if 0 in found:  # memory that was taken away, which `view` refuses
                break
            bits = reduce(or_, found) & _OFFSETS
            found.append(0)
            addresses = list(spread(found))
            return addresses, number, bits and _offsets(addresses)
    return _one_by_one(operands)


def _offsets(addresses: list[int]) -> Any:
    return tuple([at & _OFFSETS for at in addresses])


def _one_by_one(operands: Sequence[Any]) -> Signature:
    readers = _READERS
    seen = [readers[type(x)](x) for x in operands]
    addresses, each = [at for at, _ in seen], tuple(one for _, one in seen)
    if None in each or operands[0] is None:
        return addresses, None, 0
    number = _NUMBERS.get(each)
    framework = _framework_of_all(operands)
    if number is None and framework is not None:
        if len(_NUMBERS) >= NUMBERS_KEPT:
            _NUMBERS.clear()  # a number is never given twice
        number = _NUMBERS.setdefault(each, next(_next))
    if number is not None and framework is not None:
        _remember(operands, number, framework)
    return addresses, number, reduce(or_, addresses) & _OFFSETS and _offsets(addresses)


def _framework_of_all(operands: Sequence[Any]) -> Framework | None:
    """Return the one framework of all operands, or None: among several, each call has to wait for their streams."""
    memories = (x.codes if isinstance(x, Float8Array) else x for x in operands if x is not None)
    found = {framework_of(type(memory)) for memory in memories}
    return found.pop() if len(found) == 1 else None


def _remember(operands: Sequence[Any], number: int, framework: Framework) -> None:
    if framework.address is None:
        return
    size = operands[0].nbytes, tuple(map(type, operands))
    known = _GUARDS.get(size, ())
    if len(known) >= GUARDS_PER_SIZE:
        return
    places = [i for i, x in enumerate(operands) if x is not None]
    there = [operands[i] for i in places]
    holds = framework.guard(tuple(there))
    if not holds(*there):  # one tensor twice, which torch's guards do not take
        return
    if len(_GUARDS) >= SIZES_KEPT:
        _GUARDS.clear()
    present = None if len(places) == len(operands) else _picking(places)
    spread = _picking([places.index(i) if i in places else len(places) for i in range(len(operands))])
    _GUARDS[size] = (*known, Guard(holds, framework.address, present, spread, number))


def _picking(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return what picks the items at ``places``, always as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda items: (items[places[0]],)


class _Readers(dict[type, Callable[[Any], tuple[int, Any]]]):
    """How the address and the signature of an array of a type are read, found out on the first."""

    def __missing__(self, cls: type) -> Callable[[Any], tuple[int, Any]]:
        framework = framework_of(cls)
        reader: Callable[[Any], tuple[int, Any]] = _unknown if framework is None else framework.signature
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
