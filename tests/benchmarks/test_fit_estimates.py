"""How estimates are fitted: trees, searches, the lines of the sources, and that these are what the records give."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed (extra test)")

from bench import fit_estimates, roofline
from bench.choice_records import MEASURED, key
from bench.fit_estimates import search
from bench.fitting import batches, boosting, cross_validation, models, trees
from bench.fitting.batches import Call
from bench.fitting.models import Constant, Model, number, put_in_place
from bench.fitting.samples import Sample
from fp8core.kernels.gemm import corrections
from support.bench_runs import python


@pytest.fixture
def rows():
    chance = np.random.default_rng(0)
    asked = chance.normal(size=(2000, 4))
    wanted = np.where(asked[:, 1] > 0.3, 0.2, -0.1) * (asked[:, 3] > 0)
    return asked, wanted


def test_trees_come_near_what_two_features_decide_together(rows):
    asked, wanted = rows
    made = boosting.fit(asked, wanted, np.ones(len(wanted)))
    assert np.abs(boosting.sums(made, asked, boosting.How()) - wanted).mean() < 0.02
    fresh = np.random.default_rng(1).normal(size=(500, 4))
    want = np.where(fresh[:, 1] > 0.3, 0.2, -0.1) * (fresh[:, 3] > 0)
    assert np.abs(boosting.sums(made, fresh, boosting.How()) - want).mean() < 0.03


def test_the_same_rows_give_the_same_trees(rows):
    asked, wanted = rows
    how = boosting.How(trees=5)
    first, again = (boosting.fit(asked, wanted, np.ones(len(wanted)), how) for _ in range(2))
    assert first == again
    other = boosting.fit(asked, wanted, np.linspace(0.1, 1, len(wanted)), how)
    assert other != first


def test_rows_without_weight_do_not_count(rows):
    asked, wanted = rows
    weights = (asked[:, 0] > 0).astype(float)
    changed = np.where(weights > 0, wanted, 7.0)
    how = boosting.How(trees=5)
    assert boosting.fit(asked, wanted, weights, how) == boosting.fit(asked, changed, weights, how)


def model(module, samples=lambda _: []):
    constants = lambda: models.globals_of(module, ("START", "RATE"))  # noqa: E731
    return Model(module, constants, samples, lambda: models.lines_of_globals(module, ("START", "RATE")))


def test_a_search_finds_what_times_were_made_of():
    module = SimpleNamespace(START=1.0, RATE=1.0)
    samples = [Sample(Call(lambda x: module.START + module.RATE * x, (x,)), 3.0 + 0.5 * x, 1.0) for x in range(1, 60)]
    found = search(model(module), samples)
    assert pytest.approx(3.0, rel=0.02) == module.START
    assert pytest.approx(0.5, rel=0.02) == module.RATE
    assert found.gained > 0.9
    assert found.error < 0.01


def test_one_time_that_is_far_off_moves_little():
    module = SimpleNamespace(START=3.0, RATE=0.5)
    samples = [Sample(Call(lambda x: module.START + module.RATE * x, (x,)), 3.0 + 0.5 * x, 1.0) for x in range(1, 60)]
    search(model(module), [*samples, samples[30]._replace(us=100.0)])
    assert pytest.approx(3.0, rel=0.05) == module.START


def of_branches(one, factor):
    """A formula with a branch on its arguments, one that is decided by its constants, a rounding and a dictionary."""
    if one.k % 4 and one.m > 2:
        return factor * (RATE.rate * one.m + math.ceil(one.k / 3)) ** 0.5
    return max(RATE.rate * one.k, 3) + {1: 0.5, 2: 0.25}[one.side.rows] * -one.m // 2


class Side(NamedTuple):
    rows: int


class Sizes(NamedTuple):
    m: int
    k: int
    side: Side


RATE = SimpleNamespace(rate=0.0)


def test_a_formula_called_for_many_arguments_and_constants_gives_what_it_gives_for_each():
    calls = [Call(of_branches, (Sizes(m, k, Side(side)), 1.5)) for m in range(5) for k in range(9) for side in (1, 2)]
    calls += [*calls[7:20], Call(lambda: 2.5)]
    many, rates = batches.Calls(calls, (Side,)), (0.25, 0.5, 2.0)
    RATE.rate = batches.Batch(np.array(rates)[:, None])
    with batches.elementwise(sys.modules[__name__]):
        found = [many.results(len(rates)) for _ in range(2)]
    want = []
    for RATE.rate in rates:
        want.append([call.formula(*call.arguments) for call in calls])
    for one in found:  # at first, and in the parts that were found then
        np.testing.assert_allclose(one, want, rtol=1e-15)
    assert "max" not in globals()


def test_a_branch_that_depends_on_constants_is_an_error():
    RATE.rate = batches.Batch(np.array([[1.0], [2.0]]))
    many = batches.Calls([Call(lambda x: x if x > RATE.rate else 0.0, (x,)) for x in (1.5, 3.0)])
    with pytest.raises(ValueError, match="the branch of a formula depends on its constants"):
        many.results(2)


def test_lines_are_put_in_the_places_of_those_that_begin_alike(tmp_path):
    source = tmp_path / "costs.py"
    source.write_text(
        'START: Final = 1.0\n"""Of a launch."""\nSTART_OF_ALL = 2\nRATE: Final = 9e-05\n', encoding="utf-8"
    )
    put_in_place(model(SimpleNamespace(START=3.125, RATE=2.5e-5, __file__=str(source))))
    want = 'START: Final = 3.125\n"""Of a launch."""\nSTART_OF_ALL = 2\nRATE: Final = 2.5e-5\n'
    assert source.read_text(encoding="utf-8") == want


def test_a_line_that_is_not_there_is_no_place(tmp_path):
    source = tmp_path / "costs.py"
    source.write_text("START: Final = 1.0\n", encoding="utf-8")
    with pytest.raises(ValueError, match="has 0 lines that begin with 'RATE: Final = '"):
        put_in_place(model(SimpleNamespace(START=3.0, RATE=2.0, __file__=str(source))))


@pytest.mark.parametrize(
    ("value", "want"), [(1.5, "1.5"), (4.2e6, "4.2e6"), (1.66e-5, "1.66e-5"), (0.00036, "0.00036")]
)
def test_numbers_are_as_sources_have_them(value, want):
    assert number(value) == want
    assert float(number(value)) == value


@pytest.mark.parametrize("name", models.MODELS)
def test_the_lines_of_a_model_are_those_of_its_source(name):
    made = models.MODELS[name]
    lines = Path(made.module.__file__).read_text(encoding="utf-8").splitlines()
    assert [line for line in made.lines() if line not in lines] == []
    assert all(isinstance(constant, Constant) and constant.value > 0 for constant in made.constants())


def constants():
    return [one.value for name in cross_validation.DECIDING for one in models.MODELS[name].constants()]


def recorded(gpu):
    return [one for one in fit_estimates.records_of(sorted(fit_estimates.RUNS.glob("*.jsonl"))) if one["device"] == gpu]


def test_weights_are_judged_by_a_fit_that_has_not_seen_them(monkeypatch):
    records = recorded(MEASURED)[::10]
    seen, search_ = [], fit_estimates.search
    before, kept = constants(), corrections.trees
    fit = boosting.fit  # how many trees a fit has tells nothing of what it has seen
    monkeypatch.setattr(boosting, "fit", lambda *asked: fit(*asked[:3], asked[3]._replace(trees=20)))
    monkeypatch.setattr(fit_estimates, "search", lambda *asked: seen.append(constants()) or search_(*asked))
    grown = trees.grown
    fits = []
    monkeypatch.setattr(trees, "grown", lambda some: fits.append(list(map(key, some))) or grown(some))
    for record, _ in cross_validation.crossed(records, 2, 4):
        assert constants() != before
        assert corrections.trees() != kept()
        assert (record["n"], record["k"]) not in {(n, k) for _, _, n, k in fits[-1]}
    assert len(fits) == 2
    assert sorted(fits[0] + fits[1]) == sorted(map(key, records))
    assert seen[0] == seen[len(cross_validation.DECIDING)] == before  # each search begins at what the sources contain
    assert (constants(), corrections.trees) == (before, kept)


def test_constants_are_those_of_one_gpu_also_where_another_is_judged(monkeypatch):
    before, kept = constants(), corrections.trees
    monkeypatch.setattr(trees, "grown", lambda some: {"fitted to": len(some)})
    with cross_validation.fitted(recorded(roofline.H100)[:50], 4):
        assert constants() == before
        assert corrections.trees() == {roofline.H100: {"fitted to": 50}}
    assert corrections.trees is kept


TREES = ([([(1, 0.5), (0, 2.5)], [1, -2, 3, 0]), ([(1, 0.5), (1, 1.5)], [0, 45, -45, 7])], ("n", "k", "m"))
"""Of two features of three, and their names."""


def test_trees_are_packed_with_the_thresholds_that_they_ask_for():
    grown = trees.packed(*TREES)
    assert grown.thresholds == {"k": [0.5, 1.5], "n": [2.5]}
    assert grown.questions == 2
    digits = corrections.DIGITS
    first = [0, 0, 1, 0, *(45 + leaf for leaf in (1, -2, 3, 0))]
    assert grown.trees[0] == "".join(digits[digit] for digit in first)
    forest = corrections.forest(grown, ("m", "k", "n"))
    for k, n in ((0.5, 2.5), (0.6, 2.0), (1.6, 3.0), (0.0, 3.0)):
        want = [
            leaves[2 * (row[0] > cut) + (row[1] > other)]
            for row, cut, other, leaves in (((k, n), 0.5, 2.5, [1, -2, 3, 0]), ((k, k), 0.5, 1.5, [0, 45, -45, 7]))
        ]
        assert forest.sum_of((9.0, k, n)) == sum(want)


def test_trees_of_another_gpu_stay_as_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(trees, "CORRECTIONS", tmp_path / "trees.json")
    other, mine = {"sm90_tiled": trees.packed(*TREES)}, {"sm90_decode": trees.packed(*TREES)}
    (tmp_path / "trees.json").write_text('{"trees": {}}')
    (tmp_path / "trees.json").write_text(trees.written(other, "another"))
    text = trees.written(mine, MEASURED)
    (tmp_path / "trees.json").write_text(text)
    assert trees.written(mine, MEASURED) == text
    found = json.loads(text)["trees"]
    assert {gpu: list(kernels) for gpu, kernels in found.items()} == {"another": [*other], MEASURED: [*mine]}
    assert corrections.Grown(**found["another"]["sm90_tiled"]) == other["sm90_tiled"]


def test_what_all_candidates_of_a_product_have_in_common_is_no_tree_of_any():
    """Every other product took 20 % longer than estimated, by both kernels, and no feature tells which."""
    chance, products = np.random.default_rng(0), np.repeat(np.arange(60), 4)

    def times():
        features, one = chance.normal(size=(len(products), 2)), np.ones(len(products))
        return trees.Times(("m", "n"), features, 0.2 * (products % 2), one, one, products)

    alike = trees.shared([times(), times()])
    assert alike[1::2].mean() - alike[::2].mean() == pytest.approx(0.2, rel=0.1)


def test_the_sources_are_what_the_records_give():
    """The trees of all models of GPU: they correct the formulas with the constants of today."""
    run = python("-m", "bench.fit_estimates", "--check", "--steps", "6")
    assert all(f"trees of {gpu} are current" in run.stdout for gpu in corrections.trees())
    assert run.returncode == 0, run.stdout + run.stderr + "run python -m bench.fit_estimates --write"
