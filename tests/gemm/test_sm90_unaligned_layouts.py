"""Which layouts products at any address may have, and that what is chosen is near the fastest."""

import math
from pathlib import Path

import pytest

from bench import unaligned_layouts as bench
from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90 import decode_unaligned_config as model
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import clusters_at_once, dynamic_bytes, ring_bytes, width
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED, layout, layout_with
from fp8core.kernels.gemm.sm90.loose_rows import a_is_unaligned, aligned_config, aligns_a
from fp8core.kernels.gemm.sm90.residues import phases_of
from fp8core.kernels.gemm.table import SCALED_MM
from gemm.test_sm90_decode_unaligned import BIASED_CODES, CODES, problem

ROW, BLOCK, GROUP = ("row", "row"), ("group", "block"), ("group", "group")
LAYOUTS = Path(__file__).parents[2] / "docs" / "results" / "layouts"
RECORDS = sorted(LAYOUTS.glob("*.jsonl"))


@pytest.fixture(scope="module")
def records():
    return bench.read(RECORDS)


@pytest.mark.parametrize("scales", [ROW, BLOCK, GROUP], ids="-".join)
@pytest.mark.parametrize("m", [1, 9, 24, 64, 65, 400])
@pytest.mark.parametrize("k", [15, 515, 4098, 20001])
@pytest.mark.parametrize("n", [5, 1003, 57344])
def test_blocks_of_every_candidate_are_placed_and_hold_what_they_load(n, k, m, scales):
    p = in_groups(problem(m, n, k, scales=scales))
    found = list(model.candidates(p))
    assert len(found) == len(set(found)) >= (m <= 64)
    for config in found:
        tiles = model.channels(n, config) // (config.tile * config.multicast_tiles)
        assert tiles * config.tile * config.multicast_tiles >= n
        places = clusters_at_once(p.target)[config.cluster] * config.ctas_per_sm // config.panels
        assert config.clusters == min(tiles, places)
        assert config.panels == 1 or tiles <= places
        panel = model.panel_of(p, config.panels)
        side = width(panel.m)
        assert config.panels == -(-m // side)
        assert config.split_k <= -(-k // 128)
        assert config.phases == phases_of(k)
        assert config.phases % config.residues == 0
        assert config.multicast_tiles == 1 or (side == 64 and config.panels == 1)
        as_launched = aligned_config(panel, config) if a_is_unaligned(p) and aligns_a(panel, config) else config
        depth, scale_rows = 2 * config.k_warpgroups, SCALE_ROWS.get(p.scale_b, 0)
        needed = ring_bytes(as_launched, side, depth)
        assert needed <= dynamic_bytes(as_launched, side, scale_rows, depth, p.target)


@pytest.mark.parametrize(
    ("m", "scales", "changes", "lacking", "there"),
    [
        # residues, m_warpgroups, k_warpgroups, multicast_tiles, blocks a multiprocessor
        (8, ROW, BIASED_CODES, (2, 1, 1, 1, 3), (1, 1, 1, 1, 3)),
        (8, ROW, BIASED_CODES, (2, 1, 1, 1, 3), (2, 1, 1, 1, 2)),
        (16, ROW, {}, (2, 1, 1, 1, 3), (1, 1, 1, 1, 3)),
        (16, GROUP, {}, (1, 1, 1, 1, 3), (2, 1, 1, 1, 2)),
        (16, ROW, {"beta": 1.0}, (1, 1, 1, 1, 3), (2, 1, 1, 1, 2)),
        (32, ROW, {}, (1, 1, 1, 1, 3), (2, 1, 1, 1, 2)),
        (32, GROUP, {"amax": True}, (2, 1, 1, 1, 2), (1, 1, 1, 1, 2)),
        (64, BLOCK, {}, (2, 1, 1, 1, 2), (2, 1, 1, 1, 1)),
        (64, GROUP, {}, (2, 2, 1, 2, 1), (2, 1, 1, 1, 1)),
        (64, GROUP, {}, (1, 1, 2, 1, 1), (1, 1, 1, 1, 1)),
        (64, GROUP, BIASED_CODES, (1, 2, 1, 1, 1), (2, 1, 1, 1, 1)),
        (64, BLOCK, CODES, (2, 1, 1, 1, 2), (2, 2, 1, 1, 1)),
    ],
)
def test_no_candidate_needs_registers_that_threads_lack(m, scales, changes, lacking, there):
    p = in_groups(problem(m, 12000, 4101, scales=scales, **changes))
    found = {(config.residues, *model.warpgroups(config), config.ctas_per_sm) for config in model.candidates(p)}
    assert lacking not in found
    assert there in found


@pytest.mark.parametrize("m", [4, 16, 30, 64])
def test_two_warpgroups_that_align_many_rows_have_tiles_of_one_residue(m):
    found = {
        (config.residues, aligns_a(p, config))
        for p in [problem(m, 9001, 255)]
        for config in model.candidates(p)
        if config.m_warpgroups * config.k_warpgroups > 1 and config.panels == 1
    }
    assert ((2, True) in found) == (m < 33)


@pytest.mark.parametrize("early", [False, True])
def test_without_a_prefetch_the_sums_have_the_same_order(early):
    """A multiprocessor has at most as many blocks as place all clusters, but two: nothing of the next product waits."""
    p = problem(3, 16000, 515, prefetch_weight=early)
    config, most = layout(p), model.cheapest(p)
    assert config._replace(ctas_per_sm=0, a_stages=0) == most._replace(ctas_per_sm=0, a_stages=0)
    assert config.ctas_per_sm == most.ctas_per_sm if early else config.ctas_per_sm <= 2


def test_the_order_of_batch_invariant_sums_is_that_of_the_aligned_kernel():
    far = problem(12, 5000, 4101)
    near = far._replace(k=4096, ldb=4096, lda=4096, alignment=16, out="float8_e4m3fn", out_scale=True)
    for p in (far, near):
        invariant = p._replace(batch_invariant=True)
        assert layout(invariant) == layout_with(invariant, 1)
        assert layout(p) == model.cheapest(p)


@pytest.mark.parametrize("scales", [ROW, BLOCK, GROUP], ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(100, 15), (448, 262), (1100, 555), (300, 3064), (16000, 900), (3000, 9001)])
def test_panels_are_weighed_where_the_weight_is_small(n, k, scales):
    for m in (8, 9, 30, 64, 100, 250):
        found = {config.panels for config in model.candidates(in_groups(problem(m, n, k, scales=scales)))}
        panels = {-(-m // side) for side in model.COSTS}
        assert found <= {each for each in panels if each == 1 or n * k * each <= model.MOST_BYTES}
        if n * k < 2e5:
            assert found == panels


@pytest.mark.parametrize("m", [20, 40, 64])
@pytest.mark.parametrize(("n", "k"), [(448, 262), (800, 112), (270, 904)])
def test_rows_of_the_smallest_weights_are_in_panels(n, k, m):
    assert layout(problem(m, n, k)).panels > 1
    assert layout(problem(m, n, k, batch_invariant=True)).panels == 1
    assert layout(problem(m, 20 * n, 20 * k)).panels == 1


@pytest.mark.parametrize("m", [65, 100, 128, 129, 200, 256, 257])
def test_more_rows_of_a_small_weight_are_in_panels(m):
    small, large = problem(m, 448, 262), problem(m, 9001, 6001)
    assert layout(small).panels > 1
    assert SCALED_MM.explain(small).chosen == "sm90_decode_unaligned"
    if m <= 256:
        assert layout(large).panels == -(-m // 128)
    else:
        assert str(SM90_DECODE_UNALIGNED.refusal(large)).startswith(
            "needs at most 256 rows, batch_invariant, or a weight"
        )


def test_chosen_layouts_are_near_the_fastest(records):
    """By the times of an H200: docs/results/layouts."""
    found = list(bench.losses(records))
    assert len(found) >= 0.95 * len(records) >= 300
    for side in (*model.COSTS, 0):  # which stands for more than 64 rows
        each = sorted(loss for of, loss in found if of == side)
        assert len(each) >= 60
        assert math.exp(sum(map(math.log, each)) / len(each)) <= 1.05
        assert each[len(each) * 9 // 10] <= 1.15
        assert each[-1] <= 1.3


def test_two_panels_or_copies_are_chosen_near_the_faster():
    """By the times of an H200 for 65 to 512 rows, most of them 129 to 256."""
    records = bench.read(sorted((LAYOUTS / "two-panels").glob("*.jsonl")))
    found = sorted(loss for _, loss in bench.losses(records))
    assert len(found) >= 0.9 * len(records) >= 250
    assert math.exp(sum(map(math.log, found)) / len(found)) <= 1.03
    assert found[len(found) * 9 // 10] <= 1.1
    assert found[-1] <= 1.35


@pytest.mark.parametrize("side", sorted(model.COSTS))
def test_costs_are_those_that_the_records_give(records, side):
    """No cost that is moved by a tenth, or by the last of its decimals, fits the times better."""
    samples, costs = bench.samples_of(records, side), model.COSTS[side]
    least = bench.loss(samples, costs)
    numbers = bench.flat(costs)
    for i, number in enumerate(numbers):
        step = max(number / 10, 0.001)
        for moved in (max(0.0, number - step), number + step):
            assert bench.loss(samples, bench.filled(costs, [*numbers[:i], moved, *numbers[i + 1 :]])) >= least
