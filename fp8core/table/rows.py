"""Rows of tables: a kernel, what it requires of a problem, and why it cannot run one."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Launch = Callable[..., None]
"""Takes the stream and the addresses of operands, 0 for one that is None."""


class Refusal(str):
    """Why a kernel cannot run a problem, or why it is not preferred for it."""

    __slots__ = ()


class Unknown(str):
    """Why it is unknown here whether a kernel can run a problem: only a library on the device could tell."""

    __slots__ = ()


Check = Callable[[Any], Refusal | Unknown | None]
"""Checks a problem; returns None if the check passes."""


class Requirement:
    """A condition on a problem that a kernel requires, or prefers."""

    __slots__ = ("check",)
    check: Check

    def __init__(self, holds: Callable[[Any], bool], otherwise: str) -> None:
        """Make a requirement from a predicate and the reason if it is false, a format string with ``{p.m}`` etc."""
        self.check = lambda p: None if holds(p) else Refusal(otherwise.format(p=p))

    @classmethod
    def of(cls, check: Check) -> "Requirement":
        """Return a requirement whose check returns its own reasons."""
        made = cls.__new__(cls)
        made.check = check
        return made


def _first(requirements: tuple[Requirement, ...], problem: Any) -> Refusal | Unknown | None:
    return next((reason for r in requirements if (reason := r.check(problem)) is not None), None)


def no_estimate(_: Any) -> None:
    """Return None: the estimate of a kernel that has no cost model."""


class Choice(NamedTuple):
    """The name of a kernel in a table, and the number of one of its algorithms."""

    kernel: str
    algorithm: int = 0


class Kernel(NamedTuple):
    """A row of a table: a kernel's name, what it requires and prefers, and how it is planned."""

    name: str
    requires: tuple[Requirement, ...]
    plan: Callable[..., Any]
    """Takes a problem and, if there are several algorithms, the number of one (0 is the default). Returns a `Launch`,
    or the kind of plan that its table documents."""
    prefers: tuple[Requirement, ...] = ()
    """If one of these does not hold, the kernel can run the problem, but others were measured to be faster; `tune`
    times it."""
    algorithms: Callable[[Any], Sequence[str]] = lambda _: ("",)
    """Returns the names of the algorithms that an able kernel has for a problem; a library may offer several. A name
    identifies an algorithm across processes. The first is the default."""
    us: Callable[[Any], float | None] = no_estimate
    """Returns the estimated microseconds of an able kernel for a problem; None without a cost model."""
    compared: Callable[[Any], bool] = lambda _: True
    """Returns quickly whether ``us`` has an estimate: ``refusal`` and ``us`` may query a library for milliseconds."""
    rough: Callable[[Any], float | None] = no_estimate
    """Like ``us``, but only shown by `explain`: the place of the kernel in the table decides, not this estimate."""
    note: str = ""
    """What `explain` adds if the kernel is able: when another kernel runs instead."""

    def refusal(self, problem: Any) -> Refusal | Unknown | None:
        """Return why the kernel cannot run ``problem``, or why that is unknown; None if it can."""
        return _first(self.requires, problem)

    def reservation(self, problem: Any) -> Refusal | Unknown | None:
        """Return why the kernel is not preferred for ``problem``, though able; None if it is preferred."""
        return _first(self.prefers, problem)
