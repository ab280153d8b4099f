"""Rows of tables: a kernel, what it needs of a problem, and why it cannot run one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Launch = Callable[..., None]


class Refusal(str):
    """Why a kernel cannot run a problem, or why it is not preferred for it."""

    __slots__ = ()


class Unknown(str):
    """Why nobody here can tell whether a kernel can run a problem, as only a library on the device could."""

    __slots__ = ()


Check = Callable[[Any], Refusal | Unknown | None]
"""Of a problem: None where there is nothing against it."""


class Requirement:
    """What a kernel needs of a problem, or prefers."""

    __slots__ = ("check",)
    check: Check

    def __init__(self, holds: Callable[[Any], bool], otherwise: str) -> None:
        """Make a requirement of a predicate and of what is said where it is false, with ``{p.m}`` and the like."""
        self.check = lambda p: None if holds(p) else Refusal(otherwise.format(p=p))

    @classmethod
    def of(cls, check: Check) -> "Requirement":
        """Return a requirement whose check has reasons of its own."""
        made = cls.__new__(cls)
        made.check = check
        return made


def _first(requirements: tuple[Requirement, ...], problem: Any) -> Refusal | Unknown | None:
    return next((reason for r in requirements if (reason := r.check(problem)) is not None), None)


def no_estimate(_: Any) -> None:
    """Return None: of a kernel whose time no model knows."""


class Choice(NamedTuple):
    """A kernel of a table by its name, and which of its algorithms."""

    kernel: str
    algorithm: int = 0


class Kernel(NamedTuple):
    """A row of a table: a name, what it needs, how it is made ready for a problem, and where it is preferred."""

    name: str
    requires: tuple[Requirement, ...]
    plan: Callable[..., Any]
    """Of a problem and, where there are several algorithms, the number of one; 0 is the default. It returns a `Launch`,
    or the launches that the table speaks of."""
    prefers: tuple[Requirement, ...] = ()
    """Where one does not hold the kernel runs the problem, but others were measured to be faster: `tune` times it."""
    algorithms: Callable[[Any], Sequence[str]] = lambda _: ("",)
    """The algorithms that an able kernel has for a problem, as a library may offer several: a name for each, which says
    in another process which one is meant. The first is the default."""
    us: Callable[[Any], float | None] = no_estimate
    """How many microseconds an able kernel is estimated to take for a problem; None where no model knows."""
    compared: Callable[[Any], bool] = lambda _: True
    """Where ``us`` knows, said at once: what ``refusal`` and ``us`` ask a library takes milliseconds."""
    rough: Callable[[Any], float | None] = no_estimate
    """The same for `explain` alone, of a kernel whose place in the table says more than an estimate."""
    note: str = ""
    """What `explain` says of it where it is able: when something else runs."""

    def refusal(self, problem: Any) -> Refusal | Unknown | None:
        """Return why the kernel cannot run ``problem``, or may not, or None when it can."""
        return _first(self.requires, problem)

    def reservation(self, problem: Any) -> Refusal | Unknown | None:
        """Return why the kernel is not preferred for ``problem``, though able, or None."""
        return _first(self.prefers, problem)
