"""Which blocks align rows of a themselves, in which layout, and how many words of a their threads load at a time."""

import pytest

from fp8core.kernels.encodings import round_up
from fp8core.kernels.gemm.sm90 import decode_unaligned
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import (
    clusters_at_once,
    dynamic_bytes,
    fixed_bytes,
    ring_bytes,
    stages,
    width,
)
from fp8core.kernels.gemm.sm90.decode_unaligned import decode_unaligned as plan
from fp8core.kernels.gemm.sm90.decode_unaligned import layout, layout_with
from fp8core.kernels.gemm.sm90.loose_rows import aligns_a, loose_batch, most_words, words_of
from gemm.test_sm90_decode_unaligned import BIASED_CODES, CODES, FN, problem

MODES = (("row", "row"), ("group", "block"), ("group", "group"))


@pytest.mark.parametrize("scales", [("row", "row"), ("group", "block"), ("group", "group")], ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(22, 879, 304), (15, 401, 1989), (4, 9259, 1489), (40, 448, 262), (2, 2004, 129)]
)
def test_an_aligned_row_is_loaded_in_few_batches(m, n, k, scales):
    """Blocks have a multiprocessor, and so its registers, to themselves where that places all of them."""
    p = problem(m, n, k, scales=scales)
    config = layout(p)
    words, batch, most = words_of(p, config), loose_batch(p, config), most_words(p, config)
    assert 1 <= batch <= most
    assert -(-words // batch) == -(-words // most)
    alone = config.clusters <= clusters_at_once(p.target)[config.cluster]
    assert config.ctas_per_sm == 1 if alone else config.ctas_per_sm > 1


@pytest.mark.parametrize(
    ("m", "n", "k", "aligned"),
    [
        (16, 5000, 224, True),
        (17, 312, 3064, True),
        (30, 312, 3064, True),
        (32, 300, 515, True),
        (32, 312, 9065, False),  # many words of a
        (30, 15024, 140, False),  # blocks that share a multiprocessor
        (33, 312, 515, True),
        (41, 312, 515, False),  # more than a batch of words
    ],
)
def test_more_rows_with_scales_along_k_are_aligned_by_blocks_that_have_the_registers(m, n, k, aligned):
    for scales in (("group", "block"), ("group", "group")):
        p = problem(m, n, k, scales=scales)
        assert aligns_a(p, layout(p)) == aligned


@pytest.mark.parametrize("scales", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "split_k"),
    [
        (64, 448, 120, 1),
        (40, 448, 255, 1),  # a warpgroup loads two k-blocks of up to 40 rows in a batch
        (41, 448, 255, 2),
        (40, 448, 262, 2),
        (39, 200, 1608, 8),
        (37, 4096, 508, 2),
        (64, 8440, 100, 1),
    ],
)
def test_one_warpgroup_aligns_more_rows_in_one_batch_with_the_least_split_that_does(m, n, k, split_k, scales):
    for early in (False, True):
        p = problem(m, n, k, scales=scales, prefetch_weight=early)
        config = layout(p)
        assert config == layout_with(p, 1)
        assert config.split_k == split_k
        assert config.m_warpgroups == config.k_warpgroups == config.ctas_per_sm == config.multicast_tiles == 1
        assert config.clusters <= clusters_at_once(p.target)[split_k]
        assert aligns_a(p, config)
        assert loose_batch(p, config) == words_of(p, config) <= most_words(p, config)


@pytest.mark.parametrize(
    ("m", "n", "k", "changes"),
    [
        (64, 448, 262, {}),  # three k-blocks are not split into four parts
        (64, 448, 1030, {}),  # not into more than eight
        (64, 5478, 199, {}),  # a tile of each residue for two parts of k finds no multiprocessor
        (64, 9000, 100, {}),
        (32, 448, 255, {}),
        (64, 448, 120, {"batch_invariant": True}),
        (64, 448, 255, {"batch_invariant": True}),
        (64, 448, 255, {"alignment": 16, "lda": 256}),
    ],
)
def test_other_rows_keep_the_layout_of_the_cost_model(monkeypatch, m, n, k, changes):
    chosen = layout(problem(m, n, k)._replace(**changes, codes_alignment=changes.get("alignment", 1)))
    monkeypatch.setattr("fp8core.kernels.gemm.sm90.decode_unaligned.with_one_warpgroup", lambda _, config: config)
    assert layout(problem(m, n, k)._replace(**changes, codes_alignment=changes.get("alignment", 1))) == chosen


def test_two_warpgroups_do_not_align_rows_whose_results_are_biased_codes_with_amax():
    """They would spill. One warpgroup aligns them in two batches; with batch_invariant, which keeps two, a is copied."""
    for changes, warpgroups, aligned in (
        (CODES, 2, True),
        (BIASED_CODES, 2, True),
        (BIASED_CODES | {"amax": True}, 1, True),
        (BIASED_CODES | {"amax": True, "batch_invariant": True}, 2, False),
        (BIASED_CODES | {"batch_invariant": True}, 2, True),
    ):
        p = problem(63, 5478, 199, **changes)
        config = layout(p)
        assert (config.split_k, config.k_warpgroups, config.residues) == (1, warpgroups, 1)
        assert aligns_a(p, config) == aligned


@pytest.mark.parametrize("scales", MODES[1:], ids="-".join)
def test_biased_codes_with_scales_along_k_have_the_layout_of_other_results(scales):
    """One warpgroup would need two batches of loads for these rows, so a is copied, for two warpgroups."""
    shape = {"m": 63, "n": 5478, "k": 199, "scales": scales}
    config = layout(problem(**shape, **BIASED_CODES | {"amax": True}))
    assert config == layout(problem(**shape, **CODES))
    assert config.k_warpgroups == 2


@pytest.mark.parametrize(
    ("m", "n", "k", "changes", "residues"),
    [
        (12, 13430, 353, {"scales": ("group", "group"), "out": FN, "out_scale": True}, 1),
        (7, 1326, 4995, {"prefetch_weight": True}, 1),
        (7, 1326, 4995, {"prefetch_weight": True, "batch_invariant": True}, 2),  # an order of sums for all m
        (7, 1326, 4995, {}, 2),  # two blocks a multiprocessor align it with two
        (7, 524, 14567, {}, 2),  # copied for one residue too
        (15, 261, 3989, {}, 2),  # aligned with two
    ],
)
def test_a_tile_has_one_residue_if_blocks_align_a_then_and_not_with_two(m, n, k, changes, residues):
    p = problem(m, n, k, **changes)
    config = layout(p)
    assert config.residues == residues
    assert layout(p._replace(lda=round_up(k, 16), alignment=16, codes_alignment=16)).residues == 2
    if residues == 1:
        assert aligns_a(p, config)
        assert not aligns_a(p, layout_with(p, 2))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("scales", MODES, ids="-".join)
@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize(
    ("n", "k"), [(100, 131073), (1000, 100001), (4096, 36865), (4096, 49153), (16384, 24577), (50000, 20001)]
)
def test_a_block_has_room_for_a_long_row_that_it_aligns(monkeypatch, m, n, k, scales, invariant):
    """With one row of a long k threads have few words, but the row's codes could fill the shared memory."""
    found = []

    class Launcher:
        def bind_args(self, *_):
            return lambda *_: None

    def launcher_for(problem, config, args, quantizer=None):
        found.append((problem, config))
        return Launcher(), (1, 1, 1)

    monkeypatch.setattr(decode_unaligned, "launcher_for", launcher_for)
    monkeypatch.setattr(decode_unaligned, "plan_realign", lambda _: None)
    plan(problem(m, n, k, scales=scales, batch_invariant=invariant))
    ((p, config),) = found
    side, scale_rows = width(m), SCALE_ROWS.get(p.scale_b, 0)
    depth = stages(config, side, scale_rows, p.target)
    assert depth >= 2 * config.k_warpgroups  # asserted by the kernel, too
    assert ring_bytes(config, side, depth) <= dynamic_bytes(config, side, scale_rows, depth, p.target)
    assert fixed_bytes(config, side, scale_rows, depth) <= 48 << 10
