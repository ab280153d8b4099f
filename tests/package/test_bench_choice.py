"""The benchmark of the choice: its list of products, what it records, and how gains are judged; without a GPU."""

from unittest.mock import Mock

import pytest

from bench import choice
from fp8core.runtime import jit
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.blaslt_tools import H200


def test_the_list_has_enough_products_of_every_kind_in_both_halves():
    cases = choice.cases()
    assert len(cases) == len(set(cases)) >= 400
    for half in ("fit", "judge"):
        part = [case for case in cases if case.half == half]
        assert len(part) >= 150
        assert {case.mode for case in part} == set(choice.MODES)
        assert {case.m for case in part} >= {3, 33, 200, 300, 1000}
        assert len({(case.n, case.k) for case in part}) >= 12
    weights = {half: {(c.n, c.k) for c in cases if c.half == half} for half in ("fit", "judge")}
    assert not weights["fit"] & weights["judge"]
    assert max(2 * c.m * c.n * c.k for c in cases) <= choice.MOST_OPERATIONS


def test_the_order_is_the_same_everywhere():
    assert choice.number("a") == 310482890


@pytest.mark.parametrize(("mode", "m"), [("tensor", 16), ("row", 300), ("block", 1000), ("block", 1024)])
def test_a_record_has_each_candidate_with_what_is_known_of_it(stub, monkeypatch, mode, m):
    stub.tile(1, 318, 3)
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(
        choice, "times", lambda p, launches: [(1.0 + i, 2.0 + i) if i else None for i in range(len(launches))]
    )
    record = choice.measure(choice.Case(mode, m, 4096, 4096))
    case = choice.Case(mode, m, 4096, 4096)
    everything = choice.candidates(case.problem(H200))
    assert record["first"] == list(everything[0])
    assert [(row["kernel"], row["algorithm"]) for row in record["rows"]] == everything[1:]
    assert "simt" not in {kernel for kernel, _ in everything}
    libraries = [row for row in record["rows"] if row["kernel"] in ("cublaslt", "cublaslt_relayout")]
    assert all({"channels", "tokens", "split_k", "stages", "waves"} <= set(row) for row in libraries)


def test_a_gain_is_judged_by_other_times_than_it_was_found_by():
    assert choice.gain([(2.0, 2.0), (1.0, 1.0)], 0) == 1.0
    assert choice.gain([(2.0, 2.0), (1.0, 1.0)], 1) == 0.0
    assert choice.gain([(2.0, 1.0), (1.0, 2.0)], 0) == -0.25
