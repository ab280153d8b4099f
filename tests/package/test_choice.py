"""The untuned choice, judged on what was measured on an H200: docs/results/choice, by the table of this tree."""

from pathlib import Path
from statistics import median

import pytest

from bench import choice_records
from bench.choice_cases import LISTS, MODES, Case, cases
from bench.choice_records import WORST_GOAL, chosen_today, gains_today, part, read

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "choice"


@pytest.fixture(scope="module")
def records():
    return read(sorted(RESULTS.glob("*.jsonl")))


@pytest.fixture(scope="module")
def judged(records):
    return list(gains_today(records))


def key(record):
    return tuple(record[name] for name in Case._fields)


def test_both_parts_are_those_of_the_lists_and_large_enough(records):
    known = {name: {tuple(case): case.half for case in cases(name)} for name in LISTS}
    for record in records:
        assert known[record.get("list", "models")][key(record)] == record["half"]
    assert min(sum(part(r) == which for r in records) for which in choice_records.PARTS) >= 200


def test_no_weight_of_the_blind_half_was_fitted_to(records):
    weights = {which: {(r["n"], r["k"]) for r in records if part(r) == which} for which in choice_records.PARTS}
    assert not weights["fit"] & weights["judge"]


@pytest.mark.parametrize("mode", MODES)
def test_tuning_gains_little_on_the_half_that_nothing_was_fitted_to(judged, mode):
    own = [(record, gain) for record, gain in judged if (part(record), record["mode"]) == ("judge", mode)]
    assert median(gain for _, gain in own) <= choice_records.MEDIAN_GOAL
    assert {key(record): gain for record, gain in own if gain > WORST_GOAL} == {}


def test_what_is_judged_is_what_the_table_chooses(judged):
    """Rows and algorithms are found by their records: where the tree has changed since, some would be missing."""
    assert sum(part(record) == "judge" for record, _ in judged) >= 200
    assert {chosen_today(record)[0] for record, _ in judged} >= {"sm90_decode", "sm90_tiled", "cublaslt"}
