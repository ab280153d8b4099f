"""Products of few rows with a weight at any address on Hopper: its maps, which problems the row takes, and results."""

import struct

import numpy as np
import pytest

from fp8core.kernels.gemm.sm90 import decode_unaligned
from fp8core.kernels.gemm.sm90.decode_config import clusters_at_once
from fp8core.kernels.gemm.sm90.decode_unaligned import (
    SM90_DECODE_UNALIGNED,
    UnalignedMaps,
    layout,
    phases_of,
    plan_shift,
    plan_unaligned,
)
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from support.emulation import CUDA
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.memory import POISON
from support.emulation.running import matrix
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


@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("k", [4097, 4098, 4100, 4104])
@pytest.mark.parametrize("n", [5, 1003, 5000, 12345, 57344])
def test_every_cluster_has_as_many_tiles(m, n, k):
    """As far as they can: no cluster takes a second tile where others could take it."""
    for early in (False, True):
        p = problem(m, n, k, prefetch_weight=early)
        config, count = layout(p), phases_of(k)
        tiles = count * -(-n // (count * config.tile))
        most = clusters_at_once(p.target)[config.cluster] * config.ctas_per_sm
        assert config.multicast_tiles == 1
        assert config.clusters <= tiles
        assert -(-tiles // config.clusters) == -(-tiles // min(tiles, most))


def test_few_rows_at_any_address_choose_it():
    for m in (1, 16, 64):
        for k in (1, 4100, 4101):
            assert SCALED_MM.explain(problem(m, 5000, k)).chosen == "sm90_decode_unaligned"
    assert SCALED_MM.explain(problem(16, 5000, 4096, alignment=16)).chosen == "sm90_decode"


@pytest.mark.parametrize(("m", "kernel"), [(1, "sm90_decode"), (64, "sm90_decode"), (300, "sm90_tiled")])
@pytest.mark.parametrize("k", [4100, 4101])
def test_a_weight_of_odd_k_in_aligned_rows_is_not_copied(m, kernel, k):
    """As `Fp8Linear.from_weight` keeps it: rows of 4112 codes, of which some count."""
    padded = problem(m, 5008, k, alignment=16)._replace(lda=4112, ldb=4112)
    assert SCALED_MM.explain(padded).chosen == kernel


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": on(100)}, "needs wgmma"),
        ({"a": "float8_e4m3fnuz"}, "multiplies e4m3fn"),
        ({"scale_a": "group", "scale_b": "block"}, "takes scales per tensor or row in any mix"),
        ({"scale_dtype": "float8_e8m0fnu"}, "scales of float32"),
        ({"out": FN}, "gives float32, float16 or bfloat16"),
        ({"k": 0}, "needs k > 0"),
        ({"k": 1 << 23, "ldb": (1 << 23) + 1}, "copies of a of less than 1073741824 bytes, got k=8388608"),
        ({"m": 65}, "needs at most 64 rows, got m=65"),
        ({"batch_invariant": True}, "not batch-invariant"),
        ({"vectors_alignment": 2}, "addresses divisible by 4"),
        ({"lda": 4112, "ldb": 4112, "alignment": 16}, "is for rows of codes that are not aligned to 16 bytes"),
    ],
)
def test_what_it_cannot_do_is_said(changes, words):
    assert words in str(SM90_DECODE_UNALIGNED.refusal(problem(16, 5000, 4100)._replace(**changes)))


@pytest.mark.parametrize(
    ("m", "k", "ldb", "gap", "at_a", "at_b"),
    [(5, 130, 131, 3, 1, 0), (1, 1, 2, 0, 0, 13), (9, 113, 116, 0, 15, 4), (3, 33, 40, 15, 8, 1), (2, 16, 16, 1, 0, 7)],
)
def test_copies_of_a_begin_as_far_behind_a_multiple_as_the_rows_of_b(emulator, m, k, ldb, gap, at_a, at_b):
    """Zeros before and behind, nothing else is written, and nothing beside a is read: b is not."""
    codes = np.random.default_rng(k).integers(0, 256, (m, k), np.uint8)
    count, ld, rows, address = phases_of(ldb), 256, 16 if m > 8 else 8, (1 << 20) + at_b
    with emulator.watch() as memory:
        a = matrix(memory, codes, k + gap, offset=at_a)
        copies = memory.empty((count, rows, ld), np.uint8)
        plan_shift(problem(m, 64, k, target=CUDA)._replace(lda=a.stride, ldb=ldb), ld)(
            0, a.pointer, copies.ctypes.data, address
        )
    for i, copy in enumerate(copies):
        want = np.zeros((m, ld), np.uint8)
        offset = (address + i * ldb) % 16
        want[:, offset : offset + k] = codes
        np.testing.assert_array_equal(copy[:m], want)
        assert (copy[m:] == POISON).all()


# ---- on the device

CUT_OFF = 2.0**-10
"""The tensor cores cut off what lies 14 bits or so below the largest of 32 products: relative to the sum of sizes."""


@pytest.fixture
def operands():
    """Return what makes operands on the device, among NaN."""
    from gemm.test_generic_gpu import Operands

    return Operands


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 9, 33, 64])
@pytest.mark.parametrize("k", [15, 130, 1001, 4100])
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
