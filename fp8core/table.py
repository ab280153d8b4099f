"""Tables of kernels: what each needs, which one a problem gets, and why the others are not it."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from fp8core.errors import UnsupportedProblemError

Launch = Callable[..., None]
P = TypeVar("P", bound=tuple[Any, ...])

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
    algorithms: Callable[[Any], int] = lambda _: 1
    """How many algorithms an able kernel has for a problem, as a library may offer several."""
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
    """"chosen", "able", "not preferred" (able, and measured to be slower than another), "unable" or "unknown"."""
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


def _with_fields(value: Any) -> str:
    """Return a problem with its fields, those of problems in it, too, as short as their own strings are."""
    names = getattr(value, "_fields", None)
    if names is None or "__str__" in vars(type(value)):
        return str(value)
    fields = ", ".join(f"{name}={_with_fields(field)}" for name, field in zip(names, value, strict=True))
    return f"{type(value).__name__}({fields})"


class Table(Generic[P]):
    """The kernels of one operation, most preferred first, and the plans made so far."""

    def __init__(self, name: str, problem: type[P], *kernels: Kernel) -> None:
        self.name = name
        self.problem = problem
        self.kernels = kernels
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._tuned: dict[P, Choice] = {}

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
        """Return what runs ``problem``: what was tuned for it, else the first kernel that is able and preferred.

        Where none is preferred it is the first that is able.
        """
        return self._tuned.get(problem) or next((Choice(kernel.name) for kernel in self._able(problem)), None)

    def candidates(self, problem: P) -> tuple[Choice, ...]:
        """Return every algorithm of every able kernel, preferred or not; the first is the choice without tuning."""
        return tuple(Choice(k.name, number) for k in self._able(problem) for number in range(k.algorithms(problem)))

    def _able(self, problem: P) -> Iterator[Kernel]:
        """Give the able kernels in their order, those that are not preferred last."""
        others = []
        for kernel in self.kernels:
            if kernel.refusal(problem) is not None:
                continue
            if kernel.reservation(problem) is None:
                yield kernel
            else:
                others.append(kernel)
        yield from others

    def prefer(self, problem: P, choice: Choice) -> None:
        """Let ``problem`` be run by one of its candidates from now on, whatever the order of the kernels says.

        Raises:
            UnsupportedProblemError: ``choice`` is none of the candidates.
        """
        if choice not in self.candidates(problem):
            raise UnsupportedProblemError(
                f"{choice.kernel} has no algorithm {choice.algorithm} for {self.explain(problem)}"
            )
        self._tuned[problem] = choice
        self._plans.pop(problem, None)

    @property
    def preferred(self) -> Mapping[P, Choice]:
        """The choices made by `prefer`."""
        return MappingProxyType(self._tuned)

    def explain(self, problem: P) -> Explanation:
        """Return what the table says of ``problem``; nothing is compiled and nothing runs."""
        choice, tuned = self.choice(problem), self._tuned.get(problem)

        def verdict(kernel: Kernel) -> Verdict:
            refusal = kernel.refusal(problem)
            if refusal is not None:
                return Verdict(kernel.name, "unknown" if isinstance(refusal, Unknown) else "unable", refusal)
            if choice is not None and kernel.name == choice.kernel:
                said = f"tuned, algorithm {tuned.algorithm}" if tuned else ""
                return Verdict(kernel.name, "chosen", "; ".join(filter(None, (said, kernel.note))))
            reservation = kernel.reservation(problem)
            if reservation is not None:
                return Verdict(kernel.name, "not preferred", reservation)
            return Verdict(kernel.name, "able", kernel.note)

        return Explanation(problem, tuple(verdict(kernel) for kernel in self.kernels))
