"""Generates functions that make one kind of repeated call, and uses guards to recognize such calls in one question.

A function generated for one kind of call (how many operands, which are left out, which results are new) takes a third
less time in Python than one for all kinds: it builds no list, unpacks no tuple into a call, and tests nothing that is
already known. A `Repeat` takes operands that are known to be of its kind, with their addresses. A `Shortcut`, found by
options and size, asks a guard whether the operands are of its kind.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from textwrap import indent
from typing import Any, NamedTuple

from fp8core.core import prefetch, under_way
from fp8core.core.calls import Call, Repeat, Shortcut
from fp8core.core.signature import OFFSETS, offsets
from fp8core.interop import Framework


class _Guarded(NamedTuple):
    """What the text of a shortcut depends on, besides what that of a repeat does."""

    unguarded: str
    """The attribute that is true of arrays which must not be given to a guard."""
    aligned: bool
    """Whether all addresses are multiples of `ALIGNMENT`."""


class _Kind(NamedTuple):
    """What the text of a repeat depends on."""

    same: tuple[int | None, ...]
    """For each operand None if it is left out, otherwise its index; in a shortcut the first index of the same array,
    since a guard takes each array once."""
    new: tuple[int, ...]
    """The indices of the results to allocate."""
    given: tuple[int, ...]
    """The indices of the caller's arrays that are written."""
    overwriting: bool
    """Whether results may overwrite weights that may be read early."""
    plain: bool
    """Whether the launch takes the addresses of operands and nothing else."""
    counted: bool
    """Whether the framework has to be told which arrays were written."""
    guarded: _Guarded | None
    """None for a `Repeat`, whose operands are known to be of the kind."""


def repeat(operands: Sequence[Any], call: Call) -> Repeat:
    """Return the function that makes ``call`` for operands of the same specs as these, which it was planned for."""
    same = tuple([None if x is None else at for at, x in enumerate(operands)])
    made: Repeat = _bound(call, _kind(call, same, None), None, None, None, None)
    return made


def shortcut(
    operands: tuple[Any, ...],
    addresses: Sequence[int],
    call: Call,
    framework: Framework,
) -> Shortcut | None:
    """Return the shortcut for calls whose operands have the signatures of these; None if the guard rejects them.

    The shortcut may reject operands of these signatures, but never accepts others.

    Args:
        operands: the operands of a planned call, all of one framework that has guards.
        addresses: the addresses of the operands.
        call: the planned call.
        framework: the framework of the operands.
    """
    first = {id(x): at for at, x in reversed(list(enumerate(operands)))}
    same = tuple([None if x is None else first[id(x)] for x in operands])
    apart = offsets(addresses)
    guard = framework.guard(tuple([operands[at] for i, at in enumerate(same) if i == at]))
    if framework.blocked() or not guard(*[operands[at] for i, at in enumerate(same) if i == at]):
        return None
    kind = _kind(call, same, _Guarded(framework.unguarded, apart is None))
    made: Shortcut = _bound(call, kind, framework.blocked, guard, framework.address, apart)
    return made


def _kind(call: Call, same: tuple[int | None, ...], guarded: _Guarded | None) -> _Kind:
    return _Kind(
        same,
        tuple([at for at, _ in call.new]),
        call.given,
        call.may_overwrite,
        call.plain is not None,
        call.wrote is not None,
        guarded,
    )


def _bound(call: Call, kind: _Kind, *recognizing: Any) -> Callable[..., Any]:
    """Return the function of a kind for one call; ``recognizing``: the blocked test, guard, address reader, offsets."""
    made = _written(kind)(
        *recognizing,
        call.stream,
        [allocate for _, allocate in call.new],
        call.examined,
        call.examine,
        prefetch.WATCHED,
        call.plain or call.run,
        call.wrote,
        call.note,
    )
    under_way.register(made.__code__, _given_to)
    return made


def _given_to(variables: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of the caller's arrays that a repeat writes, given its local variables."""
    call: Call = variables["examine"].__self__
    return call.written({at: variables[f"a{at}"] for at in call.given})


@cache
def _written(kind: _Kind) -> Callable[..., Callable[..., Any]]:
    """Generate and return the function that binds a call to a function of this kind."""
    xs = _tuple([f"x{i}" for i in range(len(kind.same))])
    lines = [
        "def bind(blocked, holds, address, apart, stream, new, examined, examine, watched, launch, wrote, note):",
        *([f"    {_tuple([f'new{i}' for i in kind.new])} = new"] if kind.new else []),
    ]
    if kind.guarded is None:
        lines += [
            "    def run(operands, addresses, weights):",
            f"        {xs} = operands",
            f"        {_tuple([f'a{i}' for i in range(len(kind.same))])} = addresses",
            "        work = stream()",
            indent(_making(kind, []), 8 * " "),
        ]
    else:
        there = [i for i, at in enumerate(kind.same) if i == at]
        differ = [f"x{i} is not {'None' if at is None else f'x{at}'}" for i, at in enumerate(kind.same) if at != i]
        differ += [f"x{i} is None" for i in there]
        fits = [f"a{i}" for i in there]  # address 0: the array has lost its memory, which `view` refuses
        if kind.guarded.aligned:
            fits.append(f"not ({' | '.join(fits)}) & {OFFSETS}")
        else:
            fits += [f"a{i} & {OFFSETS} == apart[{i}]" for i in there]
        lines += [
            "    def run(operands, weights):",
            f"        {xs} = operands",
            f"        if {' or '.join([*differ, 'blocked()'])}:",
            "            return None",
            "        try:",
            f"            if {' or '.join(f'x{i}.{kind.guarded.unguarded}' for i in there)}:",
            "                return None",
            "        except AttributeError:",  # a number, or an array of another framework
            "            return None",
            f"        if holds({', '.join(f'x{i}' for i in there)}):",
            *(f"            a{i} = address(x{i})" for i in there),
            "            work = stream()",
            indent(_making(kind, fits), 12 * " "),
        ]
    lines.append("    return run")
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    bind: Callable[..., Callable[..., Any]] = space["bind"]
    return bind


def _making(kind: _Kind, fits: list[str]) -> str:
    """Return the text that makes a call if its addresses fit: allocate, examine, launch, report what was written."""
    addresses = [
        "0" if at is None and i not in kind.new else f"a{i if at is None else at}" for i, at in enumerate(kind.same)
    ]
    places = addresses if kind.given else [addresses[i] for i in kind.new]
    where = _tuple(places) if kind.given or len(places) > 1 else "".join(places)
    elsewhere = f"examine([{', '.join(addresses)}], work, weights)"
    launching = (
        f"launch(work, {', '.join(addresses)})"
        if kind.plain
        else f"launch(work, [{', '.join(addresses)}], None, weights)"
    )
    lines = [f"a{i}, x{i} = new{i}(None)" for i in kind.new]
    known = f"{where} in examined"
    if kind.new:
        condition = " and ".join(fits)
        known = known if kind.given else f"not watched.starts or {known}"
    else:  # addresses that were examined are known to fit
        condition = f"(known := {known}) or ({' and '.join(fits)})" if fits else ""
        known = "known" if fits else known
    if kind.given or kind.overwriting:
        launching = f"if {known} or not {elsewhere}:\n    {launching}"
    lines += [
        launching,
        *([f"wrote({_tuple([f'x{i}' for i in kind.given])})"] if kind.counted else []),
        f"return {_tuple([f'x{i}' for i in range(len(kind.same))]) if kind.new else 'operands'}, note",
    ]
    text = "\n".join(lines)
    return f"if {condition}:\n{indent(text, 4 * ' ')}" if condition else text


def _tuple(items: Sequence[str]) -> str:
    """Return the text of a tuple."""
    return f"({', '.join(items)},)"
