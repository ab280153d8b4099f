"""Products of few rows of codes at any address on Hopper: their maps, which problems the row takes, and their bits."""

import struct

import pytest

from fp8core.kernels.gemm.sm90 import decode_unaligned
from fp8core.kernels.gemm.sm90.decode import decode, narrow_config
from fp8core.kernels.gemm.sm90.decode_config import without_multicast
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED, UnalignedMaps, phases, plan_unaligned
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from support.problems import on

FN = "float8_e4m3fn"


def problem(m, n, k, scale_a="row", scale_b="row", *, ld=None, alignment=1, **changes):
    made = example_product(on(90), scale_a, scale_b, m=m, n=n, k=k)
    return made._replace(lda=ld or k, ldb=ld or k, alignment=alignment, codes_alignment=alignment, **changes)


@pytest.mark.parametrize(
    ("strides", "count"), [((4112, 4112), 1), ((4104, 4112), 2), ((4100, 4100), 4), ((4112, 4098), 8), ((15, 4096), 16)]
)
def test_so_many_rows_on_strides_are_multiples_of_16_bytes(strides, count):
    assert phases(*strides) == count
    assert all(count * stride % 16 == 0 for stride in strides)


@pytest.mark.parametrize(
    ("rows", "columns", "stride", "side", "count"),
    [
        (64, 300, 301, 64, 16), (5000, 4100, 4100, 128, 4), (7, 33, 37, 8, 8), (1, 5, 5, 8, 8), (12, 1000, 1002, 64, 8),
        (20, 64, 64, 32, 1), (9, 40, 48, 16, 16), (64, 20, 31, 64, 16),
    ],
)  # fmt: skip
@pytest.mark.parametrize("pointer", [1 << 20, (1 << 20) + 1, (1 << 20) + 13])
def test_maps_cover_every_row_and_end_with_it(monkeypatch, rows, columns, stride, side, count, pointer):
    """A box reads what its map says: from the offset on, the columns of the rows of a residue, and zeros behind."""
    made = []

    def encode(*geometry):
        made.append(geometry)
        return bytes([len(made)]) * 128

    monkeypatch.setattr(decode_unaligned, "encode", encode)
    packed = UnalignedMaps(rows, columns, stride, side, count).make(pointer)
    assert len(packed) == 16 * 128 + 16 * 4
    offsets = struct.unpack("16i", packed[2048:])
    found = {}
    for first in range(count):
        address, of_residue, width, step, box, box_columns = made[packed[128 * first] - 1]
        assert address % 16 == step % 16 == 0
        assert (box, box_columns) == (side // count, 128)
        if first < rows:
            for i in range(of_residue):
                found[first + i * count] = (address + i * step + offsets[first], width - offsets[first])
    for row, (begin, width) in found.items():
        assert row >= rows or (begin, width) == (pointer + row * stride, columns)
    assert sorted(found) == list(range(rows))


def test_few_rows_at_any_address_choose_it():
    for m in (1, 16, 64):
        for k in (1, 4100, 4101):
            assert SCALED_MM.explain(problem(m, 5000, k)).chosen == "sm90_decode_unaligned"
    assert SCALED_MM.explain(problem(16, 5000, 4096, alignment=16)).chosen == "sm90_decode"
    assert SCALED_MM.explain(problem(65, 5000, 4100)).chosen != "sm90_decode_unaligned"
    stable = problem(65, 5000, 4100, batch_invariant=True)
    assert SCALED_MM.explain(stable).chosen == "sm90_decode_unaligned"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": on(100)}, "needs wgmma"),
        ({"a": "float8_e4m3fnuz"}, "multiplies e4m3fn"),
        ({"scale_a": "group"}, "scales per tensor or row in any mix"),
        ({"scale_dtype": "float8_e8m0fnu"}, "scales of float32"),
        ({"out": FN}, "gives float32, float16 or bfloat16"),
        ({"k": 0}, "needs k from 1"),
        ({"vectors_alignment": 2}, "addresses divisible by 4"),
        ({"lda": 4112, "ldb": 4112, "alignment": 16}, "is for rows of codes that are not aligned to 16 bytes"),
    ],
)
def test_what_it_cannot_do_is_said(changes, words):
    assert words in str(SM90_DECODE_UNALIGNED.refusal(problem(16, 5000, 4100)._replace(**changes)))


# ---- on the device

K = (1, 15, 130, 1001, 3001, 4100)
MODES = [("row", "row"), ("tensor", "row"), ("group", "block"), ("group", "group")]


@pytest.fixture
def operands():
    """Return what makes operands on the device, of which `test_generic_gpu` has the oracle."""
    from gemm.test_generic_gpu import Operands

    return Operands


def aligned(made, pitch):
    """Return the operands of ``made`` in aligned rows of ``pitch`` codes, zeros behind each, and their problem."""
    import cupy as cp

    p, copies = made.problem, []
    for codes, rows, ld, at in ((made.a, p.m, p.lda, made.offsets[0]), (made.b, p.n, p.ldb, made.offsets[1])):
        copy = cp.zeros((rows, pitch), cp.uint8)
        copy[:, : p.k] = codes[at : at + rows * ld].reshape(rows, ld)[:, : p.k]
        copies.append(copy)
    return copies, p._replace(k=pitch, lda=pitch, ldb=pitch)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("m", [1, 8, 9, 17, 33, 64])
def test_bits_are_those_of_aligned_rows(operands, m, modes):
    """Whatever lies between rows, NaN here, and at every residue of addresses and strides."""
    for i, k in enumerate(K):
        out = ("bfloat16", "float32", "float16")[i % 3]
        made = operands((m, 1003, k), modes, (i, 2 * i + 1, i % 2), out, ("", "float32")[i % 2])
        assert SM90_DECODE_UNALIGNED.refusal(made.problem) is None
        config = without_multicast(narrow_config(made.problem), 1003)
        got = made.run(plan_unaligned(made.problem, config))
        made.check(plan_unaligned(made.problem), None)
        pitch = -(-k // 128) * 128
        (a, b), other = aligned(made, pitch)
        made.a, made.b, made.offsets, made.problem = a, b, (0, 0), other
        assert (made.run(decode(other, config)) == got).all(), k


@pytest.mark.gpu
def test_a_row_has_its_bits_whatever_the_batch(operands):
    made = operands((150, 515, 1029), ("row", "row"), (1, 0, 0), "float32")
    made.problem = made.problem._replace(batch_invariant=True)
    every, whole = made.problem, made.run(plan_unaligned(made.problem))
    for m in (1, 5, 16, 17, 33, 64, 65):
        made.problem = every._replace(m=m)
        assert (made.run(plan_unaligned(made.problem)) == whole[:m]).all()
