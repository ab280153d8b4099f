"""The costs of a k that several blocks split are those of the records, and the tiles that they choose are near the fastest."""

from statistics import geometric_mean

import pytest

pytest.importorskip("scipy", reason="scipy is not installed (extra test)")

from bench import split_costs
from bench.choice_records import read
from fp8core.kernels.gemm.sm90 import tiled_cost


@pytest.fixture(scope="module")
def pairs():
    return [(record, split_costs.tiles_of(record)) for record in read(sorted(split_costs.RUNS.glob("*.jsonl")))]


def test_the_costs_of_the_source_are_those_of_the_records(pairs):
    timed = [one for record, tiles in pairs if record["half"] == "fit" for one in tiles]
    assert sum(one.tile.split_k > 1 for one in timed) > 500
    assert split_costs.fitted(timed) == pytest.approx(split_costs.current(), rel=0.02, abs=0.01)
    assert tiled_cost.SPLIT_FACTORS["promoted"] == tiled_cost.SPLIT_FACTORS["chain"]
    assert tiled_cost.SPLIT_FACTORS["group"] == pytest.approx(1.19 * tiled_cost.SPLIT_FACTORS["block"], rel=0.01)


def test_the_chosen_tiles_are_near_the_fastest_of_products_that_were_not_fitted_to(pairs):
    judged = [pair for pair in pairs if pair[0]["half"] == "judge"]
    costs = split_costs.current()
    each = split_costs.losses(judged, lambda one: split_costs.estimate(one, costs))
    assert len(each) > 150
    assert geometric_mean(each) < 1.04
