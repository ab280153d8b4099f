"""Signatures: arrays of equal signature pass the same checks, wherever they lie.

The signature of an array is all that `fp8core.interop.view` asks of it but its address. Reading dtype, shape, strides
and device of every operand is half of the host time of a small call, so where a framework can compare all operands in
one question (the guards of torch's compiled graphs, a tenth of that time) calls are recognized by guards
(`fp8core.core.shortcuts`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import count
from operator import or_
from typing import Any, Final

from fp8core.core.specs import ALIGNMENT
from fp8core.interop import Framework, framework_of
from fp8core.interop.float8 import Float8Array

NUMBERS_KEPT: Final = 16_384
OFFSETS: Final = ALIGNMENT - 1
"""The bits of an address that its alignment leaves open."""

_NUMBERS: Final[dict[tuple[Any, ...], int]] = {}
_next: Final[Iterator[int]] = count()


def signature(operands: Sequence[Any]) -> tuple[list[int], int | None]:
    """Return the addresses of ``operands`` (0 of None), and a number for all of their signatures.

    Operands of equal number pass the same checks. The number is None where they have to be viewed each time, as those
    of several frameworks have, each of which has work of its own to be waited for.
    """
    readers = _READERS
    seen = [readers[type(x)](x) for x in operands]
    addresses, each = [at for at, _ in seen], tuple([one for _, one in seen])
    if None in each or operands[0] is None:
        return addresses, None
    number = _NUMBERS.get(each)
    if number is None and _framework_of_all(operands) is not None:
        if len(_NUMBERS) >= NUMBERS_KEPT:
            _NUMBERS.clear()  # a number is never given twice
        number = _NUMBERS.setdefault(each, next(_next))
    return addresses, number


def offsets(addresses: Sequence[int]) -> tuple[int, ...] | None:
    """Return what each address leaves when divided by `ALIGNMENT`; None where all leave nothing."""
    return tuple([at & OFFSETS for at in addresses]) if reduce(or_, addresses) & OFFSETS else None


def _framework_of_all(operands: Sequence[Any]) -> Framework | None:
    """Return the one framework of all operands, or None: among several, each call has to wait for their streams."""
    memories = [x.codes if isinstance(x, Float8Array) else x for x in operands if x is not None]
    found = {framework_of(type(memory)) for memory in memories}
    return found.pop() if len(found) == 1 else None


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
