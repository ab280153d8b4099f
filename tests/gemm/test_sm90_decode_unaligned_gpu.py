"""Products of few rows with a weight at any address on a Hopper GPU."""

import random
from copy import copy

import numpy as np
import pytest

from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90 import decode_unaligned as module
from fp8core.kernels.gemm.sm90.decode import decode
from fp8core.kernels.gemm.sm90.decode_config import DecodeConfig
from fp8core.kernels.gemm.sm90.decode_unaligned import (
    SM90_DECODE_UNALIGNED,
    decode_unaligned,
    layout,
    layout_with,
    plan_unaligned,
)
from fp8core.kernels.gemm.sm90.decode_unaligned_config import candidates, panel_of
from fp8core.kernels.gemm.sm90.residues import phases_of
from gemm.test_sm90_decode_unaligned import E5M2, FN

CUT_OFF = 2.0**-10
"""The tensor cores cut off what lies 14 bits or so below the largest of 32 products: relative to the sum of sizes."""


@pytest.fixture
def operands():
    """Return what makes operands on the device, among NaN."""
    from gemm.test_generic_gpu import Operands

    return Operands


MODES = (("row", "row"), ("group", "block"), ("tensor", "row"), ("group", "group"), ("row", "tensor"))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 9, 33, 64])
@pytest.mark.parametrize("k", [15, 130, 1001, 4100])
def test_results_at_every_residue_of_addresses_and_strides(operands, m, k):
    for i in ((m + k) % 3, (m + k + 1) % 3):
        out, bias = ("bfloat16", "float32", FN)[i], ("", "float32")[i % 2]
        n, modes = (1003, 5, 2570)[(i + m) % 3], MODES[(2 * i + m + k) % 5]
        a, b = ((FN, FN), (E5M2, FN), (FN, E5M2))[i]
        made = operands((m, n, k), modes, (5 * i, 4 * i + (k + m) % 16, i % 2), out, bias, a, b, amax=out == FN)
        if SM90_DECODE_UNALIGNED.refusal(made.problem) is None:
            made.check(plan_unaligned(made.problem), CUT_OFF)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [7, 16, 30, 64])
def test_results_in_layouts_that_are_not_chosen(operands, m):
    made = operands((m, 1200, 1001 - m), MODES[m % 5], (1, 0, 0), bias="float32")
    for config in random.Random(m).sample(list(candidates(in_groups(made.problem))), 3):
        made.check(decode_unaligned(made.problem, config), CUT_OFF)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "panels", "offsets"), [(9, 2, (1, 0, 0)), (39, 3, (1, 3, 1)), (64, 8, (15, 7, 2)), (50, 2, (0, 3, 0))]
)
def test_rows_in_panels_have_their_bits_in_one(operands, m, panels, offsets, modes):
    """Blocks align a, or load it where its rows are aligned; the last panel may be short."""
    made = operands((m, 1200, 1001), modes, offsets, ("bfloat16", "float32", FN)[panels % 3], "float32", amax=True)
    phases = phases_of(made.problem.ldb)
    config = DecodeConfig(2, 8, 1, 1, 1, 4, phases=phases, residues=min(2, phases), panels=panels)
    made.check(decode_unaligned(made.problem, config), CUT_OFF)
    own, largest = made.run(decode_unaligned(made.problem, config)), float(made.amax[0])
    np.testing.assert_array_equal(own, made.run(decode_unaligned(made.problem, config._replace(panels=1))))
    assert largest == float(made.amax[0])


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "offsets", "out"),
    [
        (65, 448, 262, (0, 0, 0), "bfloat16"),
        (100, 270, 3001, (1, 0, 3), "float32"),
        (129, 1003, 130, (0, 3, 1), FN),
        (200, 120, 2050, (5, 15, 0), "float16"),
        (333, 241, 97, (1, 1, 1), "bfloat16"),
    ],
)
def test_more_rows_in_panels(operands, m, n, k, offsets, out, modes):
    made = operands((m, n, k), modes, offsets, out, "float32", amax=out == FN)
    assert layout(made.problem).panels > 1
    made.check(plan_unaligned(made.problem), CUT_OFF)


def aligned(made):
    """Return the operands with the same codes in aligned rows, among NaN."""
    import cupy

    p, even = made.problem, copy(made)
    ld = -(-p.k // 16) * 16
    for name, at, rows, stride in (("a", made.offsets[0], p.m, p.lda), ("b", made.offsets[1], p.n, p.ldb)):
        codes = cupy.full((rows, ld), 0x7F, np.uint8)
        codes[:, : p.k] = getattr(made, name)[at : at + rows * stride].reshape(rows, stride)[:, : p.k]
        setattr(even, name, codes)
    even.offsets, even.problem = (0, 0, made.offsets[2]), p._replace(lda=ld, ldb=ld, alignment=16, codes_alignment=16)
    return even


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("m", "n", "k", "gap", "modes"),
    [
        (40, 2100, 4096, 0, ("row", "row")),
        (8, 17001, 1001, 0, ("row", "row")),
        (40, 2100, 1001, 0, ("group", "block")),
        (64, 9000, 1002, 2, ("group", "group")),
        (64, 17000, 1001, 1, ("group", "block")),
    ],
)
def test_bits_are_those_of_aligned_operands(operands, m, n, k, gap, modes):
    """In the same layout: whatever is before and behind a row's codes, each is multiplied in its place."""
    odd = operands((m, n, k), modes, (3, 1 + gap, 0))
    even = aligned(odd)
    chosen = layout(odd.problem)._replace(panels=1, a_stages=4)
    for config in (layout_with(odd.problem, 1), layout_with(odd.problem, 2), chosen):
        tiles = -(-n // config.tile)
        if phases_of(odd.problem.ldb) > 1 or config.residues == 1:
            got = odd.run(decode_unaligned(odd.problem, config))
            clusters = min(config.clusters, tiles // config.multicast_tiles)
            config = config._replace(phases=0, residues=1, clusters=clusters)
            np.testing.assert_array_equal(got, even.run(decode(even.problem, config)))


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block"), ("group", "row")], ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "gaps"),
    [
        (1, 1003, 4101, (0, 0)),
        (5, 9000, 777, (0, 0)),
        (16, 333, 100, (1, 7)),
        (16, 5000, 256, (15, 0)),
        (9, 70, 5, (3, 1)),
        (30, 312, 3064, (0, 0)),
        (40, 448, 255, (0, 0)),
        (64, 300, 500, (1, 7)),
    ],
)
def test_rows_that_blocks_align_have_the_bits_of_copies(operands, monkeypatch, m, n, k, gaps, modes):
    made = operands((m, n, k), modes, (*gaps, 1), "float32", "float32", amax=True)
    config = layout(made.problem)
    assert module.aligns_a(panel_of(made.problem, config.panels), config)
    plan = plan_unaligned(made.problem)
    assert plan.scratch_bytes == 0
    made.check(plan, CUT_OFF)
    own, largest = made.run(plan), float(made.amax[0])
    monkeypatch.setattr(module, "aligns_a", lambda *_: False)
    np.testing.assert_array_equal(own, made.run(plan_unaligned(made.problem)))
    assert largest == float(made.amax[0])


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")], ids="-".join)
def test_a_row_has_its_bits_in_any_batch(operands, modes):
    made = operands((150, 1003, 777), modes, (0, 0, 0))
    rows = [
        made.run(plan_unaligned(made.problem._replace(m=m, batch_invariant=True)), m)[: min(m, 7)] for m in (150, 64, 7)
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    np.testing.assert_array_equal(rows[0], rows[2])


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k", "modes"), [(100, 77, ("row", "row")), (2100, 4100, ("group", "block"))])
def test_nan_and_infinity_stay_in_their_row_and_channel(operands, n, k, modes):
    """Rows lie without gaps: what precedes a row's first code is the row before."""
    made = operands((5, n, k), modes, (0, 0, 0), "float32", b=E5M2)
    made.b.reshape(-1)[3 * k : 4 * k] = 0x7F
    made.b.reshape(-1)[50 * k : 51 * k] = 0x7C
    made.a.reshape(-1)[2 * k : 3 * k] = 0x7F
    got = made.run(plan_unaligned(made.problem)).view(np.float32)
    assert np.isnan(got[2]).all()
    assert np.isnan(got[:, 3]).all()
    assert not np.isfinite(got[:, 50]).any()
    assert np.isfinite(np.delete(np.delete(got, 2, 0), (3, 50), 1)).all()
