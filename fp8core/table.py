"""Tables of kernels: what each needs, which one a problem gets, and why the others are not it."""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
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


class Choice(NamedTuple):
    """A kernel of a table by its name, and which of its ways."""

    kernel: str
    way: int = 0


class Kernel(NamedTuple):
    """A row of a table: a name, what it needs, and how it is made ready for a problem."""

    name: str
    requires: tuple[Requirement, ...]
    plan: Callable[..., Any]
    """Of a problem and, where there are several ways, the number of one; 0 is the way taken unasked. It returns a
    `Launch`, or the launches that the table speaks of."""
    ways: Callable[[Any], int] = lambda _: 1
    """In how many ways an able kernel can run a problem, as a library may offer several algorithms."""
    note: str = ""
    """What `explain` says of it where it is able: when something else runs."""

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
        lines = [_told(self.problem)]
        width = max(len(v.kernel) for v in self.verdicts)
        lines += [f"  {v.kernel:<{width}}  {v.status}{': ' + v.reason if v.reason else ''}" for v in self.verdicts]
        return "\n".join([*map(str, self.before), *lines])


def _told(value: Any) -> str:
    """Return a problem with its fields, those of problems in it, too, in as few words as they have."""
    names = getattr(value, "_fields", None)
    if names is None or "__str__" in vars(type(value)):
        return str(value)
    fields = ", ".join(f"{name}={_told(field)}" for name, field in zip(names, value, strict=True))
    return f"{type(value).__name__}({fields})"


class Table(Generic[P]):
    """The kernels of one operation, most preferred first, and the plans made so far."""

    def __init__(self, name: str, problem: type[P], *kernels: Kernel) -> None:
        self.name = name
        self.problem = problem
        self.kernels = kernels
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._preferred: dict[P, Choice] = {}

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

    def planned(self, problem: P, choice: Choice) -> Any:
        """Return ``problem`` made ready by one of its `candidates`; nothing is kept."""
        kernel = next(kernel for kernel in self.kernels if kernel.name == choice.kernel)
        return kernel.plan(problem, choice.way) if choice.way else kernel.plan(problem)

    def choice(self, problem: P) -> Choice | None:
        """Return what runs ``problem``: what was preferred for it, or else the first kernel that is able."""
        return self._preferred.get(problem) or next((Choice(kernel.name) for kernel in self._able(problem)), None)

    def candidates(self, problem: P) -> tuple[Choice, ...]:
        """Return every way of every able kernel; the first is the choice where nothing was preferred."""
        return tuple(Choice(kernel.name, way) for kernel in self._able(problem) for way in range(kernel.ways(problem)))

    def _able(self, problem: P) -> Iterator[Kernel]:
        return (kernel for kernel in self.kernels if kernel.refusal(problem) is None)

    def prefer(self, problem: P, choice: Choice) -> None:
        """Let ``problem`` be run by one of its candidates from now on, whatever the order of the kernels says.

        Raises:
            UnsupportedProblemError: ``choice`` is none of the candidates.
        """
        if choice not in self.candidates(problem):
            raise UnsupportedProblemError(f"{choice.kernel} has no way {choice.way} for {self.explain(problem)}")
        self._preferred[problem] = choice
        self._plans.pop(problem, None)

    @property
    def preferred(self) -> Mapping[P, Choice]:
        """What `prefer` was told."""
        return MappingProxyType(self._preferred)

    def explain(self, problem: P) -> Explanation:
        """Return what the table says of ``problem``; nothing is compiled and nothing runs."""
        refusals = {kernel.name: kernel.refusal(problem) for kernel in self.kernels}
        preferred = self._preferred.get(problem)
        reason = f"tuned, way {preferred.way}" if preferred is not None else ""
        first = next((name for name, refusal in refusals.items() if refusal is None), None)
        chosen = first if preferred is None else preferred.kernel

        def verdict(name: str, refusal: str | None) -> Verdict:
            if refusal is not None:
                return Verdict(name, "not able", refusal)
            note = next(kernel.note for kernel in self.kernels if kernel.name == name)
            said = "; ".join(filter(None, (reason, note)))
            return Verdict(name, "chosen", said) if name == chosen else Verdict(name, "also able", note)

        return Explanation(problem, tuple(verdict(name, refusal) for name, refusal in refusals.items()))
