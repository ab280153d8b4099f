"""Tables of kernels: what each needs, which one a problem gets, and why the others are not it."""

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from textwrap import fill
from threading import RLock
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from fp8core.errors import UnsupportedProblemError

Launch = Callable[..., None]
P = TypeVar("P", bound=tuple[Any, ...])

COLUMNS = 100
"""How wide the text of an explanation's problem is."""
PLANS_KEPT = 8192
"""A server meets a new m with every batch: past this many plans a table starts anew."""


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


Status = Literal["chosen", "able", "not preferred", "unable", "unknown"]


class Verdict(NamedTuple):
    """What a table says of one kernel for one problem.

    Examples:
        >>> import numpy as np, fp8core
        >>> verdict = fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32)).verdicts[0]
        >>> verdict.kernel, verdict.status
        ('host', 'chosen')
    """

    kernel: str
    status: Status
    """"chosen", "able", "not preferred" (able, and measured or estimated to be slower than another), "unable" or
    "unknown"."""
    reason: str
    """Why; empty where there is nothing to say."""

    def __str__(self) -> str:
        status = "able but not preferred" if self.status == "not preferred" else self.status
        return f"{status}{': ' + self.reason if self.reason else ''}"


class Explanation(NamedTuple):
    """A problem, and every kernel of its table in the order of preference.

    Examples:
        >>> import numpy as np, fp8core
        >>> told = fp8core.explain(fp8core.quantize, np.ones((2, 32), np.float32))
        >>> told.chosen, told.short
        ('host', 'Quantize: host')
        >>> print(told)  # doctest: +ELLIPSIS
        Quantize(target=host, x=float32, ...
          host               chosen
          rowwise            unable: ...
    """

    problem: Any
    verdicts: tuple[Verdict, ...]
    before: tuple["Explanation", ...] = ()
    """The explanations of what the call runs first, as a linear layer quantizes its input."""

    @property
    def chosen(self) -> str | None:
        """The name of the kernel that runs the problem, or None when none can."""
        return next((v.kernel for v in self.verdicts if v.status == "chosen"), None)

    @property
    def short(self) -> str:
        """What runs in each step, in a line: the problem and the kernel, or "none"."""
        steps = (*self.before, self)
        return ", ".join(f"{type(step.problem).__name__}: {step.chosen or 'none'}" for step in steps)

    def __str__(self) -> str:
        width = max(len(v.kernel) for v in self.verdicts)
        lines = [f"  {v.kernel:<{width}}  {v}" for v in self.verdicts]
        return "\n".join([*map(str, self.before), _with_fields(self.problem), *lines])


def _with_fields(problem: Any) -> str:
    """Return a problem with its fields, in lines that a terminal shows whole."""
    fields = ", ".join(f"{name}={_field(value)}" for name, value in problem._asdict().items())
    text = f"{type(problem).__name__}({fields})"
    return fill(text, COLUMNS, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _field(value: Any) -> str:
    """Return a field as text; of a problem in a problem its name, as its own explanation comes before."""
    if hasattr(value, "target"):
        return f"{type(value).__name__}(…)"
    return str(value) or "none"


class Table(Generic[P]):
    """The kernels of one operation, most preferred first, and the plans made so far."""

    def __init__(self, name: str, problem: type[P], *kernels: Kernel) -> None:
        self.name = name
        self.problem = problem
        self.kernels = kernels
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._tuned: dict[P, Choice] = {}
        self._expected: dict[P, tuple[str, str]] = {}
        self._lock = RLock()
        self.before: Callable[[], object] | None = None
        """Called once, before anything is chosen: what was tuned in another process may be read then."""
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        """Begin with a free lock in the child of a fork, where no thread is left that could release the parent's."""
        self._lock = RLock()

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, key: tuple[Any, ...]) -> Any:
        """Return what runs the problem with the fields ``key``: a dictionary hit after the first time.

        Raises:
            UnsupportedProblemError: no kernel is able; the message holds every kernel's reason.
        """
        launch = self._plans.get(key)
        return launch if launch is not None else self._prepare(key)

    def _prepare(self, key: tuple[Any, ...]) -> Any:
        problem = self.problem(*key)
        choice = self.choice(problem)
        if choice is None:
            raise UnsupportedProblemError(f"no kernel can run {self.explain(problem)}")
        launch = self.planned(problem, choice)
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        return self._plans.setdefault(key, launch)

    def forget(self) -> None:
        """Let every plan be made anew, as what it asked of another table has changed."""
        self._plans.clear()

    def kernel(self, name: str) -> Kernel:
        """Return the row of a name."""
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def planned(self, problem: P, choice: Choice) -> Any:
        """Return ``problem`` made ready by one of its `candidates`; nothing is kept."""
        plan = self.kernel(choice.kernel).plan
        return plan(problem, choice.algorithm) if choice.algorithm else plan(problem)

    def choice(self, problem: P) -> Choice | None:
        """Return what runs ``problem``: what was tuned for it, else the first of the `ranking`; None without any."""
        tuned = self.tuned(problem)
        return tuned or next((Choice(kernel.name) for kernel in self.ranking(problem)), None)

    def tuned(self, problem: P) -> Choice | None:
        """Return what was tuned for ``problem``, in this process or in another one, or None."""
        if self.before is not None:
            with self._lock:
                if self.before is not None:
                    self.before()
                    self.before = None
        if problem in self._expected:
            with self._lock:  # or another thread would find neither what is expected nor what came of it
                self._meet(problem)
        return self._tuned.get(problem)

    def _meet(self, problem: P) -> None:
        expected = self._expected.get(problem)
        if expected is None:
            return
        found = self.numbered(problem, *expected)
        if found is not None:
            self._tuned[problem] = found
        del self._expected[problem]
        if found is None:
            text = f"what was tuned is not offered here, {expected[0]} algorithm {expected[1] or 0}: {problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def candidates(self, problem: P) -> tuple[Choice, ...]:
        """Return every algorithm of every able kernel, preferred or not; the first is the choice without tuning."""
        return tuple(
            Choice(kernel.name, number)
            for kernel in self.ranking(problem)
            for number in range(len(kernel.algorithms(problem)))
        )

    def ranking(self, problem: P) -> Iterator[Kernel]:
        """Give the able kernels, the one that runs ``problem`` without tuning first, those that are not preferred last.

        Preferred ones come in the order of the table. But where the next one has an estimate, all that have one come in
        the order of their estimates: what is measured counts more than the order.
        """
        estimated: list[tuple[float, Kernel]] = []
        unasked: list[Kernel] = []
        others: list[Kernel] = []
        for kernel in self.kernels:
            if estimated and kernel.us is no_estimate:
                unasked.append(kernel)  # what it needs is not looked at before anybody wants to know: it can take long
                continue
            if kernel.refusal(problem) is not None:
                continue
            if kernel.reservation(problem) is not None:
                others.append(kernel)
                continue
            us = kernel.us(problem)
            if us is not None:
                estimated.append((us, kernel))
            elif estimated:
                unasked.append(kernel)
            else:
                yield kernel
        yield from (kernel for _, kernel in sorted(estimated, key=lambda pair: pair[0]))
        for kernel in unasked:
            if kernel.refusal(problem) is None:
                if kernel.reservation(problem) is None:
                    yield kernel
                else:
                    others.append(kernel)
        yield from others

    def numbered(self, problem: P, kernel: str, algorithm: str) -> Choice | None:
        """Return the candidate of these names, or None if there is no such one here and now."""
        for able in self.ranking(problem):
            if able.name == kernel:
                names = list(able.algorithms(problem))
                return Choice(kernel, names.index(algorithm)) if algorithm in names else None
        return None

    def expect(self, problem: P, kernel: str, algorithm: str) -> None:
        """Let ``problem`` be run by the candidate of these names: it is looked for when the problem is first met."""
        self._expected[problem] = kernel, algorithm
        self._tuned.pop(problem, None)
        self._plans.pop(problem, None)

    def prefer(self, problem: P, choice: Choice) -> None:
        """Let ``problem`` be run by one of its candidates from now on, whatever the order of the kernels says.

        Raises:
            UnsupportedProblemError: ``choice`` is none of the candidates.
        """
        if choice not in self.candidates(problem):
            raise UnsupportedProblemError(
                f"{choice.kernel} has no algorithm {choice.algorithm} for {self.explain(problem)}"
            )
        self._expected.pop(problem, None)
        self._tuned[problem] = choice
        self._plans.pop(problem, None)

    def explain(self, problem: P) -> Explanation:
        """Return what the table says of ``problem``; nothing is compiled and nothing runs."""
        tuned, first = self.tuned(problem), next(self.ranking(problem), None)
        choice = tuned or (Choice(first.name) if first is not None else None)
        least = first.us(problem) if first is not None else None

        def verdict(kernel: Kernel) -> Verdict:
            refusal = kernel.refusal(problem)
            if refusal is not None:
                return Verdict(kernel.name, "unknown" if isinstance(refusal, Unknown) else "unable", refusal)
            us = kernel.us(problem)
            word, shown = ("estimated", us) if us is not None else ("roughly", kernel.rough(problem))
            estimate = "" if shown is None else f"{word} {shown:.1f} us"
            if choice is not None and kernel.name == choice.kernel:
                said = f"tuned, algorithm {tuned.algorithm}" if tuned else estimate
                return Verdict(kernel.name, "chosen", "; ".join(filter(None, (said, kernel.note))))
            reservation = kernel.reservation(problem)
            if reservation is not None:
                return Verdict(kernel.name, "not preferred", "; ".join(filter(None, (estimate, reservation))))
            if first is not None and least is not None and us is not None and kernel is not first:
                return Verdict(kernel.name, "not preferred", f"{estimate}, {first.name} {least:.1f} us")
            return Verdict(kernel.name, "able", "; ".join(filter(None, (estimate, kernel.note))))

        return Explanation(problem, tuple(verdict(kernel) for kernel in self.kernels))
