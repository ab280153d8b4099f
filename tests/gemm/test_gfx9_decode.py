"""The product of few rows on AMD's matrix instructions, emulated, against float64; and what its row accepts."""

import numpy as np
import pytest

from fp8core.kernels.encodings import power_of_two
from fp8core.kernels.gemm.amd.decode import GFX9_DECODE, plan_decode, wavefronts
from fp8core.kernels.gemm.generic import GENERIC_MMA, ClearArgs
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from support import reference
from support.emulation import HIP_32, HIP_64, EmulationError, Launcher
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.products import EmulatedProduct, Scales, codes
from support.targets import TARGETS, on

HIP_950 = HIP_64._replace(arch=0x950)
FNUZ, FNUZ_5 = "float8_e4m3fnuz", "float8_e5m2fnuz"
FN, FN_5 = "float8_e4m3fn", "float8_e5m2"


def scales(rows, granularity, seed, *, step=1):
    """Return scales of both signs and many magnitudes ``step`` apart, and one a row."""
    random = np.random.default_rng(seed)
    count = rows if granularity == "row" else 1
    values = random.uniform(0.5, 2, count) * np.exp2(random.integers(-6, 0, count)) * random.choice([-1, 1], count)
    given = np.full((count, step), np.nan, np.float32)
    given[:, 0] = values
    strides = (step, 0) if granularity == "row" else (0, 0)
    return Scales(granularity, given, strides, np.broadcast_to(given[:, :1], (rows, 1)))


class Product(EmulatedProduct):
    """A product by gfx9_decode."""

    kernel, plan = GFX9_DECODE, plan_decode

    def __init__(self, memory, target, m, n, k, a, b, out, scale_a, scale_b, bias="", *, gaps=0, invariant=False):
        each = scales(m, scale_a, 2), scales(n, scale_b, 3, step=3)
        super().__init__(memory, target, (m, n, k), (a, b, out), *each, bias, gaps=gaps, invariant=invariant)


TARGETS_AND_FORMATS = [(HIP_64, FNUZ, FNUZ_5), (HIP_950, FN, FN_5), (HIP_32, FN, FN_5)]


@pytest.mark.parametrize(("target", "e4m3", "_"), TARGETS_AND_FORMATS, ids=["gfx942", "gfx950", "gfx1201"])
@pytest.mark.parametrize(
    ("m", "n", "k", "scale_a", "scale_b", "out", "bias", "gaps"),
    [
        (1, 16, 16, "tensor", "tensor", "bfloat16", "", 0),
        (1, 1, 48, "row", "row", "float16", "float16", 16),
        (2, 33, 512, "row", "row", "bfloat16", "bfloat16", 0),
        (3, 40, 80, "tensor", "row", "bfloat16", "float32", 32),
        (7, 17, 256, "row", "tensor", "float16", "", 16),
        (8, 31, 272, "row", "row", "float32", "float32", 0),
        (15, 64, 528, "tensor", "tensor", "bfloat16", "bfloat16", 48),
        (16, 47, 512 + 16, "row", "row", "bfloat16", "", 16),
        (16, 16, 1024 + 32, "tensor", "row", "float16", "float16", 0),
    ],
)
def test_a_product_is_near_float64(emulator, target, e4m3, _, m, n, k, scale_a, scale_b, out, bias, gaps):
    with emulator.watch() as memory:
        product = Product(memory, target, m, n, k, e4m3, e4m3, out, scale_a, scale_b, bias, gaps=gaps)
        first, again = product(), product()
    product.check(first)
    assert first.tobytes() == again.tobytes()
    assert emulator.launches == ["gfx9_decode", "gfx9_decode"]


@pytest.mark.parametrize(("target", "e4m3", "e5m2"), TARGETS_AND_FORMATS, ids=["gfx942", "gfx950", "gfx1201"])
def test_mixed_formats(emulator, target, e4m3, e5m2):
    for a, b in ((e4m3, e5m2), (e5m2, e4m3)):
        with emulator.watch() as memory:
            product = Product(memory, target, 9, 47, 336, a, b, "float16", "row", "row", gaps=16)
            product.check(product())


@pytest.mark.parametrize("target", [HIP_64, HIP_32])
@pytest.mark.parametrize("k", [16, 32, 48, 64, 96, 128, 144, 256, 320, 496])
def test_every_length_of_the_last_chunk(emulator, target, k):
    e4m3 = FNUZ if target is HIP_64 else FN
    with emulator.watch() as memory:
        product = Product(memory, target, 3, 18, k, e4m3, e4m3, "float32", "row", "row", gaps=16)
        product.check(product())


@pytest.mark.parametrize("target", [HIP_64, HIP_32])
def test_a_row_has_the_same_bits_in_every_batch(emulator, target):
    e4m3 = FNUZ if target is HIP_64 else FN
    with emulator.watch() as memory:
        product = Product(memory, target, 37, 20, 272, e4m3, e4m3, "float32", "tensor", "row", invariant=True)
        every = product()
        product.check(every)
        for m in (1, 5, 16, 17):
            product.shape, product.problem = (m, 20), product.problem._replace(m=m)
            assert product().tobytes() == every[:m].tobytes()


def test_nan_and_infinity_stay_in_their_row_and_channel(emulator):
    with emulator.watch() as memory:
        Product(memory, HIP_32, 5, 20, 64, FN_5, FN, "float32", "tensor", "tensor").check_not_finite()


CALLS = {
    HIP_64: """using Sum = float __attribute__((ext_vector_type(4)));
        void kernel(const long* a, const long* b, float* d, int lanes) {
          int lane = __builtin_amdgcn_workitem_id_x();
          Sum sum = {};
          if (lane < lanes) sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_bf8(a[lane], b[lane], sum, 0, 0, 0);
          for (int i = 0; i < 4; i++) d[64 * i + lane] = sum[i]; }""",
    HIP_32: """using Sum = float __attribute__((ext_vector_type(8)));
        using Two = int __attribute__((ext_vector_type(2)));
        void kernel(const Two* a, const Two* b, float* d, int lanes) {
          int lane = __builtin_amdgcn_workitem_id_x();
          Sum sum = {};
          if (lane < lanes) sum = __builtin_amdgcn_wmma_f32_16x16x16_fp8_bf8_w32_gfx12(a[lane], b[lane], sum);
          for (int i = 0; i < 8; i++) d[32 * i + lane] = sum[i]; }""",
}
"""One matrix instruction: what a lane gives and gets lies at its number."""


def instruct(emulator, target, a, b, lanes):
    text = CALLS[target].replace("void kernel", 'extern "C" __global__ void kernel')
    kernel = emulator.compile(f'#line 1 "test.hip"\n{text}', (), "kernel", target)
    d = np.full(256, np.nan, np.float32)
    Launcher(emulator, kernel, "kernel", "PPPi", (target.warp, 1, 1), 0, target.warp, 1, True)(
        0, (1, 1, 1), a.ctypes.data, b.ctypes.data, d.ctypes.data, lanes
    )
    return d.reshape(256 // target.warp, target.warp)


@pytest.mark.parametrize("target", CALLS)
def test_matrix_instructions_lay_operands_as_published(emulator, target):
    lane = np.arange(target.warp)
    depth, registers = target.warp // 2, 256 // target.warp
    first, second = (FNUZ, FNUZ_5) if target is HIP_64 else (FN, FN_5)
    a, b = codes(16, depth, first, 0), codes(16, depth, second, 1)  # the rows of A and the columns of B
    blocks = [x.reshape(16, depth // 8, 8)[lane % 16, lane // 16].copy() for x in (a, b)]
    got = instruct(emulator, target, *blocks, target.warp)
    want = reference.decode(a, first).astype(np.float64) @ reference.decode(b, second).astype(np.float64).T
    for register in range(registers):
        row, column = registers * (lane // 16) + register, lane % 16
        np.testing.assert_allclose(got[register], want[row, column], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("target", CALLS)
def test_matrix_instructions_want_the_whole_wave(emulator, target):
    none = np.zeros(8 * target.warp, np.uint8)
    with pytest.raises(EmulationError, match="collective"):
        instruct(emulator, target, none, none, target.warp - 1)


# which problems the row takes


@pytest.mark.parametrize("arch", [0x942, 0x950, 0x1200, 0x1201])
@pytest.mark.parametrize("scale_a", ["tensor", "row"])
@pytest.mark.parametrize("scale_b", ["tensor", "row"])
@pytest.mark.parametrize("m", [1, 16])
def test_few_rows_choose_it_before_the_library(arch, scale_a, scale_b, m):
    explanation = SCALED_MM.explain(example_product(on(arch), scale_a, scale_b, m=m))
    assert explanation.chosen == "gfx9_decode"
    names = [verdict.kernel for verdict in explanation.verdicts]
    assert names.index("gfx9_decode") < names.index("hipblaslt")


@pytest.mark.parametrize(
    ("arch", "changes", "reason"),
    [
        (0x90A, {}, "needs fp8_mma (sm_89, sm_120 and later, gfx942, gfx950, gfx1200, gfx1201), got gfx90a (device 0)"),
        (
            0x1100,
            {},
            "needs fp8_mma (sm_89, sm_120 and later, gfx942, gfx950, gfx1200, gfx1201), got gfx1100 (device 0)",
        ),
        (0x942, {"a": FN}, "needs fnuz formats on gfx942 and OCP's on later GPUs, got a float8_e4m3fn"),
        (0x950, {"b": FNUZ}, "needs fnuz formats on gfx942 and OCP's on later GPUs"),
        (0x1201, {"a": FN_5, "b": FN_5}, "both e5m2"),
        (0x942, {"k": 4104, "lda": 4112, "ldb": 4112}, "lda and ldb that are multiples of 16, got k=4104"),
        (0x942, {"ldb": 4100}, "multiples of 16, got k=4096 lda=4096 ldb=4100"),
        (0x942, {"alignment": 8}, "aligned to 16 bytes, got 8"),
        (0x942, {"k": 0}, "multiples of 16, got k=0"),
        (0x942, {"scale_a": "group", "scale_b": "block"}, "per tensor or row in any mix, got scale_a per group"),
        (0x942, {"out": FNUZ, "out_scale": True}, "gives float32, float16 or bfloat16 without out_scale and amax"),
        (0x942, {"amax": True}, "without out_scale and amax"),
        (0x942, {"m": 1 << 20, "n": 1 << 20, "batch_invariant": True}, "less than 2**31 blocks"),
        (
            0x942,
            {"m": 1 << 16, "n": 1 << 16, "ldo": 1 << 16, "batch_invariant": True},
            "needs at most 16777215 blocks of 256 threads, got 16777216 for m=65536 and n=65536",
        ),
    ],
)
def test_what_it_cannot_do_is_said(arch, changes, reason):
    problem = example_product(on(arch), "row", "row", m=8)._replace(**changes)
    refusal = GFX9_DECODE.refusal(problem)
    assert refusal is not None
    assert reason in refusal


@pytest.mark.parametrize("target", [target for target in TARGETS if target.platform == "hip"])
def test_waves_share_k_and_fill_the_device(target):
    chunk = 4 * target.warp
    assert wavefronts(1 << 20, 1 << 14, target) == 4
    assert wavefronts(16, 1 << 14, target) == 16
    assert wavefronts(16, 16, target) == 1
    assert wavefronts(16, chunk, target) == 1
    assert wavefronts(16, chunk + 16, target) == 2
    assert wavefronts(16, 3 * chunk, target) == 4


def test_nothing_fits_into_a_power_of_two_of_one():
    assert [power_of_two(number) for number in range(6)] == [1, 1, 2, 4, 4, 8]


@pytest.mark.parametrize(("platform", "able"), [("hip", False), ("cuda", True)])
def test_hip_counts_the_threads_of_a_grid_and_cuda_its_blocks(platform, able):
    """A product whose grid HIP cannot have: 2**24 blocks of 256 threads are 2**32 of them."""
    target = on(0x942)._replace(platform=platform, arch=0x942 if platform == "hip" else 90)
    large = example_product(target, m=1 << 19, n=1 << 19)._replace(batch_invariant=True)
    assert (GENERIC_MMA.refusal(large) is None) is able
    largest = large._replace(m=4095 * 128, n=4097 * 128)  # one block less
    assert GENERIC_MMA.refusal(largest) is None
    few = example_product(on(0x942), m=(1 << 16) - 16, n=1 << 16)._replace(batch_invariant=True)
    assert SCALED_MM.explain(few).chosen == "gfx9_decode"
    assert SCALED_MM.explain(few._replace(m=1 << 16)).chosen == "generic_decode"


def test_the_emulation_refuses_the_grids_that_hip_refuses(emulator):
    """As far as it can without running them: the rule stands before the launch."""
    launch = emulator.prepare(HIP_64, "gemm/clear_amax", "clear_amax", {}, ClearArgs, block=1024)
    with pytest.raises(EmulationError, match=r"no device takes the grid \(4194304, 1, 1\) of \(1024, 1, 1\)"):
        launch(0, (1 << 22, 1, 1), 0)
