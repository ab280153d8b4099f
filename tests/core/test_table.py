"""Tables of kernels: requirements, preferences and what nobody can tell, apart from one another."""

import itertools
import os
import subprocess
import sys
import textwrap
from threading import Thread
from typing import NamedTuple

import numpy as np
import pytest

import fp8core
from fp8core.errors import UnsupportedProblemError
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.kernels.moe import MOE_PERMUTE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.table import COLUMNS, Choice, Kernel, Refusal, Requirement, Table, Unknown
from fp8core.target import HOST
from support import problems
from support.targets import TARGETS
from support.threads import in_time


class Problem(NamedTuple):
    m: int
    here: bool = True


EVEN = Requirement(lambda p: p.m % 2 == 0, "needs m that is even, got m={p.m}")
FEW = Requirement(lambda p: p.m <= 8, "measured slower for many rows: preferred for m <= 8; got m={p.m}")
ASKED = Requirement.of(lambda p: None if p.here else Unknown("its library cannot be queried"))


def table():
    return Table(
        "table",
        Problem,
        Kernel("decode", (EVEN,), lambda p: ("decode", p), (FEW,)),
        Kernel("library", (ASKED,), lambda p, number=0: ("library", p, number), algorithms=lambda p: ("x", "y", "z")),
        Kernel("odd", (Requirement(lambda p: p.m % 2 == 1, "needs odd m, got {p.m}"),), lambda p: ("odd", p), (FEW,)),
    )


def statuses(t, problem):
    return [v.status for v in t.explain(problem).verdicts]


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (Problem(4), ["chosen", "able", "unable"]),
        (Problem(4, here=False), ["chosen", "unknown", "unable"]),
        (Problem(10), ["not preferred", "chosen", "unable"]),
        (Problem(10, here=False), ["chosen", "unknown", "unable"]),  # none is preferred: the first that is able
        (Problem(11), ["unable", "chosen", "not preferred"]),
        (Problem(11, here=False), ["unable", "unknown", "chosen"]),
    ],
)
def test_each_row_has_the_verdict_of_its_requirements(problem, wanted):
    assert statuses(table(), problem) == wanted


def test_a_check_returns_its_kind():
    assert EVEN.check(Problem(2)) is None
    assert isinstance(EVEN.check(Problem(3)), Refusal)
    assert EVEN.check(Problem(3)) == "needs m that is even, got m=3"
    assert isinstance(ASKED.check(Problem(3, here=False)), Unknown)


@pytest.mark.parametrize(
    ("table", "some"),
    [
        (SCALED_MM, problems.scaled_mm),
        (SCALED_MM, problems.unaligned),
        (GROUPED_MM, problems.grouped_mm),
        (LINEAR, problems.linear),
        (QUANTIZE, problems.quantize),
        (NORM_QUANTIZE, problems.norm_quantize),
        (SILU_QUANTIZE, problems.silu_quantize),
        (MOE_PERMUTE, problems.moe_permute),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_a_kernel_needs_is_said_with_what_it_got(table, some):
    for target in (*TARGETS, HOST):
        for problem, kernel in itertools.product(some(target), table.kernels):
            reason = kernel.refusal(problem) or kernel.reservation(problem) or ""
            assert "needs " not in reason or ", got " in reason, kernel.name


def test_candidates_are_all_that_are_able_the_default_first():
    assert table().candidates(Problem(10)) == (("library", 0), ("library", 1), ("library", 2), ("decode", 0))


def test_an_explanation_has_the_reason_of_each_row():
    text = str(table().explain(Problem(10)))
    assert "decode   able but not preferred: measured slower for many rows: preferred for m <= 8; got m=10" in text
    assert "library  chosen\n" in text
    assert "odd      unable: needs odd m, got 10" in text


def test_what_was_measured_wins_over_a_preference():
    t = table()
    assert t.plan(Problem(10)) == ("library", Problem(10), 0)
    t.prefer(Problem(10), Choice("decode"))
    assert t.plan(Problem(10)) == ("decode", Problem(10))
    assert statuses(t, Problem(10)) == ["chosen", "able", "unable"]
    assert t.explain(Problem(10)).verdicts[0].reason == "tuned, algorithm 0"
    with pytest.raises(UnsupportedProblemError, match="odd has no algorithm 0"):
        t.prefer(Problem(10), Choice("odd"))
    t.prefer(Problem(10), Choice("library", 2))
    assert t.plan(Problem(10)) == ("library", Problem(10), 2)


def test_nothing_able_names_every_reason():
    t = Table("table", Problem, table().kernels[0])
    with pytest.raises(UnsupportedProblemError, match="unable: needs m that is even, got m=3"):
        t.plan(Problem(3))


def estimated():
    """A table in which two rows of three know how long they take, beside one that is not preferred for many rows."""
    return Table(
        "table",
        Problem,
        Kernel("decode", (), lambda p: "decode", (FEW,)),
        Kernel("own", (EVEN,), lambda p: "own", us=lambda p: 2.0 * p.m),
        Kernel("plain", (), lambda p: "plain"),
        Kernel("library", (ASKED,), lambda p: "library", us=lambda p: 20.0 + p.m if p.m < 100 else None),
    )


@pytest.mark.parametrize(
    ("problem", "order"),
    [
        (Problem(4), ["decode", "own", "library", "plain"]),  # the first one has no estimate, and comes first
        (Problem(10), ["own", "library", "plain", "decode"]),
        (Problem(20), ["own", "library", "plain", "decode"]),  # of equals the first
        (Problem(30), ["library", "own", "plain", "decode"]),
        (Problem(30, here=False), ["own", "plain", "decode"]),
        (Problem(31), ["plain", "library", "decode"]),
        (Problem(100), ["own", "plain", "library", "decode"]),
    ],
)
def test_of_those_that_have_an_estimate_the_least_is_chosen(problem, order):
    assert [kernel.name for kernel in estimated().ranking(problem)] == order
    assert [choice.kernel for choice in estimated().candidates(problem)] == order
    assert estimated().choice(problem) == (order[0], 0)
    assert estimated().explain(problem).chosen == order[0]


def test_a_row_is_not_asked_where_it_is_not_compared():
    """What a library says takes long: a row that has no estimate for a problem says so first."""
    asked = []
    slow = Requirement.of(lambda p: asked.append(p.m))
    t = Table(
        "table",
        Problem,
        Kernel("own", (), lambda p: "own", us=lambda p: 2.0 * p.m),
        Kernel(
            "library", (slow,), lambda p: "library", us=lambda p: 10.0 if p.m > 8 else None, compared=lambda p: p.m > 8
        ),
    )
    assert next(t.ranking(Problem(4))).name == "own"
    assert asked == []
    assert next(t.ranking(Problem(9))).name == "library"
    assert asked == [9]


def test_estimates_are_told():
    told = {v.kernel: str(v) for v in estimated().explain(Problem(30)).verdicts}
    assert told == {
        "decode": "able but not preferred: measured slower for many rows: preferred for m <= 8; got m=30",
        "own": "able but not preferred: estimated 60.0 us, library 50.0 us",
        "plain": "able",
        "library": "chosen: estimated 50.0 us",
    }
    assert str(estimated().explain(Problem(4)).verdicts[1]) == "able: estimated 8.0 us"
    t = estimated()
    t.prefer(Problem(30), Choice("plain"))
    told = {v.kernel: str(v) for v in t.explain(Problem(30)).verdicts}
    assert told["plain"] == "chosen: tuned, algorithm 0"
    assert told["library"] == "able: estimated 50.0 us"


def test_what_is_expected_is_looked_for_when_the_problem_is_met():
    t, asked = table(), []
    t.before = lambda problem: not asked.append("before")
    t.expect(Problem(10), "library", "z")
    t.expect(Problem(12), "library", "gone")
    t.expect(Problem(11), "decode", "")
    assert t.plan(Problem(10)) == ("library", Problem(10), 2)
    for problem in (Problem(12), Problem(11)):
        with pytest.warns(RuntimeWarning, match="the tuned kernel is not available here"):
            assert t.choice(problem) == ("library", 0)
        assert t.choice(problem) == ("library", 0)
    assert asked == ["before"]
    t.prefer(Problem(10), Choice("decode"))
    t.expect(Problem(10), "library", "y")  # what comes last counts
    assert t.plan(Problem(10)) == ("library", Problem(10), 1)


class Interrupted:
    """A table of two kernels; another thread changes something while the first one is planned or asked, but once."""

    def __init__(self):
        self.change = lambda: None
        self.made = "old"
        slow = Kernel("slow", (), lambda p: (self.made, self.once())[0], algorithms=lambda p: ("", self.once())[:1])
        self.table = Table("table", Problem, slow, Kernel("other", (), lambda p: "other"))

    def once(self):
        change, self.change = self.change, lambda: None
        change()


@pytest.mark.parametrize("change", ["prefer", "expect", "forget"])
def test_a_plan_is_not_kept_if_the_choice_changed_while_it_was_made(change):
    """Compiling takes seconds: another thread may tune the problem meanwhile, or another table that the plan needs."""
    of = Interrupted()
    changes = {
        "prefer": lambda: of.table.prefer(Problem(2), Choice("other")),
        "expect": lambda: of.table.expect(Problem(2), "other", ""),
        "forget": lambda: (setattr(of, "made", "new"), of.table.forget()),
    }
    of.change = lambda: in_time(changes[change])
    assert of.table.plan(Problem(2)) == "old"
    wanted = "new" if change == "forget" else "other"
    assert of.table.plan(Problem(2)) == of.table.plan(Problem(2)) == wanted
    assert len(of.table) == 1


def test_a_tuning_wins_over_a_file_that_is_looked_up_meanwhile():
    of = Interrupted()
    tunes = Thread(target=lambda: of.table.prefer(Problem(2), Choice("other")))
    of.table.expect(Problem(2), "slow", "")
    of.change = lambda: (tunes.start(), tunes.join(0.2))
    assert of.table.choice(Problem(2)) == ("slow", 0)
    tunes.join(30)
    assert of.table.choice(Problem(2)) == ("other", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize(
    ("held", "taken"),
    [
        ("QUANTIZE._lock.held", "QUANTIZE.before = lambda problem: True; QUANTIZE.tuned(None)"),
        ("WATCHED.lock.held", "WATCHED.lock.held.acquire()"),
    ],
)
def test_a_child_is_not_kept_by_a_thread_of_its_parent(held, taken):
    program = f"""
        import os, threading, warnings
        from fp8core.core.prefetch import WATCHED
        from fp8core.kernels.quantize.table import QUANTIZE
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        holds, end = threading.Event(), threading.Event()
        def hold():
            with {held}:
                holds.set()
                end.wait()
        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait()
        child = os.fork()
        if child == 0:
            {taken}
            os._exit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        end.set()
        thread.join()
    """
    line = (sys.executable, "-c", textwrap.dedent(program))
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "7\n", "")


def test_the_problems_of_an_explanation_are_told_once_and_in_lines_that_a_terminal_holds():
    layer = fp8core.Fp8Linear.from_weight(np.ones((64, 128), np.float32))
    text = str(fp8core.explain(layer, np.ones((2, 128), np.float32)))
    assert text.count("ScaledMm(target=") == text.count("Quantize(target=") == 1
    assert "Linear(quantize=Quantize(…), product=ScaledMm(…), " in text
    assert "bias=none, " in text
    assert max(len(line) for line in text.splitlines() if "unable" not in line) <= COLUMNS
