"""The product of few rows by FP8 mma.sync, emulated, against float64; and what its row accepts."""

import itertools

import numpy as np
import pytest

from fp8core.kernels.gemm.mma.decode import SM89_DECODE, plan_decode, tiles, warps
from fp8core.kernels.gemm.requirements import MOST_COUNTED
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.runtime import sources
from fp8core.target import Target
from support import reference
from support.emulation import EmulationError, Launcher
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.products import EmulatedProduct, Scales, codes
from support.targets import on

ADA = Target("cuda", 89, 0, 1, 32, 99 << 10)
"""Made up, of one multiprocessor: 49 channels are enough for blocks of two tiles."""
FN, FN_5 = "float8_e4m3fn", "float8_e5m2"
MODES = [*itertools.product(("tensor", "row"), repeat=2), ("group", "block"), ("group", "group")]


def scales(rows, k, granularity, seed, *, size=1.0, along_rows=False):
    """Return scales of both signs and many magnitudes between NaN, and one an element."""
    random = np.random.default_rng(seed)
    blocks = -(-k // 128)
    shape = {"tensor": (1, 1), "row": (rows, 1), "group": (rows, blocks), "block": (-(-rows // 128), blocks)}[
        granularity
    ]
    values = random.uniform(0.5, 2, shape) * np.exp2(random.integers(-6, 0, shape)) * random.choice([-1, 1], shape)
    values = (values * size).astype(np.float32)
    kept = np.full((shape[1], shape[0] + 2) if along_rows else (shape[0], shape[1] + 2), np.nan, np.float32)
    place = kept.T if along_rows else kept
    place[: shape[0], : shape[1]] = values
    strides = tuple(0 if extent == 1 else step // 4 for extent, step in zip(shape, place.strides, strict=True))
    group = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}[granularity]
    return Scales(granularity, kept, strides, reference.spread(values, group, (rows, k)))


class Product(EmulatedProduct):
    """A product by sm89_decode."""

    kernel, plan = SM89_DECODE, plan_decode

    def __init__(
        self, memory, m, n, k, a, b, out, modes, bias="", *, gaps=0, invariant=False, span=1.0, target=ADA
    ):  # fmt: skip
        scale_a = scales(m, k, modes[0], 2, size=span, along_rows=bool(gaps))
        scale_b = scales(n, k, modes[1], 3, size=1 / span, along_rows=not gaps)
        super().__init__(memory, target, (m, n, k), (a, b, out), scale_a, scale_b, bias, gaps=gaps, invariant=invariant)


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(
    ("m", "n", "k", "out", "bias", "gaps"),
    [
        (1, 16, 16, "bfloat16", "", 0),
        (1, 1, 48, "float16", "float16", 16),
        (2, 33, 512, "bfloat16", "bfloat16", 0),
        (8, 17, 256, "float16", "", 16),
        (9, 140, 272, "float32", "float32", 0),
        (16, 49, 528, "bfloat16", "bfloat16", 48),
        (17, 70, 144, "bfloat16", "float32", 32),
        (32, 31, 1040, "float32", "bfloat16", 16),
        (33, 97, 160, "float16", "float32", 0),
        (64, 40, 272, "bfloat16", "", 16),
    ],
)
def test_a_product_is_near_float64(emulator, modes, m, n, k, out, bias, gaps):
    with emulator.watch() as memory:
        product = Product(memory, m, n, k, FN, FN, out, modes, bias, gaps=gaps)
        first, again = product(), product()
    product.check(first)
    assert first.tobytes() == again.tobytes()
    assert emulator.launches == ["sm89_decode", "sm89_decode"]


@pytest.mark.parametrize(("a", "b"), [(FN, FN_5), (FN_5, FN)])
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize("m", [9, 40])
def test_mixed_formats(emulator, a, b, modes, m):
    with emulator.watch() as memory:
        product = Product(memory, m, 57, 336, a, b, "float16", modes, gaps=16)
        product.check(product())


@pytest.mark.parametrize("k", [16, 32, 48, 64, 80, 112, 128, 144, 192, 256, 320, 496, 1008])
def test_every_length_of_the_last_chunk(emulator, k):
    for modes in (("row", "row"), ("group", "block")):
        with emulator.watch() as memory:
            product = Product(memory, 3, 18, k, FN, FN, "float32", modes, gaps=16)
            product.check(product())


@pytest.mark.parametrize("span", [1e-23, 1e-15, 1e23])
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block"), ("group", "group")], ids="-".join)
def test_extreme_scales(emulator, span, modes):
    with emulator.watch() as memory:
        product = Product(memory, 5, 90, 272, FN, FN, "float32", modes, span=span)
        product.check(product())


@pytest.mark.parametrize("modes", [("tensor", "row"), ("group", "block")], ids="-".join)
@pytest.mark.parametrize("n", [20, 60])
def test_a_row_has_the_same_bits_in_every_batch(emulator, modes, n):
    with emulator.watch() as memory:
        product = Product(memory, 70, n, 272, FN, FN, "float32", modes, invariant=True)
        every = product()
        product.check(every)
        for m in (1, 5, 8, 9, 16, 17, 33, 64, 65):
            product.shape, product.problem = (m, n), product.problem._replace(m=m)
            assert product().tobytes() == every[:m].tobytes(), m


def test_nan_and_infinity_stay_in_their_row_and_channel(emulator):
    with emulator.watch() as memory:
        Product(memory, 5, 20, 64, FN_5, FN, "float32", ("tensor", "tensor")).check_not_finite()


CALL = """
    KERNEL(32) call(const unsigned* w, const unsigned* t, float* d, int lanes) {
        MmaSum sum = {};
        const unsigned l = lane();
        if (int(l) < lanes)
            mma<E4M3FN, E5M2>(sum, {w[4 * l], w[4 * l + 1], w[4 * l + 2], w[4 * l + 3]}, {t[2 * l], t[2 * l + 1]});
        for (int i = 0; i < 4; ++i) d[4 * l + i] = sum.of[i];
    }"""
"""One matrix instruction: what a lane gives and gets lies at its number."""


def instruct(emulator, w, t, lanes):
    text = sources.flatten_file(sources.root(), "cuda_src/ptx/mma.cuh") + CALL
    kernel = emulator.compile(text, ("-DFP8CORE_WARP=32",), "call", ADA)
    d = np.full((32, 4), np.nan, np.float32)
    Launcher(emulator, kernel, "call", "PPPi", (32, 1, 1), 0, 32, 1, True)(
        0, (1, 1, 1), w.ctypes.data, t.ctypes.data, d.ctypes.data, lanes
    )
    return d


def test_the_instruction_lays_operands_as_published(emulator):
    """Fragments by the formulas of PTX ISA's "Matrix Fragments for mma.m16n8k32" for 8-bit types."""
    a, b = codes(16, 32, FN, 0), codes(8, 32, FN_5, 1).T
    w, t = np.zeros((32, 16), np.uint8), np.zeros((32, 8), np.uint8)
    for lane in range(32):
        group, thread = lane >> 2, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            w[lane, i] = a[row, thread * 4 + (i & 3) + (16 if i >= 8 else 0)]
        for i in range(8):
            t[lane, i] = b[thread * 4 + (i & 3) + (16 if i >= 4 else 0), group]
    got = instruct(emulator, w, t, 32)
    want = reference.decode(a, FN).astype(np.float64) @ reference.decode(b, FN_5).astype(np.float64)
    for lane, i in itertools.product(range(32), range(4)):
        row = (lane >> 2) + (8 if i >= 2 else 0)
        np.testing.assert_allclose(got[lane, i], want[row, lane % 4 * 2 + (i & 1)], rtol=1e-5, atol=1e-3)


def test_the_instruction_wants_the_whole_warp(emulator):
    with pytest.raises(EmulationError, match="collective"):
        instruct(emulator, np.zeros(512, np.uint8), np.zeros(256, np.uint8), 31)


# which problems the row takes


@pytest.mark.parametrize("arch", [89, 120])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("m", [1, 64])
def test_few_rows_choose_it_before_the_library(arch, modes, m):
    explanation = SCALED_MM.explain(example_product(on(arch), *modes, m=m))
    assert explanation.chosen == "sm89_decode"
    names = [verdict.kernel for verdict in explanation.verdicts]
    assert names.index("sm90_decode") < names.index("sm89_decode") == names.index("cublaslt") - 1


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_where_the_instruction_is_not_in_hardware_it_is_not_taken(arch):
    refusal = SM89_DECODE.refusal(example_product(on(arch), "row", "row", m=8))
    assert (
        refusal
        == f"needs fp8_mma (sm_89, sm_120 and later, gfx942, gfx950, gfx1200, gfx1201), got sm_{arch} (device 0)"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": Target("hip", 0x942, 0, 304, 64, 64 << 10)}, "needs cuda, got gfx942 (device 0)"),
        ({"a": FN_5, "b": FN_5}, "needs e4m3fn or e5m2, but not e5m2 for both"),
        ({"b": "float8_e4m3fnuz"}, "but not e5m2 for both, got a float8_e4m3fn and b float8_e4m3fnuz"),
        ({"a": "float8_e4m3fnuz"}, "needs e4m3fn or e5m2, but not e5m2 for both, got a float8_e4m3fnuz"),
        ({"k": 4104, "lda": 4112, "ldb": 4112}, "lda and ldb that are multiples of 16, got k=4104"),
        ({"lda": 4104}, "multiples of 16, got k=4096 lda=4104"),
        ({"ldb": 4104}, "multiples of 16, got k=4096 lda=4096 ldb=4104"),
        ({"k": 0}, "multiples of 16, got k=0"),
        ({"k": 1 << 30, "lda": 1 << 30, "ldb": 1 << 30}, "needs k of less than 2**30, got k=1073741824"),
        ({"m": MOST_COUNTED + 1, "n": 16}, f"needs m, n and k of at most {MOST_COUNTED}, got m={MOST_COUNTED + 1}"),
        ({"n": 1 << 30}, "less than 2**31 blocks of 64 x 16 results, got m=8 and n=1073741824"),
        ({"m": 1 << 18, "n": 1 << 23}, "less than 2**31 blocks of 64 x 16 results, got m=262144 and n=8388608"),
        ({"m": (1 << 18) - 63, "n": 1 << 23}, "less than 2**31 blocks of 64 x 16 results, got m=262081"),
        ({"alignment": 8, "codes_alignment": 16}, "aligned to 16 bytes, got 8"),
        ({"scale_dtype": "float8_e8m0fnu"}, "takes scales of float32, got float8_e8m0fnu"),
        ({"alignment": 8}, "aligned to 16 bytes, got 8"),
        ({"vectors_alignment": 2}, "divisible by 4, got 2"),
        ({"scale_b": "block"}, "or 1x128 with 1x128 or 128x128, got scale_a per row and scale_b per block"),
        ({"scale_a": "group"}, "or 1x128 with 1x128 or 128x128, got scale_a per group and scale_b per row"),
        (
            {"out": FN, "out_scale": True},
            "without out_scale and amax, got float8_e4m3fn with out_scale=True amax=False",
        ),
        ({"amax": True}, "without out_scale and amax, got bfloat16 with out_scale=False amax=True"),
        ({"m": 1 << 20, "n": 1 << 24, "batch_invariant": True}, "less than 2**31 blocks"),
    ],
)
def test_what_it_cannot_do_is_said(changes, reason):
    refusal = SM89_DECODE.refusal(example_product(on(89), "row", "row", m=8)._replace(**changes))
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("arch", [89, 120])
def test_warps_share_k_and_fill_the_device(arch):
    target = on(arch)
    assert warps(1 << 20, 1 << 14, target) == 4
    assert warps(16, 1 << 14, target) == 8
    assert warps(16, 16, target) == warps(16, 128, target) == 1
    assert warps(16, 144, target) == 2
    assert warps(16, 3 * 128, target) == 4
    assert [tiles(1 << 20, side, target) for side in (8, 16, 32, 64)] == [1, 1, 2, 2]
    assert [tiles(512, side, target) for side in (8, 16, 32, 64)] == [1, 1, 1, 1]
