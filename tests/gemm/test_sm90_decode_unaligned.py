"""Products of few rows with a weight at any address on Hopper: its maps, which problems the row takes, and results."""

import struct

import numpy as np
import pytest

from fp8core.kernels.gemm.sm90 import decode_unaligned
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED, UnalignedMaps, phases_of, plan_unaligned
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from support.problems import on

FN, E5M2 = "float8_e4m3fn", "float8_e5m2"


def problem(m, n, k, *, alignment=1, **changes):
    made = example_product(on(90), "row", "row", m=m, n=n, k=k)
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

    monkeypatch.setattr(decode_unaligned, "encode", encode)
    packed = UnalignedMaps(rows, columns, stride, tile, 128).make(pointer)
    assert len(packed) == 16 * 128 + 16 * 4
    offsets, count, found = struct.unpack("16i", packed[2048:]), phases_of(stride), []
    for first in range(min(count, rows)):
        address, of_residue, width, step, *box = made[packed[128 * first] - 1]
        assert address % 16 == step % 16 == 0
        assert box == [tile, 128]
        assert address + offsets[first] == pointer + first * stride
        assert width - offsets[first] == columns
        assert 0 <= offsets[first] < 16
        assert step == count * stride
        found += range(first, rows, count)[:of_residue]
        assert len(range(first, rows, count)) == of_residue
    assert sorted(found) == list(range(rows))


def test_few_rows_at_any_address_choose_it():
    for m in (1, 16, 64):
        for k in (1, 4100, 4101):
            assert SCALED_MM.explain(problem(m, 5000, k)).chosen == "sm90_decode_unaligned"
    assert SCALED_MM.explain(problem(16, 5000, 4096, alignment=16)).chosen == "sm90_decode"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": on(100)}, "needs wgmma"),
        ({"a": "float8_e4m3fnuz"}, "multiplies e4m3fn"),
        ({"scale_a": "group", "scale_b": "block"}, "takes scales per tensor or row in any mix"),
        ({"scale_dtype": "float8_e8m0fnu"}, "scales of float32"),
        ({"out": FN}, "gives float32, float16 or bfloat16"),
        ({"k": 0}, "needs k from 1"),
        ({"m": 65}, "needs at most 64 rows, got m=65"),
        ({"batch_invariant": True}, "not batch-invariant"),
        ({"vectors_alignment": 2}, "addresses divisible by 4"),
        ({"lda": 4112, "ldb": 4112, "alignment": 16}, "is for rows of codes that are not aligned to 16 bytes"),
    ],
)
def test_what_it_cannot_do_is_said(changes, words):
    assert words in str(SM90_DECODE_UNALIGNED.refusal(problem(16, 5000, 4100)._replace(**changes)))


# ---- on the device

CUT_OFF = 2.0**-10
"""The tensor cores cut off what lies 14 bits or so below the largest of 32 products: relative to the sum of sizes."""


@pytest.fixture
def operands():
    """Return what makes operands on the device, among NaN."""
    from gemm.test_generic_gpu import Operands

    return Operands


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8, 9, 17, 33, 64])
@pytest.mark.parametrize("k", [1, 15, 113, 130, 1001, 3001, 4100])
def test_results_at_every_residue_of_addresses_and_strides(operands, m, k):
    for i in range(4):
        out, bias = ("bfloat16", "float32", "float16")[i % 3], ("", "float32")[i % 2]
        n, modes = (1003, 5, 2570)[(i + m) % 3], (("row", "row"), ("tensor", "row"), ("row", "tensor"))[i % 3]
        a, b = ((FN, FN), (E5M2, FN), (FN, E5M2))[i % 3]
        made = operands((m, n, k), modes, (5 * i, 4 * i + (k + m) % 16, i % 2), out, bias, a, b)
        if SM90_DECODE_UNALIGNED.refusal(made.problem) is None:
            made.check(plan_unaligned(made.problem), CUT_OFF)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(100, 77), (2100, 4100)])
def test_nan_and_infinity_stay_in_their_row_and_channel(operands, n, k):
    """Rows lie without gaps: what precedes a row's first code is the row before."""
    made = operands((5, n, k), ("row", "row"), (0, 0, 0), "float32", b=E5M2)
    made.b.reshape(-1)[3 * k : 4 * k] = 0x7F
    made.b.reshape(-1)[50 * k : 51 * k] = 0x7C
    made.a.reshape(-1)[2 * k : 3 * k] = 0x7F
    got = made.run(plan_unaligned(made.problem)).view(np.float32)
    assert np.isnan(got[2]).all()
    assert np.isnan(got[:, 3]).all()
    assert not np.isfinite(got[:, 50]).any()
    assert np.isfinite(np.delete(np.delete(got, 2, 0), (3, 50), 1)).all()
