"""Tables of kernels: what each needs, which one a problem gets, and why the others are not it."""

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from fp8core.errors import UnsupportedProblemError

Launch = Callable[..., None]
P = TypeVar("P", bound=tuple[Any, ...])

PLANS_KEPT = 8192
"""A server meets a new m with every batch: past this many plans a table starts anew."""


class Requirement(NamedTuple):
    """A predicate over problems and the refusal that it gives; ``{p.m}`` and the like are filled in."""

    holds: Callable[[Any], bool]
    otherwise: str


class Kernel(NamedTuple):
    """A row of a table: a name, what it needs, and how it is made ready for a problem."""

    name: str
    requires: tuple[Requirement, ...]
    plan: Callable[[Any], Launch]

    def refusal(self, problem: Any) -> str | None:
        """Return why the kernel cannot run ``problem``, or None when it can."""
        return next((r.otherwise.format(p=problem) for r in self.requires if not r.holds(problem)), None)


class Verdict(NamedTuple):
    """What a table says of one kernel for one problem."""

    kernel: str
    status: Literal["chosen", "also able", "not able"]
    reason: str


class Explanation(NamedTuple):
    """A problem, and every kernel of its table in the order of preference."""

    problem: Any
    verdicts: tuple[Verdict, ...]
    before: tuple["Explanation", ...] = ()
    """What the call asks other tables first, as a linear layer quantizes its input."""

    @property
    def chosen(self) -> str | None:
        """The name of the kernel that runs the problem, or None when none can."""
        return next((v.kernel for v in self.verdicts if v.status == "chosen"), None)

    def __str__(self) -> str:
        fields = ", ".join(f"{name}={value!s}" for name, value in zip(self.problem._fields, self.problem, strict=True))
        lines = [f"{type(self.problem).__name__}({fields})"]
        width = max(len(v.kernel) for v in self.verdicts)
        lines += [f"  {v.kernel:<{width}}  {v.status}{': ' + v.reason if v.reason else ''}" for v in self.verdicts]
        return "\n".join([*map(str, self.before), *lines])


class Table(Generic[P]):
    """The kernels of one operation, most preferred first, and the plans made so far."""

    def __init__(self, name: str, problem: type[P], *kernels: Kernel) -> None:
        self.name = name
        self.problem = problem
        self.kernels = kernels
        self._plans: dict[tuple[Any, ...], Launch] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, key: tuple[Any, ...]) -> Launch:
        """Return what runs the problem with the fields ``key``: a dictionary hit after the first time.

        Raises:
            UnsupportedProblemError: no kernel is able; the message holds every kernel's reason.
        """
        launch = self._plans.get(key)
        return launch if launch is not None else self._prepare(key)

    def _prepare(self, key: tuple[Any, ...]) -> Launch:
        problem = self.problem(*key)
        chosen = next((kernel for kernel in self.kernels if kernel.refusal(problem) is None), None)
        if chosen is None:
            raise UnsupportedProblemError(f"no kernel can run {self.explain(problem)}")
        launch = chosen.plan(problem)
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        return self._plans.setdefault(key, launch)

    def explain(self, problem: P) -> Explanation:
        """Return what the table says of ``problem``; nothing is compiled and nothing runs."""
        verdicts: list[Verdict] = []
        chosen = False
        for kernel in self.kernels:
            refusal = kernel.refusal(problem)
            if refusal is not None:
                verdicts.append(Verdict(kernel.name, "not able", refusal))
            else:
                verdicts.append(Verdict(kernel.name, "also able" if chosen else "chosen", ""))
                chosen = True
        return Explanation(problem, tuple(verdicts))
