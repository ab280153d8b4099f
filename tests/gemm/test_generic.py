"""The products that run anywhere, emulated: any shape, address, stride, format and mix of scales, against float64."""

from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.generic import GENERIC_MMA, Layout, is_direct, layout, plan_decode, plan_mma, tiles_of
from fp8core.kernels.gemm.realigned import realigned
from fp8core.kernels.gemm.requirements import STEPS_OF_16
from fp8core.kernels.requirements import aligned
from fp8core.ops.example_problems import example_product
from fp8core.problem import ScaledMm
from fp8core.target import Target, native_e4m3
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.products import ROUNDING, SUMS, codes
from support.emulation.running import FLOATS, empty, matrix
from support.targets import TARGETS

FN, FNUZ, E5M2, E5M2FNUZ = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"
CUDA_89 = CUDA._replace(arch=89)
HIP_90A = HIP_64._replace(arch=0x90A)
HIP_950 = HIP_64._replace(arch=0x950)
HIP_1100 = HIP_32._replace(arch=0x1100)
GROUP = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}
OUT_SCALE = np.float32(0.37)


def scales_for(granularity, rows, k, seed):
    """Return scales among NaN, their strides as the problem has them, and one scale an element."""
    random = np.random.default_rng(seed)
    blocks = -(-k // 128)
    shape = {"tensor": (1, 1), "row": (rows, 1), "group": (rows, blocks), "block": (-(-rows // 128), blocks)}
    across, along = shape[granularity]
    scale = random.uniform(0.5, 2, (across, along)) * np.exp2(random.integers(-6, 3, (across, along)))
    scale = (scale * random.choice([-1, 1], (across, along))).astype(np.float32)
    kept = np.full((across, 2 * along + 1), np.nan, np.float32)
    kept[:, 0 : 2 * along : 2] = scale
    pitch = 2 * along + 1
    strides = {"tensor": (0, 0), "row": (pitch, 0)}.get(granularity, (pitch, 2))
    return kept, strides, reference.spread(scale, GROUP[granularity], (rows, k))


class Case(NamedTuple):
    """A product: `gaps` codes lie between rows of a, one more between those of b; addresses are odd by `offsets`."""

    m: int
    n: int
    k: int
    scale_a: str = "row"
    scale_b: str = "row"
    out: str = "bfloat16"
    bias: str = ""
    amax: bool = False
    gaps: int = 0
    offsets: tuple[int, int, int] = (0, 0, 0)
    fast: bool = True


class Product:
    """Operands of a case in guarded memory, and launches."""

    def __init__(self, memory, target: Target, case: Case, a: str, b: str) -> None:
        m, n, k = case[:3]
        self.memory, self.case = memory, case
        self.codes = codes(m, k, a, 0), codes(n, k, b, 1)
        given_a, strides_a, self.each_a = scales_for(case.scale_a, m, k, 2)
        given_b, strides_b, self.each_b = scales_for(case.scale_b, n, k, 3)
        addend = (np.random.default_rng(4).standard_normal(n) * 100).astype(FLOATS[case.bias]) if case.bias else None
        self.dtypes, self.addend = (a, b), addend
        odd_gap = case.gaps + bool(case.gaps) if case.gaps % 16 else case.gaps
        at_a, at_b, at_out = case.offsets
        self.left = matrix(memory, self.codes[0], k + case.gaps, offset=at_a)
        self.right = matrix(memory, self.codes[1], k + odd_gap, offset=at_b)
        self.scales = memory.array(given_a), memory.array(given_b)
        self.bias = memory.array(addend) if addend is not None else None
        self.out_scale = memory.array(np.array([OUT_SCALE])) if case.out in FORMATS else None
        whole = all(x % 16 == 0 for x in (at_a, at_b, self.left.stride, self.right.stride, k))
        self.at_out = at_out
        self.problem = ScaledMm(
            *(target, m, n, k, a, b, case.out, case.scale_a, case.scale_b, strides_a, strides_b, case.bias),
            *(self.out_scale is not None, case.amax, case.fast, False, self.left.stride, self.right.stride, n + 3, 1),
        )._replace(codes_alignment=16 if whole else 1)

    def want(self):
        numbers = (reference.decode(c, dtype) for c, dtype in zip(self.codes, self.dtypes, strict=True))
        a, b = numbers
        magnitude = reference.scaled_mm(np.abs(a), np.abs(b).T, np.abs(self.each_a), np.abs(self.each_b).T)
        return reference.scaled_mm(a, b.T, self.each_a, self.each_b.T, self.addend), magnitude

    def __call__(self, plan, *options):
        """Return what a launch writes, and the amax; it fails if anything else is written."""
        case, p = self.case, self.problem
        dtype = FLOATS.get(case.out, np.dtype(np.uint8))
        result = empty(self.memory, (case.m, case.n), dtype, p.ldo, offset=self.at_out * dtype.itemsize)
        amax = self.memory.empty((1,), np.float32)
        launch = plan(p, *options)
        scratch = self.memory.empty((max(launch.scratch_bytes, 1),), np.uint8)
        launch(
            *(0, self.left.pointer, self.right.pointer, *(scale.ctypes.data for scale in self.scales)),
            *(self.bias.ctypes.data if self.bias is not None else 0, result.pointer),
            *(self.out_scale.ctypes.data if self.out_scale is not None else 0, amax.ctypes.data if p.amax else 0),
            scratch.ctypes.data,
        )
        assert (result.gap.view(np.uint8) == 0xA5).all()
        return result.values, amax

    def check(self, plan, *options) -> np.ndarray:
        """Assert that every result is as near as its dtype and fp32 sums allow, and the amax with them."""
        got, amax = self(plan, *options)
        want, magnitude = self.want()
        out = self.case.out
        if out in FORMATS:
            near = reference.encode((want / np.float64(OUT_SCALE)).astype(np.float32), out)
            assert (got == near).mean() > 0.99
            assert reference.relative_error(reference.decode(got, out), reference.decode(near, out)) < 1e-2
        else:
            error = np.abs(got.astype(np.float64) - want)
            assert (error <= ROUNDING[out] * np.abs(want) + SUMS * (magnitude + 400)).all()
        if self.case.amax:
            assert abs(amax[0] / np.abs(want).max() - 1) < 1e-5
        return got


CASES = [
    Case(1, 40, 256, "tensor", "tensor"),
    Case(19, 70, 300, bias="bfloat16", gaps=3),
    Case(17, 33, 131, "tensor", "row", "float32", "float32", amax=True, gaps=5, offsets=(1, 2, 1)),
    Case(33, 200, 300, "group", "block", gaps=20, offsets=(4, 8, 0)),
    Case(5, 40, 256, "group", "group", "float16", "float16", gaps=16, offsets=(0, 16, 1)),
    Case(5, 40, 304, "row", "tensor", "float16", offsets=(0, 0, 0)),
    Case(5, 40, 64, "tensor", "tensor", FN, "float32", amax=True),
    Case(3, 5, 0, bias="bfloat16"),
    Case(3, 5, 1, "row", "block", "float32", offsets=(15, 13, 0)),
    Case(2, 3, 15, "group", "row", "float32", offsets=(7, 1, 0)),
    Case(66, 131, 272, "group", "tensor", "float32", gaps=1, fast=False),
    Case(40, 17, 259, "row", "row", "float32", fast=False, offsets=(3, 11, 1)),
]


THOROUGH = ((CUDA, FN), (HIP_64, FNUZ))
OTHERS = ((CUDA_89, FN), (HIP_64, FN), (HIP_90A, FN), (HIP_950, FN), (HIP_1100, FN), (HIP_32, FN))
"""gfx942 has no FP8 instructions for e4m3fn; sm_90, gfx90a and gfx1100 have none of a warp for any format. (The emulation
of CUDA is one text for every architecture: that without PTX.)"""
ANY = [(*on, case) for on in THOROUGH for case in CASES] + [(*on, case) for on in OTHERS for case in CASES[1:4]]


@pytest.mark.parametrize(("target", "e4m3", "case"), ANY, ids=[f"{t} {c.m}x{c.n}x{c.k}" for t, _, c in ANY])
def test_a_product_is_near_float64(emulator, target, e4m3, case):
    if case.out == FN:
        case = case._replace(out=e4m3)
    with emulator.watch() as memory:
        product = Product(memory, target, case, e4m3, e4m3)
        product.check(plan_decode)
        for shape in tiles_of(product.problem):
            product.check(plan_mma, shape)
    assert {"generic_decode", "generic_mma"} <= set(emulator.launches)


ONE = [(on._replace(multiprocessors=1), e4m3) for on, e4m3 in (*THOROUGH, (CUDA_89, FN))]
"""A device that 40 channels fill, so that a block of few rows has two tiles of 16 channels."""
WIDE = [
    (Case(9, 100, 272, gaps=16), Layout(16, 2, 4)),
    (Case(16, 49, 1040, "group", "block", "float32", "float32", offsets=(16, 0, 1)), Layout(16, 2, 4)),
    (Case(3, 40, 144, "group", "group"), Layout(16, 2, 2)),
    (Case(20, 16, 1041, "tensor", "row", "float16", gaps=3), Layout(32, 1, 8)),
]


@pytest.mark.parametrize(("target", "e4m3"), ONE, ids=lambda x: str(x).split()[0])
@pytest.mark.parametrize(("case", "blocks"), WIDE, ids=[f"{c.m}x{c.n}x{c.k}" for c, _ in WIDE])
def test_blocks_of_two_tiles_and_of_eight_warps(emulator, target, e4m3, case, blocks):
    with emulator.watch() as memory:
        product = Product(memory, target, case, e4m3, e4m3)
        assert layout(product.problem) == blocks
        product.check(plan_decode)


FP8_INSTRUCTIONS = [(CUDA_89, FN, E5M2), (HIP_64, FNUZ, E5M2FNUZ), (HIP_950, FN, E5M2), (HIP_32, FN, E5M2)]


@pytest.mark.parametrize(("target", "e4m3", "e5m2"), FP8_INSTRUCTIONS, ids=lambda x: str(x).split()[0])
def test_codes_of_both_formats_go_to_fp8_instructions_as_they_are(emulator, target, e4m3, e5m2):
    case = Case(18, 35, 139, "row", "row", "float32", offsets=(1, 2, 0))
    with emulator.watch() as memory:
        for a, b in ((e4m3, e5m2), (e5m2, e4m3)):
            product = Product(memory, target, case, a, b)
            assert is_direct(product.problem)
            product.check(plan_decode)
            product.check(plan_mma, tiles_of(product.problem)[-1])


@pytest.mark.parametrize("target", TARGETS, ids=lambda t: str(t).split()[0])
@pytest.mark.parametrize("a", [FN, FNUZ])
@pytest.mark.parametrize("b", FORMATS)
def test_formats_that_a_gpu_lacks_are_converted(target, a, b):
    own = {
        89: (FN, E5M2), 120: (FN, E5M2), 0x942: (FNUZ, E5M2FNUZ), 0x950: (FN, E5M2), 0x1200: (FN, E5M2), 0x1201: (FN, E5M2)
    }.get(target.arch, ())  # fmt: skip
    assert is_direct(example_product(target)._replace(a=a, b=b)) == (a in own and b in own)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("target", [CUDA, CUDA_89, HIP_90A, HIP_64, HIP_950, HIP_32], ids=lambda t: str(t).split()[0])
def test_every_code_is_the_number_of_its_format(emulator, target, name):
    """Each beside a one of the GPU's own format: NaN stays NaN, infinity infinite, zero a zero."""
    k, one = 4, native_e4m3(target)
    with emulator.watch() as memory:
        product = Product(memory, target, Case(1, 256, k, "tensor", "tensor", "float32"), one, name)
        product.left.buffer[...] = reference.encode(np.float32([[0, 1, 0, 0]]), one)
        product.right.buffer[...] = 0
        product.right.buffer[:, 1] = np.arange(256)
        for scale in product.scales:
            scale[...] = 1
        memory.keep()
        got, _ = product(plan_decode)
    want = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(got[0], want)


@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=lambda t: str(t).split()[0])
def test_a_row_has_the_same_bits_in_every_batch(emulator, target):
    with emulator.watch() as memory:
        product = Product(memory, target, Case(67, 20, 270, "tensor", "row", "float32"), FN, FN)
        every, _ = product(plan_decode)
        for m in (1, 16, 17, 33, 66):
            product.case, product.problem = product.case._replace(m=m), product.problem._replace(m=m)
            some, _ = product(plan_decode)
            assert some.tobytes() == every[:m].tobytes()


ALIGNED_COPIES = [
    (Case(70, 131, 272, "row", "row", "bfloat16", "bfloat16"), 3),
    (Case(66, 136, 259, "group", "block", "float32", "float32", gaps=3, offsets=(3, 11, 1)), 3),
    (Case(67, 9, 300, "tensor", "group", "float16", "float16", offsets=(1, 0, 0)), 4),
    (Case(5, 135, 31, "row", "row", FN, offsets=(1, 0, 3)), 4),
    (Case(17, 139, 259, "group", "block", "bfloat16", "bfloat16"), 4),
]


@pytest.mark.parametrize(("target", "e4m3"), [(CUDA_89, FN), (HIP_64, FNUZ)], ids=["sm_89", "gfx942"])
@pytest.mark.parametrize(("case", "launches"), ALIGNED_COPIES, ids=[f"{c.m}x{c.n}x{c.k}" for c, _ in ALIGNED_COPIES])
def test_aligned_copies_make_the_same_product(emulator, target, e4m3, case, launches):
    row = realigned((GENERIC_MMA._replace(requires=(*GENERIC_MMA.requires, aligned(16), STEPS_OF_16)),))
    case = case._replace(out=e4m3) if case.out == FN else case
    with emulator.watch() as memory:
        product = Product(memory, target, case, e4m3, e4m3)
        if case.m == 70:  # only the result is at odd addresses
            product.problem = product.problem._replace(codes_alignment=16)
        assert row.refusal(product.problem) is None
        product.check(row.plan)
    assert len(emulator.launches) == launches, emulator.launches
