"""The benchmark of the choice: its lists of products, what it records, and how gains are judged; without a GPU."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

pytest.importorskip("torch")

from bench import choice, decode
from bench.algorithms import described
from bench.choice_cases import BLIND, DRAWN, MODES, MOST_OPERATIONS, Case, cases, number
from bench.choice_records import CLOSE, gain, gains, is_of_today, report
from bench.subjects import SUBJECTS
from fp8core import timing
from fp8core.kernels.gemm.blaslt.ordering import Config
from fp8core.ops.explain import explain_product
from fp8core.runtime import jit
from fp8core.table import Choice
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.targets import H200

JUDGED = ("models", *(name for name in DRAWN if name != "narrow"))
"""The lists by which the choice among all kernels is fitted and judged."""


@pytest.mark.parametrize("which", JUDGED)
def test_a_list_has_enough_products_of_every_kind_in_both_halves(which):
    found = cases(which)
    assert len(found) == len(set(found)) >= 400
    for half in ("fit", "judge"):
        part = [case for case in found if case.half == half]
        assert len(part) >= (150 if which == "models" else 200)
        assert {case.mode for case in part} == set(MODES)
        assert len([case for case in part if case.m % 4]) >= 15
        assert len({(case.n, case.k) for case in part}) >= 12
    weights = {half: {(c.n, c.k) for c in found if c.half == half} for half in ("fit", "judge")}
    assert not weights["fit"] & weights["judge"]
    assert max(2 * c.m * c.n * c.k for c in found) <= MOST_OPERATIONS


def test_lists_share_no_weight():
    models, *drawn = ({(case.n, case.k) for case in cases(which)} for which in JUDGED)
    for number_, weights in enumerate(drawn):
        assert not weights & set.union(models, *drawn[:number_])
        assert any(n % 8 for n, _ in weights)
        assert any(k % 128 for _, k in weights)


def test_a_problem_is_that_of_the_call():
    for case in (*cases("odd")[::7], *cases()[::50], Case("row", 1, 4096, 4096), Case("row", 3, 515, 8193)):
        scale_a, scale_b = MODES[case.mode]
        told = explain_product(case.m, case.n, case.k, scale_a=scale_a, scale_b=scale_b, target=H200)
        assert case.problem(H200) == told.problem._replace(prefetch_weight=True)


def test_large_products_are_those_of_the_benchmark_that_take_long():
    found = cases("large")
    asked = {key: SUBJECTS[key].arguments for key in ("products", "models")}
    shapes = {shape for arguments in asked.values() for shape in arguments if "x" in shape}
    assert {f"{case.n}x{case.k}" for case in found} == shapes
    assert {case.m for case in found} == {384, 1024, 4096}
    assert {(case.n, case.k) for case in found} <= {(case.n, case.k) for case in cases("models")}


def test_products_of_a_blind_half_are_never_named(capsys):
    rows = [{"kernel": "a", "algorithm": 0, "us": [1.0, 1.0]}]
    blind, other = (
        {"list": BLIND[-1], "half": half, "mode": "row", "m": 7, "n": n, "k": 16, "first": ["a", 0], "rows": rows}
        for half, n in (("judge", 111), ("fit", 222))
    )
    report([(blind, 0.9), (blind, 0.8), (other, 0.7)])
    said = capsys.readouterr().out
    assert "judge    row: 2 products, median 85.0%, 90 % 90.0%, worst 90.0%" in said
    assert "7x222x16" in said
    assert "111" not in said


def test_the_order_is_the_same_everywhere():
    assert number("a") == 310482890
    assert cases("fresh")[:2] == [Case("row", 9470, 3584, 12544), Case("row", 24, 4992, 6912)]
    assert cases("fresh", ["row"]) == [case for case in cases("fresh") if case.mode == "row"]


def samples(p, launches, how):
    """Times of each launch but the first, in as many turns as asked for."""
    return [[], *([1.0 + i, 2.0 + i] * (how.turns // 2) for i in range(1, len(launches)))]


@pytest.mark.parametrize(("mode", "m"), [("tensor", 16), ("row", 300), ("block", 1000), ("block", 1024)])
def test_a_record_has_each_candidate_with_what_is_known_of_it(stub, monkeypatch, mode, m):
    stub.tile(1, 318, 3)
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(timing, "samples", samples)
    case = Case(mode, m, 4096, 4096)
    record = choice.measure(case, choice.SAMPLING, more=False)
    everything = choice.candidates(case.problem(H200))
    assert record["first"] == list(everything[0])
    assert [(row["kernel"], row["algorithm"]) for row in record["rows"]] == everything[1:]
    assert [kernel for kernel, _ in record["far"]] == [everything[0].kernel]
    assert [row["us"] for row in record["rows"]] == [[1.0 + i, 2.0 + i] for i in range(1, len(everything))]
    assert all(row["tuned"] for row in record["rows"])
    libraries = [row for row in record["rows"] if row["kernel"] in ("cublaslt", "cublaslt_relayout")]
    assert all({*Config._fields, "waves", "workspace"} <= set(row) for row in libraries)
    assert all("x" in row["name"] for row in record["rows"] if row["kernel"] == "sm90_tiled")


@pytest.mark.parametrize(("turns", "want"), [(2, 2), (4, 2), (8, 4)])
def test_a_product_that_takes_long_has_half_the_turns_but_both_times(stub, monkeypatch, turns, want):
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    asked = []
    monkeypatch.setattr(
        timing, "samples", lambda p, launches, how: asked.append(how.turns) or samples(p, launches, how)
    )
    case = Case("block", 4096, 36864, 7168)
    assert case.operations > choice.LARGE
    rows = choice.measure(case, choice.SAMPLING._replace(turns=turns), more=False)["rows"]
    assert asked == [want]
    assert rows
    assert all(len(row["us"]) == choice.TIMES for row in rows)


@pytest.mark.parametrize(("mode", "m"), [("tensor", 16), ("row", 300), ("block", 1024)])
def test_products_beside_others_are_recorded_by_the_names_of_the_choice(stub, monkeypatch, mode, m):
    """So that a time of `python -m bench products` is compared to the estimates."""
    stub.tile(1, 318, 3)
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(timing, "samples", lambda p, launches, how: [[1.0, 2.0]] * len(launches))
    monkeypatch.setattr(decode.device, "target", lambda _: H200)
    known = choice.measure(Case(mode, m, 4096, 4096), choice.SAMPLING, more=False)["rows"]
    problem = decode.Case(mode, m, 4096, 4096).problem()
    own = decode.rows(problem)
    assert len(own) >= 2
    for kernel in own.values():
        ran = described(problem, Choice(kernel.name))
        [same] = [row for row in known if (row["kernel"], row["algorithm"]) == (kernel.name, 0)]
        assert same.items() >= ran.items()
        assert ("tokens" in ran) == kernel.name.startswith("cublaslt")
        assert "x" in ran["name"] or kernel.name != "sm90_tiled"


def test_a_wide_record_has_more_than_tune_times_and_says_so(stub, monkeypatch):
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(timing, "samples", samples)
    case = Case("block", 97, 512, 1024)
    few, more = (choice.measure(case, choice.SAMPLING, more=wide) for wide in (False, True))
    names = [{(row["kernel"], row["name"]) for row in record["rows"]} for record in (few, more)]
    assert names[0] < names[1]
    assert {(row["kernel"], row["name"]) for row in more["rows"] if row["tuned"]} == names[0]
    assert few["first"] == more["first"]


def test_some_kernels_alone_are_timed_and_not_judged(stub, monkeypatch):
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(timing, "samples", samples)
    case = Case("block", 64, 512, 1024)
    record = choice.measure(case, choice.SAMPLING, more=False, only=("sm90_tiled", "sm90_decode"))
    assert {row["kernel"] for row in record["rows"]} | {kernel for kernel, _ in record["far"]} == set(record["only"])
    assert list(gains([record])) == []
    assert choice.candidates(Case("block", 63, 512, 1024).problem(H200), ("cublaslt",)) == []  # 4 does not divide it


@pytest.mark.parametrize(
    ("asked", "times"),
    [
        ("--list second --half judge --skip 56 --count 2 --wide --turns 6", 6),
        ("--list border --kernels sm90_decode sm90_tiled --count 2", choice.SAMPLING.turns),
        ("--list odd --count 3 --turns 4", 4),
        ("--list large --count 2 --turns 4 --stretch 60.0", 4),
    ],
)
def test_a_run_writes_its_machine_its_products_and_its_end(stub, monkeypatch, tmp_path, asked, times):
    stub.tile(1, 318, 3)
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())
    monkeypatch.setattr(timing, "samples", lambda p, launches, how: [[float(how.turns)] * how.turns for _ in launches])
    monkeypatch.setattr("bench.__main__.device", SimpleNamespace(count=lambda: 0))
    monkeypatch.setattr(choice, "require_gpu", lambda *_: None)
    problem = Case.problem
    monkeypatch.setattr(Case, "problem", lambda case, target=None: problem(case, H200))
    monkeypatch.setattr(sys, "argv", ["choice", *asked.split(), "--json", str(tmp_path / "x")])
    choice.main()
    machine, *products, end = map(json.loads, (tmp_path / "x").read_text().splitlines())
    assert set(asked.split()) <= set(machine["command"].split())
    assert [one["bench"] for one in products] == ["choice"] * (3 if "odd" in asked else 2)
    assert {us for one in products for row in one["rows"] for us in row["us"]} <= {times, times // 2}
    assert [one.get("stretch_ms") for one in products] == [60.0 if "large" in asked else None] * len(products)
    assert (end["bench"], end["status"]) == ("subject", 0)


def test_a_gain_is_judged_by_other_times_than_it_was_found_by():
    assert gain([(2.0, 2.0), (1.0, 1.0)], 0) == 1.0
    assert gain([(2.0, 2.0), (1.0, 1.0)], 1) == 0.0
    assert gain([(2.0, 1.0), (1.0, 2.0)], 0) == -0.25
    assert gain([(1.0, 1.0), (2.0, 2.0)], None) == pytest.approx(CLOSE - 1)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({}, True),
        ({"n": 4097}, False),
        ({"n": 4097, "started": "2026-11-23T22:00"}, True),
        ({"started": "2026-11-22T20:00"}, False),
        ({"mode": "block", "m": 64, "started": "2026-11-23T07:00"}, False),
        ({"mode": "block", "m": 65, "started": "2026-11-23T07:00"}, True),
    ],
)
def test_times_of_a_kernel_count_since_it_last_changed(fields, want):
    """For rows of the result, scales and numbers of rows that a change was of."""
    record = {"mode": "row", "m": 100, "n": 4096, "k": 4096, "started": "2026-11-23T12:00", **fields}
    assert is_of_today(record, {"kernel": "sm90_tiled"}) is want


def test_gains_are_of_what_was_chosen_when_it_was_measured():
    rows = [{"kernel": "a", "algorithm": i, "us": [2.0 - i, 2.0 - i]} for i in range(2)]
    assert [lost for _, lost in gains([{"first": ["a", i], "rows": rows} for i in range(3)])] == [1.0, 0.0]
