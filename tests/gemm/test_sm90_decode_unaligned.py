"""Products of few rows with a weight at any address on Hopper: its maps, and which problems the row takes."""

import struct
from itertools import product

import pytest

from fp8core.kernels.gemm.sm90 import decode_unaligned as module
from fp8core.kernels.gemm.sm90.decode import config_for
from fp8core.kernels.gemm.sm90.decode_config import clusters_at_once
from fp8core.kernels.gemm.sm90.decode_unaligned import (
    SM90_DECODE_UNALIGNED,
    UnalignedMaps,
    layout,
    layout_with,
    plan_unaligned,
)
from fp8core.kernels.gemm.sm90.residues import phases_of, residues_of
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from support.sm90_products import asked  # noqa: F401
from support.targets import on

FN, E5M2 = "float8_e4m3fn", "float8_e5m2"
CODES = {"out": FN, "out_scale": True, "amax": True}
BIASED_CODES = CODES | {"bias": "float32", "amax": False}


def problem(m, n, k, *, alignment=1, scales=("row", "row"), **changes):
    made = example_product(on(90), *scales, m=m, n=n, k=k)
    return made._replace(lda=k, ldb=k, alignment=alignment, codes_alignment=alignment, out_alignment=16, **changes)


@pytest.mark.parametrize(("stride", "count"), [(4112, 1), (4104, 2), (4100, 4), (4098, 8), (15, 16)])
def test_rows_that_begin_equally_far_behind_a_multiple(stride, count):
    assert phases_of(stride) == count
    assert count * stride % 16 == 0


@pytest.mark.parametrize(
    ("rows", "columns", "stride", "tile"),
    [(64, 300, 301, 64), (500, 4100, 4100, 128), (7, 33, 37, 64), (1, 5, 5, 64), (20, 64, 64, 64), (9, 40, 48, 128)],
)
@pytest.mark.parametrize("pointer", [1 << 20, (1 << 20) + 1, (1 << 20) + 13])
def test_maps_cover_every_row_and_end_with_it(monkeypatch, rows, columns, stride, tile, pointer):
    made = []

    def encode(*geometry):
        made.append(geometry)
        return bytes([len(made)]) * 128

    monkeypatch.setattr(module, "encode", encode)
    packed = UnalignedMaps(rows, columns, stride, tile, 144).make(pointer)
    assert len(packed) == 16 * 128 + 16 * 4
    offsets, count, found = struct.unpack("16i", packed[2048:]), phases_of(stride), []
    for first in range(min(count, rows)):
        address, of_residue, width, step, *box = made[packed[128 * first] - 1]
        assert address % 16 == step % 16 == 0
        assert box == [tile, 144]
        assert address + offsets[first] == pointer + first * stride
        assert width - offsets[first] == columns
        assert 0 <= offsets[first] < 16
        assert step == count * stride
        found += range(first, rows, count)[:of_residue]
        assert len(range(first, rows, count)) == of_residue
    assert sorted(found) == list(range(rows))


@pytest.mark.parametrize("scales", [("row", "row"), ("group", "block"), ("group", "group")], ids="-".join)
@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("k", [4097, 4098, 4100, 4104])
@pytest.mark.parametrize("n", [5, 1003, 5000, 12345, 57344])
def test_every_cluster_has_as_many_tiles(m, n, k, scales):
    """As far as they can: no cluster takes a second tile where others could take it."""
    for early in (False, True):
        p = problem(m, n, k, scales=scales, prefetch_weight=early)
        for residues in (1, 2):
            config, groups = layout_with(p, residues), phases_of(k) // residues
            tiles = -(-groups * -(-n // (groups * config.tile)) // config.multicast_tiles)
            most = clusters_at_once(p.target)[config.cluster] * config.ctas_per_sm
            assert (config.phases, config.residues, config.groups) == (groups * residues, residues, groups)
            assert 8 * config.multicast_tiles <= max(m, 8)
            assert config.clusters <= tiles
            assert -(-tiles // config.clusters) == -(-tiles // min(tiles, most))


@pytest.mark.parametrize(
    ("m", "n", "k", "out", "residues"),
    [
        (15, 261, 3989, "bfloat16", 2),  # tiles of one residue would hold 16 or 17 rows
        (15, 261, 3989, FN, 2),
        (99, 1507, 6277, FN, 2),  # 24 tiles in place of 32
        (7, 524, 14567, FN, 1),  # 16 tiles either way, and results of one residue share sectors
        (7, 524, 14567, "bfloat16", 2),  # they have a sector each
        (64, 448, 262, "bfloat16", 1),
        (57, 2371, 326, "float32", 2),
        (8, 6222, 856, "float32", 1),
        (64, 448, 256, "float32", 1),  # all rows begin at the same offset
    ],
)
def test_a_tile_has_two_residues_where_that_saves_tiles_or_stored_sectors(m, n, k, out, residues):
    assert residues_of(problem(m, n, k, out=out)) == residues


@pytest.mark.parametrize(
    ("m", "scales", "changes", "residues"),
    [
        (64, ("group", "block"), {"batch_invariant": True}, 1),
        (64, ("row", "row"), {"batch_invariant": True}, 1),
        (128, ("group", "group"), {}, 1),
        (128, ("row", "group"), {}, 1),
        (128, ("group", "row"), {}, 1),  # scales of rows are read as of groups
        (128, ("group", "tensor"), {}, 2),
        (128, ("group", "block"), {}, 2),
        (96, ("group", "group"), {}, 2),
    ],
)
def test_a_tile_has_one_residue_where_threads_lack_registers_for_two(m, scales, changes, residues):
    p = problem(m, 5000, 4101, scales=scales, **changes)
    assert residues_of(p) == 2
    assert layout(p).residues == residues


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("scales", [("row", "row"), ("group", "block"), ("group", "group")], ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(5000, 4101), (1003, 8200), (57344, 8194), (64, 100)])
def test_the_order_of_a_batch_invariant_sum_does_not_depend_on_m(n, k, scales, early):
    orders = set()
    for m in range(1, 65):
        config = layout(problem(m, n, k, scales=scales, prefetch_weight=early, batch_invariant=True))
        orders.add((config.split_k, config.k_warpgroups, config.tile, config.residues))
    assert len(orders) == 1


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("scales", [("row", "row"), ("tensor", "tensor"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(5000, 4101), (9001, 77), (9001, 255), (9001, 777), (12848, 1501)])
def test_the_order_of_a_batch_invariant_sum_does_not_depend_on_where_a_is(m, n, k, scales):
    """A row alone may be aligned that is not in its batch, whose rows are k bytes apart."""
    here = problem(m, n, k, scales=scales, batch_invariant=True)
    orders = set()
    for lda, alignment in ((k, 1), (k, 16), (-(-k // 16) * 16, 16)):
        config = layout(here._replace(lda=lda, alignment=alignment, codes_alignment=alignment))
        orders.add((config.split_k, config.k_warpgroups))
    assert len(orders) == 1


@pytest.mark.parametrize("scales", [("row", "row"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(5000, 4101), (1003, 8200), (57344, 8194), (7000, 1000), (64, 100)])
def test_a_row_that_is_aligned_by_chance_gets_the_same_bits(n, k, scales):
    """The weight's rows are aligned, those of a are or are not: sm90_decode takes the first, both sum alike."""
    for m in (1, 9, 64):
        near = problem(m, n, k, scales=scales, batch_invariant=True, alignment=16)._replace(ldb=8208, lda=8208)
        far = near._replace(lda=8209, alignment=1, codes_alignment=1)
        assert SCALED_MM.explain(near).chosen == "sm90_decode"
        assert SCALED_MM.explain(far).chosen == "sm90_decode_unaligned"
        assert layout(far)._replace(phases=0) == config_for(near)


def test_few_rows_at_any_address_choose_it():
    codes = {"out": FN, "out_scale": True}
    for m, k, n in ((1, 4101, 5000), (64, 4100, 5001), (16, 4096, 5001)):
        own = 16 if k % 16 == 0 else 1
        p = problem(m, n, k, **codes)._replace(codes_alignment=own, out_alignment=1, amax=m > 1)
        assert SCALED_MM.explain(p).chosen == "sm90_decode_unaligned"
    for m, k, scales in product((1, 16, 64), (1, 4100, 4101), (("tensor", "row"), ("group", "block"))):
        assert SCALED_MM.explain(problem(m, 5000, k, scales=scales)).chosen == "sm90_decode_unaligned"
    for m in (16, 640):
        invariant = problem(m, 5000, 4101, batch_invariant=True)
        assert SCALED_MM.explain(invariant).chosen == "sm90_decode_unaligned"
    assert SCALED_MM.explain(problem(16, 5000, 4096, alignment=16)).chosen == "sm90_decode"


@pytest.mark.parametrize("m", [1, 64, 300])
@pytest.mark.parametrize("k", [4100, 4101])
def test_a_weight_of_odd_k_in_aligned_rows_is_not_copied(m, k):
    """As `Fp8Linear.from_weight` keeps it: rows of 4112 codes, of which some count."""
    padded = problem(m, 5008, k, alignment=16)._replace(lda=4112, ldb=4112)
    assert SCALED_MM.explain(padded).chosen in ("sm90_decode", "sm90_tiled")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": on(100)}, "needs wgmma"),
        ({"a": "float8_e4m3fnuz"}, "needs e4m3fn"),
        ({"scale_dtype": "float8_e8m0fnu"}, "scales of float32"),
        ({"out": "float8_e4m3fnuz"}, "gives float32, float16, bfloat16, e4m3fn or e5m2"),
        ({"k": 0}, "needs k > 0"),
        ({"m": 257}, "multiprocessors for every panel of 64 rows, got m=257 n=5000 k=4100"),
        *(({"m": m, "batch_invariant": True, "amax": True}, "no amax with batch_invariant") for m in (1, 64, 65)),
        ({"m": 128, "k": (1 << 28) + 1}, "needs a of less than 2**35 codes"),
        ({"k": (1 << 29) + 1, "batch_invariant": True}, "with batch_invariant, in each 64 rows"),
        ({"vectors_alignment": 2}, "addresses divisible by 4"),
        (
            {"lda": 4112, "ldb": 4112, "codes_alignment": 16},
            "an FP8 result or amax, got codes aligned to 16, bfloat16 and amax=False",
        ),
    ],
)
def test_what_it_cannot_do_is_said(changes, words):
    assert words in str(SM90_DECODE_UNALIGNED.refusal(problem(16, 5000, 4100)._replace(**changes)))


@pytest.mark.parametrize(("m", "k", "copies"), [(1, 4101, False), (16, 224, False), (24, 4101, True), (64, 4101, True)])
@pytest.mark.parametrize("scales", [("row", "row"), ("group", "block"), ("row", "group")], ids="-".join)
def test_few_rows_are_aligned_without_a_launch_before(asked, monkeypatch, m, k, copies, scales):
    monkeypatch.setattr(module, "encode", lambda *_: bytes(128))
    p = problem(m, 5000, k, scales=scales, amax=m in (1, 64))
    plan = plan_unaligned(p)
    assert (plan.scratch_bytes > 0) == copies
    plan(7, *range(16, 128, 16), 128 * p.amax, 144)
    entries = ["realign_codes"] * copies + ["clear_amax"] * (p.amax and not copies) + ["sm90_decode"]
    assert [entry for entry, _, _ in asked] == entries
    if copies:
        assert asked[0][2][-1] == 128 * p.amax
