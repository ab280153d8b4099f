"""The products of `bench.odd_products`: the same ones always, odd, with neighbours that are not."""

from collections import Counter
from types import SimpleNamespace

import pytest

from bench import odd_products
from bench.odd_cases import FEW, MODES, OUTS, Product, drawn, listed
from fp8core.kernels.gemm.table import SCALED_MM
from support.bench_runs import timing
from support.targets import on

CASES = drawn(200)


def test_a_seed_draws_the_same_products():
    assert drawn(200) == CASES
    assert drawn(20) == CASES[:20]
    assert drawn(20, seed=1) != CASES[:20]


def test_every_mix_and_ending_is_drawn():
    scales = Counter((made.scale_a, made.scale_b) for made in CASES)
    assert set(scales) == set(MODES)
    assert {made.out for made in CASES} == set(OUTS)
    assert any(made.beta for made in CASES)
    assert any(made.amax for made in CASES)
    assert 0.3 < sum(made.m <= FEW for made in CASES) / len(CASES) < 0.9


def test_all_products_are_odd_and_have_records_of_their_own():
    cases = (*listed(), *drawn(odd_products.DRAWN))
    assert all(made.odd for made in cases)
    assert len({tuple(odd_products.key(made).items()) for made in cases}) == len(cases)


@pytest.mark.parametrize("made", [*listed()[::4], *CASES[:50]], ids=str)
def test_no_product_of_a_hopper_gpu_falls_back_and_neighbours_are_aligned(made):
    near, plain = made.neighbour(), made.plain()
    assert not near.odd
    assert (near.m, near.n, near.k) == (made.m, -(-made.n // 16) * 16, -(-made.k // 16) * 16)
    assert near == made._replace(n=near.n, k=near.k, address=16)
    assert plain == near._replace(out="bfloat16", beta=0.0, amax=False)
    assert odd_products.planned(made, on(90)) not in ("generic_decode", "generic_mma", "none")
    assert odd_products.planned(near, on(90)) not in ("generic_decode", "generic_mma", "none")
    assert odd_products.planned(plain, on(90)) in ("sm90_decode", "sm90_tiled")
    assert next(SCALED_MM.ranking(made.problem(on(89)))).name


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (Product(5, 1001, 64, "row", "row"), ["fp8core", "neighbour"]),
        (Product(5, 1001, 64, "row", "row", out="float32", beta=1.0), ["fp8core", "neighbour", "plain"]),
    ],
)
def test_a_record_has_the_kernels_and_times_of_a_product_and_its_neighbours(monkeypatch, made, names):
    plans = {
        p: SimpleNamespace(scratch_bytes=0)
        for p in (one.problem(on(90)) for one in odd_products.variants(made).values())
    }
    monkeypatch.setattr(odd_products, "chosen", lambda p: (f"{p.n}", plans[p]))
    monkeypatch.setattr(
        odd_products, "times", lambda launches: {name: [p.n, p.k, 3.0] for name, (p, _) in launches.items()}
    )
    record = odd_products.measure(made, on(90))
    assert list(record["us"]) == list(record["kernels"]) == names
    assert record["kernels"]["neighbour"] == record["neighbour"].split("x")[1] == "1008"
    assert record["us"]["fp8core"]["median"] == 64


def test_the_summary_counts_what_is_beyond_the_goal():
    records = [{"m": m, "us": timing(fp8core=2.0 * by, neighbour=2.0)} for m in (64, 65) for by in (2.6, 1.0, 1.6, 1.2)]
    assert list(odd_products.summary(records)) == [
        "m <= 64: 2 of 4 beyond 1.5, median 1.40, most 2.60",
        "m > 64: 1 of 4 beyond 2.5, median 1.40, most 2.60",
    ]
