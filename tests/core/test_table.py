"""Tables of kernels: requirements, preferences and what nobody can tell, apart from one another."""

from typing import NamedTuple

import pytest

from fp8core.errors import UnsupportedProblemError
from fp8core.table import Choice, Kernel, Refusal, Requirement, Table, Unknown


class Problem(NamedTuple):
    m: int
    here: bool = True


EVEN = Requirement(lambda p: p.m % 2 == 0, "needs m that is even, got m={p.m}")
FEW = Requirement(lambda p: p.m <= 8, "measured slower for many rows: preferred for m <= 8; got m={p.m}")
ASKED = Requirement.of(lambda p: None if p.here else Unknown("its library cannot be asked"))


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
def test_verdicts(problem, wanted):
    assert statuses(table(), problem) == wanted


def test_a_check_returns_its_kind():
    assert EVEN.check(Problem(2)) is None
    assert isinstance(EVEN.check(Problem(3)), Refusal)
    assert EVEN.check(Problem(3)) == "needs m that is even, got m=3"
    assert isinstance(ASKED.check(Problem(3, here=False)), Unknown)


def test_candidates_are_all_that_are_able_the_default_first():
    assert table().candidates(Problem(10)) == (("library", 0), ("library", 1), ("library", 2), ("decode", 0))


def test_the_sentences():
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
