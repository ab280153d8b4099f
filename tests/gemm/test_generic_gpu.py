"""Products of any shape, address, stride, format and mix of scales on a GPU, by every able row, against float64."""

from itertools import product

import numpy as np
import pytest

import fp8core
from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.generic import plan_mma, tiles_of
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ScaledMm
from fp8core.runtime import device
from support import reference
from support.emulation.products import ROUNDING

pytestmark = pytest.mark.gpu
cp = pytest.importorskip("cupy")
ml_dtypes = pytest.importorskip("ml_dtypes")

FN, E5M2, FNUZ, E5M2FNUZ = "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"
POISON = 0xA5
OUT_SCALE = np.float32(0.5)
SUMS = {True: 2.0**-16, False: 2.0**-19}
"""What may be lost of the sum of magnitudes, by use_fast_accum: tensor cores cut what they add behind 24 bits or so, and
sum up to 128 (with fast accumulation all) of k like that."""
SPECIFIED = 3.0e-3
"""Relative Frobenius error that the specification allows, of kernels whose FP8 instructions sum with 14 bits."""


def alignment(*numbers):
    bits = 16
    for number in numbers:
        bits |= number
    return bits & -bits


def matrix(codes, stride, offset):
    """Return memory that holds rows ``stride`` apart from ``offset`` on, among codes that are NaN."""
    rows, cols = codes.shape
    memory = np.full(rows * stride + offset + 64, 0xFF, np.uint8)
    inside = memory[offset : offset + rows * stride].reshape(rows, stride)
    inside[:, :cols] = codes
    return cp.asarray(memory)


def scales(rng, granularity, rows, k):
    blocks = -(-k // 128)
    shape = {"tensor": (1, 1), "row": (rows, 1), "group": (rows, blocks), "block": (-(-rows // 128), blocks)}
    group = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}
    across, along = shape[granularity]
    values = (rng.uniform(0.5, 2, (across, along)) * rng.choice([-1, 1], (across, along))).astype(np.float32)
    strides = {"tensor": (0, 0), "row": (1, 0)}.get(granularity, (along, 1))
    return cp.asarray(values), strides, reference.spread(values, group[granularity], (rows, k))


class Operands:
    """A problem, its operands on device 0, and what float64 makes of them."""

    def __init__(self, shape, modes, offsets, out="bfloat16", bias="", a=FN, b=FN, amax=False, fast=True) -> None:
        rng = np.random.default_rng(sum(shape))
        (m, n, k), (gap_a, gap_b, gap_out) = shape, offsets
        self.offsets = offsets
        codes_a, codes_b = (
            reference.encode(rng.standard_normal(size).astype(np.float32) * 4, name)
            for size, name in (((m, k), a), ((n, k), b))
        )
        lda, ldb, ldo = k + gap_a, k + gap_b, n + gap_out
        self.a, self.b = matrix(codes_a, lda, gap_a), matrix(codes_b, ldb, gap_b)
        self.scale_a, strides_a, each_a = scales(rng, modes[0], m, k)
        self.scale_b, strides_b, each_b = scales(rng, modes[1], n, k)
        addend = rng.standard_normal(n).astype(np.float32) if bias else None
        self.bias = cp.asarray(addend) if bias else None
        self.out_scale = cp.asarray(np.array([OUT_SCALE])) if out not in ROUNDING else None
        self.amax = cp.full(1, 1e30, cp.float32) if amax else None
        numbers = (cp.asarray(reference.decode(codes_a, a) * each_a), cp.asarray(reference.decode(codes_b, b) * each_b))
        numbers = tuple(x.astype(cp.float64) for x in numbers)
        self.want = numbers[0] @ numbers[1].T + (0 if addend is None else cp.asarray(addend.astype(np.float64)))
        self.magnitude = abs(numbers[0]) @ abs(numbers[1]).T + 1
        size = ITEMSIZE[out]
        self.at_out = gap_out * size
        self.storage = cp.full((m * ldo) * size + self.at_out + 64, POISON, cp.uint8)
        codes_at = alignment(gap_a, gap_b, lda, ldb)
        out_at = alignment(self.at_out, ldo * size)
        self.problem = ScaledMm(
            *(device.target(0), m, n, k, a, b, out, *modes, strides_a, strides_b, bias, self.out_scale is not None),
            *(amax, fast, False, lda, ldb, ldo, min(codes_at, out_at)),
        )._replace(codes_alignment=codes_at, out_alignment=out_at)

    def run(self, plan, m=None):
        """Return the result's bytes, of the first ``m`` rows; what lies around them has to stay as it was."""
        p, size = self.problem._replace(m=m or self.problem.m), ITEMSIZE[self.problem.out]
        self.storage[...] = POISON
        scratch = cp.full(plan.scratch_bytes + 1, POISON, cp.uint8)
        at = [x.data.ptr if x is not None else 0 for x in (self.scale_a, self.scale_b, self.bias)]
        at_result = [x.data.ptr if x is not None else 0 for x in (self.out_scale, self.amax)]
        a, b = self.a.data.ptr + self.offsets[0], self.b.data.ptr + self.offsets[1]
        stream = cp.cuda.get_current_stream().ptr
        plan(stream, a, b, *at, self.storage.data.ptr + self.at_out, *at_result, scratch.data.ptr)
        begin, end = self.at_out, self.at_out + p.m * p.ldo * size
        rows = self.storage[begin:end].reshape(p.m, p.ldo * size)
        assert (self.storage[:begin] == POISON).all()
        assert (self.storage[end:] == POISON).all()
        assert (rows[:, p.n * size :] == POISON).all()
        return cp.ascontiguousarray(rows[:, : p.n * size]).get()

    def check(self, plan, sums):
        """Check each number within its rounding and what sums may lose; without `sums` all of them together."""
        p, got = self.problem, self.run(plan)
        want, magnitude = self.want.get(), self.magnitude.get()
        if p.out in ROUNDING:
            dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[p.out]
            error = abs(got.view(dtype).astype(np.float64) - want)
            if sums is None:
                assert np.linalg.norm(error) <= SPECIFIED * max(np.linalg.norm(want), 1e-6)
                return
            assert (error <= ROUNDING[p.out] * abs(want) + sums * magnitude).all()
        else:
            values = reference.decode(got, p.out).astype(np.float64) * float(OUT_SCALE)
            largest = float(reference.decode(reference.encode(np.float32([[1e9]]), p.out), p.out)[0, 0])
            sums = sums or 2.0**-9
            want = np.clip(want, -largest * float(OUT_SCALE), largest * float(OUT_SCALE))
            step = 2.0 ** (-2 if "e5m2" in p.out else -3) / 2
            smallest = 2.0**-10 if "e4m3" in p.out else 2.0**-17
            assert (abs(values - want) <= step * abs(want) * 1.01 + sums * magnitude + smallest).all()
        if self.amax is not None:
            assert abs(float(self.amax[0]) / abs(self.want).max() - 1) < 1e-3


SHAPES = [
    *((1, 1, 1), (1, 17, 15), (7, 33, 16), (16, 50, 100), (33, 129, 259), (64, 200, 1000), (65, 131, 4100)),
    *((130, 70, 333), (300, 257, 2048), (5, 40, 0), (200, 300, 131), (12, 1031, 8193)),
]
MODES = [*product(("tensor", "row", "group"), ("tensor", "row", "group", "block"))]
OFFSETS = [(0, 0, 0), (1, 2, 1), (15, 7, 3), (4, 8, 8), (0, 0, 1)]


def check(made):
    """Check every able row, and the generic kernels in each of their tiles."""
    p = made.problem
    rows = list(SCALED_MM.ranking(p))
    assert {"generic_decode", "generic_mma"} <= {row.name for row in rows}
    for row in rows:
        made.check(row.plan(p), SUMS[p.use_fast_accum] if row.name.startswith("generic") else None)
    for tile in tiles_of(p):
        made.check(plan_mma(p, tile), SUMS[p.use_fast_accum])


@pytest.mark.parametrize("offsets", OFFSETS, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("shape", SHAPES, ids=lambda x: "-".join(map(str, x)))
def test_any_shape_at_any_address(shape, offsets):
    number = SHAPES.index(shape) + OFFSETS.index(offsets)
    out = ("bfloat16", "float32", "float16")[number % 3]
    bias = ("", "float32")[number % 2]
    check(Operands(shape, MODES[number % len(MODES)], offsets, out, bias, fast=number % 2 == 0))
    check(Operands(shape, ("row", "row"), offsets, "float32", bias, fast=number % 2 == 1))


@pytest.mark.parametrize("modes", MODES, ids=lambda x: "-".join(map(str, x)))
@pytest.mark.parametrize("shape", [(9, 150, 517), (70, 150, 517), (70, 151, 512)], ids=lambda x: "-".join(map(str, x)))
def test_any_mix_of_scales(shape, modes):
    check(Operands(shape, modes, (3, 1, 1), "float32", fast=False))


@pytest.mark.parametrize(
    ("a", "b"), [(FN, E5M2), (E5M2, FN), (FNUZ, FNUZ), (FNUZ, E5M2FNUZ), (E5M2FNUZ, FN), (FN, FNUZ)]
)
@pytest.mark.parametrize("m", [9, 100])
def test_any_mix_of_formats(m, a, b):
    check(Operands((m, 75, 300), ("row", "row"), (1, 0, 0), "float32", a=a, b=b))


@pytest.mark.parametrize("out", [FN, E5M2, FNUZ, E5M2FNUZ])
@pytest.mark.parametrize("m", [9, 100])
def test_results_of_fp8_and_amax(m, out):
    check(Operands((m, 75, 300), ("tensor", "row"), (1, 0, 1), out, "float32", amax=True))
    check(Operands((m, 75, 300), ("group", "block"), (1, 0, 1), out))


@pytest.mark.parametrize("m", [9, 100])
def test_every_code_is_the_number_of_its_format(m):
    """Against a row of ones in e4m3fn: NaN stays NaN, infinity infinite."""
    for name in (FN, E5M2, FNUZ, E5M2FNUZ):
        made = Operands((m, 256, 33), ("tensor", "tensor"), (1, 1, 0), "float32", b=name)
        every = np.zeros((256, 34), np.uint8)
        every[:, 5] = np.arange(256)
        ones = np.zeros((m, 34), np.uint8)
        ones[:, 5] = reference.encode(np.float32([[1]]), FN)[0, 0]
        made.b[1 : 1 + every.size] = cp.asarray(every.ravel())
        made.a[1 : 1 + ones.size] = cp.asarray(ones.ravel())
        made.scale_a[...] = made.scale_b[...] = 1
        want = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
        for row in ("generic_decode", "generic_mma"):
            got = made.run(SCALED_MM.kernel(row).plan(made.problem)).view(np.float32)
            np.testing.assert_array_equal(got, np.broadcast_to(want, (m, 256)))


def test_a_row_has_the_same_bits_in_every_batch():
    every = Operands((300, 131, 1029), ("row", "row"), (1, 0, 0), "float32")
    plan = SCALED_MM.kernel("generic_decode").plan
    whole = every.run(plan(every.problem))
    for m in (1, 5, 16, 17, 33, 64, 65):
        some = every.problem._replace(m=m)
        every.problem = some
        assert (every.run(plan(some)) == whole[:m]).all()


@pytest.mark.parametrize("k", [256, 100])
def test_very_many_odd_results(k):
    """On Hopper so many, too, are stored where they belong: only codes are copied."""
    made = Operands((2100, 1501, k), ("row", "row"), (0, 0, 0), bias="float32")
    choice = SCALED_MM.choice(made.problem)
    if device.target(0).arch == 90:
        assert choice.kernel == ("realigned" if k % 16 else "sm90_tiled")
    made.check(SCALED_MM.planned(made.problem, choice), None)


@pytest.mark.parametrize(("m", "n", "k"), [(3, 257, 300), (100, 257, 300), (3, 100, 77)])
def test_layers_of_any_k_keep_their_codes_in_aligned_rows(m, n, k):
    rng = np.random.default_rng(k)
    x, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((m, k), (n, k)))
    layer = fp8core.Fp8Linear.from_weight(cp.asarray(w))
    assert layer.weight.strides[0] % 16 == 0
    plain = fp8core.Fp8Linear(fp8core.quantize(cp.asarray(w)))
    got, same = layer(cp.asarray(x)), plain(cp.asarray(x))
    assert float(abs(got - same).max()) <= 1e-3 * float(abs(same).max())
    assert fp8core.explain(layer, cp.asarray(x)).chosen is not None
