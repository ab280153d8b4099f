"""Shortcuts: a repeated call as one function without loops, found by options and size and recognized by a guard.

A function that is written for one kind of call (how many operands, which are left out, which results are new) takes a
third less of Python's time than one for all kinds: it builds no list, unpacks no tuple into a call, and asks nothing
whose answer is known.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

from fp8core.core import prefetch
from fp8core.core.calls import Call
from fp8core.core.signature import OFFSETS, offsets
from fp8core.interop import Framework

Shortcut = Callable[[tuple[Any, ...], "prefetch.WeightHistory | None"], tuple[Sequence[Any], Any] | None]
"""Takes operands and what is known of the weight, and returns what a call of the operation does: it has been made. None
unless the operands have the signatures, and their addresses the alignments, that it was written for."""


class _Kind(NamedTuple):
    """What the text of a shortcut depends on."""

    unguarded: str
    """The attribute of arrays of which guards must not be asked."""
    same: tuple[int | None, ...]
    """For each operand None if it is left out, else the first place of the same array: a guard takes each once."""
    aligned: bool
    """Whether all addresses are multiples of `ALIGNMENT`."""
    new: tuple[int, ...]
    given: tuple[int, ...]
    """The places of the caller's arrays that are written."""
    overwriting: bool
    """Whether weights that are read early may lie where results do."""
    plain: bool
    """Whether the launch takes the addresses of operands and nothing else."""
    counted: bool
    """Whether the framework is told what was written."""


def shortcut(
    names: Sequence[str],
    operands: tuple[Any, ...],
    addresses: Sequence[int],
    call: Call,
    framework: Framework,
) -> Shortcut | None:
    """Return the shortcut for calls whose operands have the signatures of these; None where no guard holds for them.

    What is returned may say None of operands that are alike, and never recognizes others.

    Args:
        names: what errors call each operand.
        operands: of a call that is planned, all of a framework with guards.
        addresses: of them.
        call: what serves it.
        framework: theirs.
    """
    first = {id(x): at for at, x in reversed(list(enumerate(operands)))}
    same = tuple([None if x is None else first[id(x)] for x in operands])
    apart = offsets(addresses)
    guard = framework.guard(tuple([operands[at] for i, at in enumerate(same) if i == at]))
    if framework.blocked() or not guard(*[operands[at] for i, at in enumerate(same) if i == at]):
        return None
    kind = _Kind(
        framework.unguarded,
        same,
        apart is None,
        tuple([at for at, _ in call.new]),
        call.given,
        call.may_overwrite,
        call.plain is not None,
        call.wrote is not None,
    )

    def examine(addresses: list[int], stream: int) -> bool:
        """Return whether the call may be made here: not if it writes to a weight that is read early."""
        found = call.regions.examine(names, addresses, stream)
        prefetch.wrote(found)
        return not found

    made: Shortcut = _written(kind)(
        framework.blocked,
        guard,
        framework.address,
        apart,
        call.stream,
        [allocate for _, allocate in call.new],
        call.examined,
        examine,
        prefetch.WATCHED,
        call.plain or call.run,
        call.wrote,
        call.note,
    )
    return made


@cache
def _written(kind: _Kind) -> Callable[..., Shortcut]:
    """Return what makes shortcuts of a kind."""
    same, count = kind.same, len(kind.same)
    there = [i for i in range(count) if same[i] == i]
    differ = [f"x{i} is not {'None' if at is None else f'x{at}'}" for i, at in enumerate(same) if at != i]
    differ += [f"x{i} is None" for i in there]
    addresses = [
        "0" if at is None and i not in kind.new else f"a{i if at is None else at}" for i, at in enumerate(same)
    ]
    fits = [f"a{i}" for i in there]  # an address of 0 is memory that was taken away, which `view` refuses
    if kind.aligned:
        fits.append(f"not ({' | '.join(fits)}) & {OFFSETS}")
    else:
        fits += [f"a{i} & {OFFSETS} == apart[{i}]" for i in there]
    fitting = " and ".join(fits)
    others = " or ".join(f"x{i}.{kind.unguarded}" for i in there)
    present = ", ".join(f"x{i}" for i in there)
    places = addresses if kind.given else [addresses[i] for i in kind.new]
    where = _tuple(places) if kind.given or len(places) > 1 else "".join(places)
    examining = f"examine([{', '.join(addresses)}], work)"
    lines = [
        "def bind(blocked, holds, address, apart, stream, new, examined, examine, watched, launch, wrote, note):",
        *([f"    {_tuple([f'new{i}' for i in kind.new])} = new"] if kind.new else []),
        "    def run(operands, weights):",
        f"        {_tuple([f'x{i}' for i in range(count)])} = operands",
        f"        if {' or '.join([*differ, 'blocked()'])}:",
        "            return None",
        "        try:",
        f"            if {others}:",
        "                return None",
        "        except AttributeError:",  # a number, or an array of another framework
        "            return None",
        f"        if holds({present}):",
        *(f"            a{i} = address(x{i})" for i in there),
        "            work = stream()",
    ]
    if kind.new:
        lines += [
            f"            if {fitting}:",
            *(f"                a{i}, x{i} = new{i}(None)" for i in kind.new),
        ]
        if kind.given or kind.overwriting:
            first = "" if kind.given else "watched.starts and "
            lines += [
                f"                if {first}{where} not in examined and not {examining}:",
                "                    return None",
            ]
    else:  # addresses that were examined fit
        lines += [f"            if {where} in examined or ({fitting} and {examining}):"]
    lines += [
        f"                launch(work, {', '.join(addresses)})"
        if kind.plain
        else f"                launch(work, [{', '.join(addresses)}], None, weights)",
        *([f"                wrote({_tuple([f'x{i}' for i in kind.given])})"] if kind.counted else []),
        f"                return {_tuple([f'x{i}' for i in range(count)]) if kind.new else 'operands'}, note",
        "    return run",
    ]
    space: dict[str, Any] = {}
    exec("\n".join(lines), space)
    bind: Callable[..., Shortcut] = space["bind"]
    return bind


def _tuple(items: Sequence[str]) -> str:
    """Return the text of a tuple."""
    return f"({', '.join(items)},)"
