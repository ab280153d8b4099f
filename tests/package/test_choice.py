"""The untuned choice, judged on what was measured on an H200: docs/results/choice, by the table of this tree."""

from pathlib import Path
from statistics import median

import pytest

from bench import choice

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results" / "choice"
OWN = 0.19
"""What tuning gains at worst where the choice or the fastest is a row of our own: sm90_decode, which is preferred by a
rule, or sm90_tiled, whose estimates are rougher than those of the library."""


@pytest.fixture(scope="module")
def records():
    return choice.read(sorted(RESULTS.glob("*.jsonl")))


@pytest.fixture(scope="module")
def judged(records):
    return list(choice.gains_today(records))


def test_there_are_enough_products_and_both_halves_are_the_ones_of_the_list(records):
    cases = {tuple(case): case.half for case in choice.cases()}
    assert len(records) >= 200
    for record in records:
        assert cases[tuple(record[name] for name in choice.Case._fields)] == record["half"]
    assert min(sum(r["half"] == half for r in records) for half in ("fit", "judge")) >= 70


@pytest.mark.parametrize("mode", choice.MODES)
def test_tuning_gains_little_on_the_half_that_nothing_was_fitted_on(judged, mode):
    own = [(record, gain) for record, gain in judged if (record["half"], record["mode"]) == ("judge", mode)]
    assert median(gain for _, gain in own) <= choice.MEDIAN_GOAL
    far = {}
    for record, gain in own:
        row = record["rows"][choice.chosen_today(record)]
        fastest = min(record["rows"], key=lambda row: sum(row["us"]))
        ours = any(choice.estimate(record, one) is None for one in (row, fastest))
        if gain > (OWN if ours else choice.WORST_GOAL):
            far[tuple(record[name] for name in choice.Case._fields)] = row["kernel"], gain
    assert far == {}


def test_what_is_judged_is_what_the_table_chooses(judged):
    """Rows and algorithms are found by their records: where the tree has changed since, some would be missing."""
    assert len(judged) >= 200
    assert {r["rows"][choice.chosen_today(r)]["kernel"] for r, _ in judged} >= {"sm90_decode", "cublaslt"}
