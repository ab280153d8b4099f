"""The untuned choice, judged on what was measured on each model of GPU: docs/results/choice, by the table of this tree."""

from collections import defaultdict
from pathlib import Path
from statistics import median

import pytest

from bench import choice_records, roofline
from bench.choice_cases import LISTS, MODES, cases
from bench.choice_records import WORST_GOAL, chosen_today, estimate, gains_today, key, part, read
from support.bench_runs import python

MOST_OF_THEM = 0.031
"""What it gains at most at nine of ten."""
BEYOND = {roofline.H200: 2, roofline.H100: 1}
"""How many of all products it may gain more at than `WORST_GOAL`, by the model of GPU."""
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "choice"


@pytest.fixture(scope="module")
def records():
    return read(sorted(RESULTS.glob("*.jsonl")))


@pytest.fixture(scope="module")
def blind(records):
    return [record for record in records if part(record) == "judge"]


@pytest.fixture(scope="module")
def judged(blind):
    return list(gains_today(blind))


def test_both_parts_are_those_of_the_lists_and_large_enough(records):
    known = {name: {tuple(case): case.half for case in cases(name)} for name in LISTS}
    for record in (record for record in records if record.get("list") != "tiles"):
        assert known[record.get("list", "models")][key(record)] == record["half"]
    assert sum(part(record) == "fit" for record in records) >= 1000
    assert sum(part(record) == "judge" for record in records) >= 200


def test_no_weight_of_the_blind_half_was_fitted_to(records):
    weights = {which: {(r["n"], r["k"]) for r in records if part(r) == which} for which in choice_records.PARTS}
    assert not weights["fit"] & weights["judge"]


@pytest.mark.parametrize("gpu", BEYOND)
@pytest.mark.parametrize("mode", ["all", *MODES])
def test_tuning_gains_little_on_the_half_that_nothing_was_fitted_to(judged, mode, gpu):
    own = sorted(gain for record, gain in judged if record["device"] == gpu and mode in ("all", record["mode"]))
    assert len(own) >= 90
    assert median(own) <= choice_records.MEDIAN_GOAL
    assert own[len(own) * 9 // 10] <= MOST_OF_THEM
    assert sum(gain > WORST_GOAL for gain in own) <= BEYOND[gpu]


def test_what_the_choice_costs_is_written_down():
    run = python("docs/make_choice.py", "--check")
    assert run.returncode == 0, run.stderr + "run python docs/make_choice.py"


@pytest.mark.parametrize("kernel", ["cublaslt", "sm90_tiled"])
def test_estimates_are_near_what_was_measured_of_the_fastest(records, kernel):
    """Beside one another: the clock of a run's device moves all its times."""
    ratios = defaultdict(list)
    for record in records:
        least = min(sum(row["us"]) for row in record["rows"])
        own = [row for row in record["rows"] if row["kernel"] == kernel and sum(row["us"]) <= 1.1 * least]
        if part(record) == "judge" and record["m"] > 64:
            pairs = [(estimate(record, row), sum(row["us"]) / 2) for row in own]
            ratios[record["file"]] += [guess / us for guess, us in pairs if guess is not None]
    assert all(0.8 <= median(of_run) <= 1.2 for of_run in ratios.values())
    off = [abs(ratio / median(of_run) - 1) for of_run in ratios.values() for ratio in of_run]
    assert len(off) >= 40
    assert median(off) <= 0.05
    assert sorted(off)[len(off) * 9 // 10] <= 0.12


def test_what_is_judged_is_what_the_table_chooses(blind, judged):
    """Rows and algorithms are found by their records: where the tree has changed since, some would be missing."""
    assert len(judged) >= 0.9 * len(blind)
    assert {chosen_today(record).kernel for record, _ in judged} >= {"sm90_decode", "sm90_tiled", "cublaslt"}
