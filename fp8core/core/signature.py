"""Signatures: arrays of equal signature pass the same checks, wherever they lie.

The signature of an array is all that `fp8core.interop.view` asks of it but its address. Reading dtype, shape, strides
and device of every operand is half of the host time of a small call, so where a framework can compare all operands in
one question (the guards of torch's compiled graphs, a tenth of that time) signatures are recognized by guards.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, reduce
from itertools import count
from operator import or_
from typing import Any, Final

from fp8core.core.specs import ALIGNMENT
from fp8core.interop import Framework, framework_of
from fp8core.interop.float8 import Float8Array

Read = Callable[..., tuple[list[int], int] | None]
"""Of operands, those left out among them: their addresses (0 of None) and the bits of these below `ALIGNMENT`, or-ed.
None unless the operands have the signatures that it was made for."""

NUMBERS_KEPT: Final = 16_384
_OFFSETS: Final = ALIGNMENT - 1

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


def low_bits(addresses: Sequence[int]) -> int:
    """Return the bits of addresses below `ALIGNMENT`, or-ed."""
    return reduce(or_, addresses) & _OFFSETS


def offsets(addresses: Sequence[int]) -> tuple[int, ...]:
    """Return what each address leaves when divided by `ALIGNMENT`."""
    return tuple([at & _OFFSETS for at in addresses])


def recognizer(operands: Sequence[Any], framework: Framework) -> Read | None:
    """Return what recognizes operands of the same signatures as these; None where the guards of ``framework`` cannot.

    The framework has guards. What is returned may say None of operands that are alike, and never recognizes others.
    """
    first = {id(x): at for at, x in reversed(list(enumerate(operands)))}
    same = tuple([None if x is None else first[id(x)] for x in operands])
    guard = framework.guard(tuple([operands[at] for i, at in enumerate(same) if i == at]))
    read = _bind_read(same)(framework.blocked, guard, framework.address)
    return None if read(*operands) is None else read


@cache
def _bind_read(same: tuple[int | None, ...]) -> Callable[..., Read]:
    """Return what makes a `Read` of operands; its code has no loop.

    Loops over operands and addresses take half a microsecond more, a quarter of the time of a cached call.

    Args:
        same: for each operand None if it is left out, else the first place of the same array: a guard takes each array
            once.
    """
    names = [f"x{i}" for i in range(len(same))]
    there = [name for i, name in enumerate(names) if same[i] == i]
    alike = [f"{name} is {None if at is None else names[at]}" for name, at in zip(names, same, strict=True)]
    alike = [test for i, test in enumerate(alike) if same[i] != i]
    lines = [
        "def bind(blocked, holds, address):",
        f"    def read({', '.join(names)}):",
        f"        if {' and '.join([*alike, 'not blocked()'])} and holds({', '.join(there)}):",
        *(f"            {name} = address({name})" for name in there),
        f"            if {' and '.join(there)}:",  # else memory that was taken away, which `view` refuses
        f"                addresses = [{', '.join('0' if at is None else names[at] for at in same)}]",
        f"                return addresses, ({' | '.join(there)}) & {_OFFSETS}",
        "    return read",
    ]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    bind: Callable[..., Read] = space["bind"]
    return bind


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
