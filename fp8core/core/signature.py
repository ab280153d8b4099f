"""Signatures: arrays of equal signature pass the same checks, whatever their addresses.

The signature of an array holds everything that `fp8core.interop.view` reads from it, except the address. Reading dtype,
shape, strides and device of every operand takes half of the host time of a small call. Where a framework can test all
operands at once (the guards of torch's compiled graphs, which take a tenth of that time), guards recognize calls
instead (`fp8core.core.shortcuts`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import count
from operator import or_
from typing import Any, Final

from fp8core.core.specs import ALIGNMENT
from fp8core.interop import Framework, framework_of, owner_of
from fp8core.interop.float8 import Float8Array

NUMBERS_KEPT: Final = 16_384
OFFSETS: Final = ALIGNMENT - 1
"""The low bits of an address: its offset from a multiple of `ALIGNMENT`."""

_NUMBERS: Final[dict[tuple[Any, ...], int]] = {}
_next: Final[Iterator[int]] = count()


def signature(operands: Sequence[Any]) -> tuple[list[int], int | None]:
    """Return the addresses of ``operands`` (0 for None), and one number for all of their signatures.

    Operands with the same number pass the same checks. The number is None if they have to be viewed in every call, as
    arrays of several frameworks do: the call has to wait for the streams of each.
    """
    readers = _READERS
    seen = [readers[type(x)](x) for x in operands]
    addresses, each = [at for at, _ in seen], tuple([one for _, one in seen])
    if None in each:
        return addresses, None
    number = _NUMBERS.get(each)
    if number is None and _framework_of_all(operands) is not None:
        if len(_NUMBERS) >= NUMBERS_KEPT:
            _NUMBERS.clear()  # a number is never given twice
        number = _NUMBERS.setdefault(each, next(_next))
    return addresses, number


def offsets(addresses: Sequence[int]) -> tuple[int, ...] | None:
    """Return each address modulo `ALIGNMENT`; None if all of them are multiples of it."""
    return tuple([at & OFFSETS for at in addresses]) if reduce(or_, addresses) & OFFSETS else None


def _framework_of_all(operands: Sequence[Any]) -> Framework | None:
    """Return the framework of all operands; None if there are several, whose streams each call has to wait for."""
    found = {owner_of(x)[1] for x in operands if x is not None}
    return found.pop() if len(found) == 1 else None


class _Readers(dict[type, Callable[[Any], tuple[int, Any]]]):
    """The function that reads address and signature of an array, by type; looked up on the first array of a type."""

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
