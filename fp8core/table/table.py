"""A table: the kernels of an operation, which of them runs a problem, and the plans made so far."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

from fp8core.errors import UnsupportedProblemError
from fp8core.forks import ForkSafeLock
from fp8core.table.rows import Choice, Kernel, no_estimate
from fp8core.table.verdicts import Explanation, verdict

P = TypeVar("P", bound=tuple[Any, ...])

PLANS_KEPT: Final = 8192
"""Plans that a table keeps before it drops all of them: a server meets a new m with every batch."""


class Table(Generic[P]):
    """The kernels of one operation, most preferred first, and the plans made so far."""

    def __init__(self, name: str, problem: type[P], *kernels: Kernel) -> None:
        self.name = name
        self.problem = problem
        self.kernels = kernels
        self._plans: dict[tuple[Any, ...], Any] = {}
        self._tuned: dict[P, Choice] = {}
        self._expected: dict[P, tuple[str, str]] = {}
        self._changes = 0
        """Counts the changes that may have made plans outdated. A plan is not kept if one came while it was made."""
        self._lock = ForkSafeLock()
        self.before: Callable[[P], bool] | None = None
        """Called with the problem before each choice, until it has read what was tuned in another process and returns
        true."""

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, key: tuple[Any, ...]) -> Any:
        """Return the plan of the problem with the fields ``key``; after the first call it is a dictionary lookup.

        Raises:
            UnsupportedProblemError: no kernel is able; the message has the reason of every kernel.
        """
        launch = self._plans.get(key)
        return launch if launch is not None else self._prepare(key)

    def _prepare(self, key: tuple[Any, ...]) -> Any:
        problem, changes = self.problem(*key), self._changes
        choice = self.choice(problem)
        if choice is None:
            raise UnsupportedProblemError(f"no kernel can run {self.explain(problem)}")
        launch = self.planned(problem, choice)
        with self._lock.held:
            if self._changes != changes:
                return launch
            if len(self._plans) >= PLANS_KEPT:
                self._plans.clear()
            return self._plans.setdefault(key, launch)

    def forget(self) -> None:
        """Drop all plans, because another table that they depend on has changed."""
        with self._lock.held:
            self._changes += 1
            self._plans.clear()

    def kernel(self, name: str) -> Kernel:
        """Return the row called ``name``."""
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def planned(self, problem: P, choice: Choice) -> Any:
        """Return the plan of ``problem`` by one of its `candidates`; it is not kept."""
        plan = self.kernel(choice.kernel).plan
        return plan(problem, choice.algorithm) if choice.algorithm else plan(problem)

    def choice(self, problem: P) -> Choice | None:
        """Return the choice for ``problem``: the tuned one, otherwise the first of the `ranking`; None without any."""
        tuned = self.tuned(problem)
        return tuned or next((Choice(kernel.name) for kernel in self.ranking(problem)), None)

    def tuned(self, problem: P) -> Choice | None:
        """Return the choice that was tuned for ``problem``, in this process or another one, or None."""
        if self.before is not None:
            self._read_before(problem)
        if problem in self._expected:
            with self._lock.held:  # other threads must find the problem in one of the two dictionaries
                self._look_up_expected(problem)
        return self._tuned.get(problem)

    def _read_before(self, problem: P) -> None:
        with self._lock.held:
            try:
                if self.before is not None and self.before(problem):
                    self.before = None
            except Warning:  # where warnings are errors, the next call has to go on, as it does elsewhere
                self.before = None
                raise

    def _look_up_expected(self, problem: P) -> None:
        """Replace the names that `expect` was given for ``problem`` by the candidate that has them here; else warn."""
        expected = self._expected.get(problem)
        if expected is None:
            return
        found = self.numbered(problem, *expected)
        if found is not None:
            self._tuned[problem] = found
        del self._expected[problem]
        if found is None:
            text = f"the tuned kernel is not available here, {expected[0]} algorithm {expected[1] or 0}: {problem}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)

    def candidates(self, problem: P) -> tuple[Choice, ...]:
        """Return all algorithms of all able kernels, preferred or not; the first is the choice without tuning."""
        return tuple(
            Choice(kernel.name, number)
            for kernel in self.ranking(problem)
            for number in range(len(kernel.algorithms(problem)))
        )

    def ranking(self, problem: P) -> Iterator[Kernel]:
        """Yield the able kernels: first the one that runs ``problem`` without tuning, last those not preferred.

        Preferred kernels come in the order of the table. But once the next one has an estimate, all kernels with
        estimates come next, in the order of their estimates: measurements count more than the order of the table.
        """
        estimated: list[tuple[float, Kernel]] = []
        unasked: list[Kernel] = []
        others: list[Kernel] = []
        for kernel in self.kernels:
            if estimated and (kernel.us is no_estimate or not kernel.compared(problem)):
                unasked.append(kernel)  # its requirements can take long to check, so only after the estimated ones
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
        """Return the candidate with these names of kernel and algorithm; None if it is not available here."""
        for able in self.ranking(problem):
            if able.name == kernel:
                names = list(able.algorithms(problem))
                return Choice(kernel, names.index(algorithm)) if algorithm in names else None
        return None

    def expect(self, problem: P, kernel: str, algorithm: str) -> None:
        """Choose the candidate with these names for ``problem``; it is looked up when the problem is first planned."""
        with self._lock.held:
            self._expected[problem] = kernel, algorithm
            self._tuned.pop(problem, None)
            self._drop_plan(problem)

    def prefer(self, problem: P, choice: Choice) -> None:
        """Choose one of its candidates for ``problem`` from now on, whatever the ranking.

        Raises:
            UnsupportedProblemError: ``choice`` is not a candidate.
        """
        if choice not in self.candidates(problem):
            raise UnsupportedProblemError(
                f"{choice.kernel} has no algorithm {choice.algorithm} for {self.explain(problem)}"
            )
        with self._lock.held:
            self._expected.pop(problem, None)
            self._tuned[problem] = choice
            self._drop_plan(problem)

    def _drop_plan(self, problem: P) -> None:
        """Drop the plan of a problem, also one that another thread is making; the caller has changed the choice."""
        self._changes += 1
        self._plans.pop(problem, None)

    def explain(self, problem: P) -> Explanation:
        """Return the verdicts of all kernels on ``problem``; nothing is compiled and nothing runs."""
        tuned, first = self.tuned(problem), next(self.ranking(problem), None)
        chosen = tuned or (Choice(first.name) if first is not None else None)
        verdicts = (verdict(kernel, problem, chosen, tuned is not None, first) for kernel in self.kernels)
        return Explanation(problem, tuple(verdicts))
