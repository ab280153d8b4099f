"""Which blocks align rows of a themselves, and how many words of a their threads load at a time."""

import pytest

from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90 import decode_unaligned
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS
from fp8core.kernels.gemm.sm90.decode_config import (
    DecodeConfig,
    dynamic_bytes,
    fixed_bytes,
    ring_bytes,
    stages,
    width,
)
from fp8core.kernels.gemm.sm90.decode_unaligned import decode_unaligned as plan
from fp8core.kernels.gemm.sm90.decode_unaligned_config import candidates
from fp8core.kernels.gemm.sm90.loose_rows import aligned_config, aligns_a, loose_batch, most_words, words_of
from gemm.test_sm90_decode_unaligned import BIASED_CODES, problem

MODES = (("row", "row"), ("group", "block"), ("group", "group"))


@pytest.mark.parametrize("scales", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(22, 879, 304), (15, 401, 1989), (4, 9259, 1489), (40, 448, 262), (2, 2004, 129), (64, 900, 255)]
)
def test_rows_are_loaded_in_few_batches(m, n, k, scales):
    p, found = problem(m, n, k, scales=scales), 0
    for config in candidates(in_groups(p)):
        if aligns_a(p, config):
            words, batch, most = words_of(p, config), loose_batch(p, config), most_words(p, config)
            assert 1 <= batch <= most
            assert -(-words // batch) == -(-words // most) <= 2
            found += 1
    assert found


@pytest.mark.parametrize(
    ("m", "k", "warpgroups", "blocks", "aligned"),
    [
        (16, 515, (2, 1), 1, True),
        (16, 224, (1, 1), 2, True),
        (32, 515, (1, 1), 1, True),
        (32, 515, (1, 1), 2, False),  # blocks that share a multiprocessor
        (32, 515, (1, 2), 1, False),  # two warpgroups
        (32, 9065, (1, 1), 1, False),  # many words of a
        (33, 128, (1, 1), 1, True),
        (33, 515, (1, 1), 1, False),  # more than a batch of words
        (64, 100, (2, 1), 1, False),
    ],
)
def test_with_scales_along_k_more_than_16_rows_are_aligned_by_a_warpgroup_alone(m, k, warpgroups, blocks, aligned):
    config = DecodeConfig(1, 8, *warpgroups, blocks, 8, phases=16)
    for scales in MODES[1:]:
        assert aligns_a(problem(m, 512, k, scales=scales), config) == aligned


def test_two_warpgroups_that_alternate_do_not_align_rows_whose_results_are_biased_codes_with_amax():
    """They would spill; a is copied."""
    p = problem(63, 5478, 199, **BIASED_CODES)
    for changes, warpgroups, aligned in (
        ({}, (1, 2), True),
        ({"amax": True}, (1, 2), False),
        ({"amax": True}, (2, 1), True),
        ({"amax": True}, (1, 1), True),
        ({"amax": True, "bias": ""}, (1, 2), True),
    ):
        assert aligns_a(p._replace(**changes), DecodeConfig(1, 96, *warpgroups, 1, 12, phases=16)) == aligned


def test_a_block_that_aligns_a_keeps_all_of_its_part():
    p = problem(1, 4539, 11037, scales=("group", "group"))
    config = DecodeConfig(4, 30, 1, 2, 1, 24, phases=16)
    assert aligned_config(p, config).a_stages == 22
    pair = DecodeConfig(1, 33, 2, 1, 1, 8, multicast_tiles=2, phases=16)
    assert aligned_config(problem(64, 5000, 100), pair)[:2] == (1, 40)
    assert aligned_config(problem(64, 5000, 100), pair).multicast_tiles == 1


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
