"""Threads that call, move and compare until a budget is spent, and stop at the first wrong number with its history."""

import json
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from soak.layers import MovingLayer, Weights
from soak.machines import Machine
from soak.works import PLACINGS, Bench, works

HISTORY = 40
PENDING = 12
"""Comparisons that may be under way on a device before one thread waits for them."""


class WrongNumber(AssertionError):
    """A result with other bytes than its answer; the text says what went before and how to run it again."""


class Budget(NamedTuple):
    """How long: so many steps a thread, and if there are ``seconds``, as many more as fit."""

    steps: int
    seconds: float = 0.0
    threads: int = 3


class Session:
    """What the threads of one soak share."""

    def __init__(self, machine: Machine, seed: int, budget: Budget) -> None:
        self.machine, self.seed, self.budget = machine, seed, budget
        self.benches = [Bench(machine, work) for work in works(large=machine.gpu)]
        self.weights = Weights(machine)
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        self.stopped = False
        """Whether the threads are to end with the step that they are at."""
        self.free_bytes: int | None = None
        """The least of the device's memory that was seen free."""
        self._lock = threading.Lock()
        self.end = time.monotonic() + budget.seconds
        machine.synchronize()

    def run(self) -> Counter[str]:
        """Run all threads and return the counts, or raise what the first of them found."""
        actors = [actor(self, number) for number in range(self.budget.threads)]
        threads = [threading.Thread(target=one.run, name=f"soak-{one.number}") for one in actors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.failures:
            raise self.failures[0]
        self.counts["threads"] += len(threads)
        if self.free_bytes is not None:
            self.counts["MiB free at least"] = self.free_bytes >> 20
        return self.counts

    def goes_on(self, step: int) -> bool:
        """Return whether a thread has more to do."""
        if self.failures or self.stopped:
            return False
        return step < self.budget.steps or time.monotonic() < self.end

    def saw(self, free_bytes: int) -> None:
        """Note how much of the device's memory is free: other processes take their part, too."""
        with self._lock:
            self.free_bytes = free_bytes if self.free_bytes is None else min(free_bytes, self.free_bytes)

    def add(self, counts: Counter[str]) -> None:
        """Add a thread's counts."""
        with self._lock:
            self.counts += counts


class Actor:
    """One thread: a generator, streams and a layer of its own; works, answers and a layer that all share."""

    def __init__(self, session: Session, number: int) -> None:
        self.session, self.machine, self.number = session, session.machine, number
        self.rng = np.random.default_rng([session.seed, number])
        self.counts: Counter[str] = Counter()
        self.history: deque[str] = deque(maxlen=HISTORY)
        self.pending: list[tuple[Any, str]] = []
        self.scenarios = [(self.work, 6), (self.layer_moved, 5), (self.churn, 2)]

    def run(self) -> None:
        """Take one step after another; whatever is raised ends all threads."""
        try:
            self.prepare()
            step = 0
            while self.session.goes_on(step):
                self.step()
                step += 1
            with self.machine.on(self.stream):
                self.settle()
        except BaseException as error:
            self.session.failures.append(self.told(error))
        self.session.add(self.counts)

    def prepare(self) -> None:
        """Make what is this thread's own."""
        self.streams = self.machine.streams(3)
        self.stream = self.streams[0]
        self.kept: list[Any] = []
        with self.machine.on(self.stream):
            self.layer = MovingLayer(self.session.weights, self.rng)

    def step(self) -> None:
        """Take one scenario, on the stream of the one before or on another."""
        if self.rng.random() < 0.2:
            after = self.streams[int(self.rng.integers(len(self.streams)))]
            self.machine.hand_over(self.stream, after)
            self.stream = after
            self.history.append("another stream")
        weights = np.array([weight for _, weight in self.scenarios], float)
        chosen = self.scenarios[int(self.rng.choice(len(weights), p=weights / weights.sum()))][0]
        self.counts[f"scenario {chosen.__name__}"] += 1
        with self.machine.on(self.stream):
            chosen()
            if len(self.pending) >= PENDING:
                self.settle()

    def compare(self, got: Any, want: Any, what: str) -> None:
        """Compare bytes where they are; what differs is found out at the latest by `settle`."""
        self.counts["checks"] += 1
        self.counts[f"checks of {what.split(maxsplit=1)[0]}"] += 1
        self.pending.append((self.machine.differing(got, want), what))

    def settle(self) -> None:
        """Wait for the comparisons under way."""
        pending, self.pending = self.pending, []
        for differing, what in pending:
            if (number := differing()) != 0:
                raise WrongNumber(f"{what}: {number} bytes are wrong")

    def work(self) -> None:
        """Call an operation on one of its inputs, into poisoned memory or new one."""
        bench = self.session.benches[int(self.rng.integers(len(self.session.benches)))]
        i, placing = int(self.rng.integers(len(bench.work.inputs))), PLACINGS[int(self.rng.integers(len(PLACINGS)))]
        said = f"{bench.work.name} of input {i}, {placing}"
        self.history.append(said)
        for got, want in zip(bench.run(i, placing), bench.answers[i, placing], strict=True):
            self.compare(got, want, said)
        self.counts["launches"] += 1

    def layer_moved(self) -> None:
        """Call the layer some times, around a change of its weight."""
        layer = self.layer
        if self.rng.random() < 0.15:
            self.history.append(layer.empty_call())
        if self.rng.random() < 0.7:
            how = layer.moved()
            self.counts[f"moved by {how}"] += 1
            self.history.append(f"{how}: weight {layer.now}")
        if self.rng.random() < 0.15:
            self.history.append(layer.empty_call())
        for _ in range(int(self.rng.integers(1, 4))):
            got, want = layer.called()
            self.history.append("layer(x)")
            self.compare(got, want, f"layer of weight {layer.now} after {layer.how}")
            self.counts["launches"] += 1

    def churn(self) -> None:
        """Take and release memory."""
        self.kept = [*self.kept[-4:], self.machine.churn(self.rng)]
        self.history.append("churn")

    def told(self, error: BaseException) -> BaseException:
        """Return the error with the seed, the thread and what it did last."""
        s = self.session
        head = f"thread {self.number} of {s.machine.name}, seed {s.seed}: {type(error).__name__}: {error}"
        options = f"--engine {s.machine.name} --seed {s.seed} --threads {s.budget.threads} --steps {s.budget.steps}"
        again = f"again: python -m tests.soak {options} --seconds {s.budget.seconds:g}"
        told = WrongNumber("\n  ".join([head, again, "its last operations:", *self.history]))
        told.__cause__ = error
        return told


def actor(session: Session, number: int) -> Actor:
    """Return the thread for a machine: on a GPU it has streams, graphs and other frameworks beside it, too."""
    if session.machine.gpu:
        from soak.gpu import GpuActor

        return GpuActor(session, number)
    from soak.mixed import HostActor

    return HostActor(session, number)


def written(report: Path | None, machine: Machine, seed: int, counts: Counter[str]) -> str:
    """Return the counts as lines, and write them as JSON if there is somewhere to."""
    if report is not None:
        known = json.loads(report.read_text()) if report.exists() else {}
        known[machine.name] = {"seed": seed, "counts": dict(sorted(counts.items()))}
        report.write_text(json.dumps(known, indent=2) + "\n")
    return "\n".join(
        [f"soak of {machine.name}, seed {seed}:", *(f"  {n:>9,} {what}" for what, n in sorted(counts.items()))]
    )
