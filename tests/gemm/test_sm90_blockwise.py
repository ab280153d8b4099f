"""The row "sm90_blockwise": its layouts and refusals anywhere, its products on an H100 or H200 against float64."""

import pytest

from fp8core.kernels.gemm.sm90 import blockwise
from fp8core.kernels.gemm.table import SCALED_MM
from gemm.test_sm90_decode import H200, SMALL, Case, problem

ROW = blockwise.SM90_BLOCKWISE
BLOCK, GROUP = ("group", "block"), ("group", "group")


def blocked(m, n, k, **fields):
    return problem(m, n, k, scale_a="group", scale_b="block", **fields)


@pytest.mark.parametrize("m", [1, 65, 128, 129, 256, 300, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (576, 7168), (4096, 4096), (7168, 16384), (28672, 4096)])
def test_a_layout_is_one_that_is_compiled_and_fits(m, n, k):
    plan = blockwise.fastest(m, n, k, H200)
    assert plan in blockwise.TILES
    for scale_rows in (1, 128):
        depth = blockwise.stages(plan, scale_rows, H200)
        assert depth >= 4
        scales = 4 * depth * (plan.rows + (plan.columns if scale_rows == 1 else 2))
        assert depth * plan.stage_bytes + 1024 + scales + 16 * depth <= H200.shared_bytes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scale_a": "row", "scale_b": "row"}, "1x128"),
        ({"batch_invariant": True}, "batch"),
    ],
)
def test_it_says_what_it_cannot_do(fields, words):
    assert ROW.refusal(blocked(300, 4096, 4096)) is None
    assert words in ROW.refusal(blocked(300, 4096, 4096)._replace(**fields))


@pytest.mark.parametrize(
    "fields", [{"k": 8192}, {"m": 96, "k": 16384, "n": 7168}, {"m": 384, "n": 28672}, {"m": 600, "n": 8192}]
)
def test_where_the_library_was_faster_it_is_able_and_not_preferred(fields):
    made = blocked(300, 4096, 4096)._replace(**fields)
    assert ROW.reservation(blocked(300, 4096, 4096)) is None
    assert ROW.refusal(made) is None
    got = f"got m={made.m} n={made.n} k={made.k}"
    assert ROW.reservation(made).startswith("measured slower than cuBLASLt")
    assert ROW.reservation(made).endswith(got)
    assert ROW.name in [choice.kernel for choice in SCALED_MM.candidates(made)]


@pytest.mark.parametrize(
    ("m", "fields", "chosen"),
    [
        (64, {}, "sm90_decode"),
        (65, {}, "sm90_blockwise"),
        (4096, {"scale_b": "group", "bias": "float32"}, "sm90_blockwise"),
        (300, {"batch_invariant": True}, "sm90_decode"),
    ],
)
def test_more_rows_than_the_decode_kernel_takes_choose_it(m, fields, chosen):
    explanation = SCALED_MM.explain(blocked(m, 4096, 4096)._replace(**fields))
    assert explanation.chosen == chosen


# ---- on the device


class Blocked(Case):
    """The case by this row, laid out as asked."""

    kernel = ROW
    plan = None

    def launch(self, plan):
        return blockwise.blockwise(self.problem, plan or self.plan)


@pytest.mark.gpu
@pytest.mark.parametrize("modes", [BLOCK, GROUP], ids="-".join)
@pytest.mark.parametrize("plan", blockwise.TILES, ids="{0.m_slices}x{0.columns}".format)
def test_every_layout(plan, modes):
    """Ragged ends of m, n and k; a tile, several of them, and more than the device holds at a time."""
    for m, n, k in ((3, 136, 16), (65, 8, 100), (77, 1001, 1000), (300, 1000, 616), (600, 8192, 384)):
        case = Blocked(m, n, k, modes, gap=16 * (m % 2), seed=m)
        case.plan = plan
        case.check()


@pytest.mark.gpu
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_types(out, bias, a, b):
    Blocked(200, 520, 640, BLOCK, a=a, b=b, out=out, bias=bias, size=SMALL[out], seed=3).check()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [65, 67, 127, 129, 255, 258, 511, 1000])
def test_rows(m):
    for modes in (BLOCK, GROUP):
        Blocked(m, 1016, 1024 + 16 * (m % 7), modes, seed=m).check()


@pytest.mark.gpu
@pytest.mark.parametrize("span", [1e-23, 1e-15, 1e23])
@pytest.mark.parametrize("modes", [BLOCK, GROUP], ids="-".join)
def test_extreme_scales(span, modes):
    Blocked(130, 640, 1024, modes, span=span, seed=5).check()


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k"), [(512, 6144, 4096), (4096, 4096, 4096), (96, 8192, 8192), (1000, 7168, 2048)])
def test_equal_inputs_give_equal_bits_by_any_layout(m, n, k):
    case = Blocked(m, n, k, BLOCK, seed=2)
    case.check()
    first = case.run()
    for plan in blockwise.TILES:
        case.plan = plan
        assert bool((case.run() == first).all()), plan


@pytest.mark.gpu
def test_a_weight_that_the_kernel_before_wrote():
    Blocked(300, 8192, 1024, BLOCK, seed=9).check_a_written_weight()


@pytest.mark.gpu
def test_an_early_read_waits_for_what_the_launch_before_it_waited_for():
    Blocked(300, 16384, 8192, BLOCK, seed=6).check_a_weight_written_by_a_kernel_that_does_not_wait()
