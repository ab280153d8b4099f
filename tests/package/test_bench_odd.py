"""Products that chance draws for `bench.odd_drawn`: the same ones always, odd, with neighbours that are not."""

from collections import Counter

import pytest

from bench import odd_drawn
from fp8core.kernels.gemm.table import SCALED_MM
from support.problems import on

CASES = odd_drawn.drawn(200)


def test_a_seed_draws_the_same_products():
    assert odd_drawn.drawn(200) == CASES
    assert odd_drawn.drawn(20) == CASES[:20]
    assert odd_drawn.drawn(20, seed=1) != CASES[:20]
    assert all(made.odd for made in CASES)


def test_every_mix_and_ending_is_drawn():
    scales = Counter((made.scale_a, made.scale_b) for made in CASES)
    assert set(scales) == set(odd_drawn.MODES)
    assert {made.out for made in CASES} == set(odd_drawn.OUTS)
    assert any(made.beta for made in CASES)
    assert any(made.amax for made in CASES)
    assert 0.3 < sum(made.m <= odd_drawn.FEW for made in CASES) / len(CASES) < 0.9


@pytest.mark.parametrize("made", CASES[:50], ids=str)
def test_no_product_of_a_hopper_gpu_falls_back_and_neighbours_are_aligned(made):
    near = made.neighbour()
    assert not near.odd
    assert (near.m, near.bias, near.activation) == (made.m, made.bias, made.activation)
    assert odd_drawn.planned(made, on(90)) not in ("generic_decode", "generic_mma", "none")
    assert odd_drawn.planned(near, on(90)) in ("sm90_decode", "sm90_tiled")
    assert next(SCALED_MM.ranking(made.problem(on(89)))).name


def test_the_summary_counts_what_is_beyond_the_goal():
    records = [{"ratio": ratio, "few": few} for few in (True, False) for ratio in (1.0, 1.6, 2.6)]
    assert list(odd_drawn.summary(records)) == [
        "m <= 64: 2 of 3 beyond 1.5, median 1.60, most 2.60",
        "m > 64: 1 of 3 beyond 2.5, median 1.60, most 2.60",
    ]
