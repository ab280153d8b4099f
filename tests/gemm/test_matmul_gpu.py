"""Every able kernel of a product on a GPU, in every mode of scales and kind of result, against float64."""

import pytest

from fp8core.kernels.gemm.sm90.tiled import loads_scale_tiles
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device
from support.gpu_products import able, case, check, check_all, e4m3, launch, result

pytestmark = pytest.mark.gpu

ROWS_OF_A = (1, 3, 16, 64, 83, 512)
on_hopper = pytest.mark.skipif(
    not device.count() or device.target(0).arch != 90, reason="the library has these modes on sm_90 only"
)


@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("fast", [True, False])
def test_per_tensor(m, fast):
    check_all(case(m=m, fast=fast, seed=m), "generic_decode", "generic_mma")


@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("modes", [("row", "row"), ("tensor", "row"), ("row", "tensor")])
def test_per_row_and_mixes(m, modes):
    check_all(case(*modes, m=m, seed=m), "generic_decode", "generic_mma")


@on_hopper
@pytest.mark.parametrize("m", ROWS_OF_A)
@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("weight", ["block", "group"])
def test_block_scales_of_any_layout_on_every_able_row(m, layout, weight):
    ragged = ("cublaslt_pad_m", "cublaslt_split_m") if m > 4 else ()
    rows = ("cublaslt_relayout",) if m % 4 == 0 else ragged
    check_all(case("group", weight, m=m, layout=layout, seed=m, fast=False), "generic_decode", "generic_mma", *rows)


@on_hopper
@pytest.mark.parametrize("k", [1152, 1280, 1040, 144])
def test_blocks_of_any_number(k):
    check_all(case("group", "block", m=68, n=520, k=k, fast=False), "generic_decode", "generic_mma")


@on_hopper
@pytest.mark.parametrize("m", [5, 66, 255, 515])
@pytest.mark.parametrize(
    "options", [{}, {"offset": 1, "bias": "bfloat16"}, {"lda": 1040, "ldo": 520, "out": "float16"}]
)
@pytest.mark.parametrize("weight", ["block", "group"])
def test_blocks_of_rows_that_four_does_not_divide(m, options, weight):
    made = case("group", weight, m=m, layout="mn", seed=m, fast=False, **options)
    padded = ("cublaslt_pad_m",) if m <= 256 and not options else ()
    check_all(made, "cublaslt_split_m", *padded)
    made.problem = made.problem._replace(prefetch_weight=True)
    check_all(made, "cublaslt_split_m", *padded)


@on_hopper
def test_hopper_modes_are_offered():
    assert "cublaslt" in able(case())
    assert "cublaslt" in able(case("row", "row"))
    assert "cublaslt" in able(case("group", "block", layout="mn"))
    assert "cublaslt_epilogue" in able(case("row", "tensor"))


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
@pytest.mark.parametrize("bias", ["", "same", "float32"])
def test_results_and_biases(out, modes, bias):
    check_all(
        case(*modes, m=20, out=out, bias=out if bias == "same" else bias, fast=False), "generic_decode", "generic_mma"
    )


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("row", "tensor")])
@pytest.mark.parametrize("bias", ["", "float32"])
def test_fp8_results_are_the_same_on_every_able_row(modes, bias):
    made = case(*modes, m=48, out=e4m3(), bias=bias, amax=True, fast=False)
    check_all(made, "generic_decode", "generic_mma")
    rows = able(made)
    first = check(made, rows[0]).copy()
    for row in rows[1:]:
        assert float((check(made, row) != first).mean()) < 0.02, row


def test_codes_saturate():
    made = case(m=48, out=e4m3(), fast=False)
    made.out_scale /= 8
    largest = 448.0 if e4m3().endswith("fn") else 224.0
    for row in able(made):
        kernel = next(k for k in SCALED_MM.kernels if k.name == row)
        launch(made, kernel.plan(made.problem))
        values = result(made) / float(made.out_scale[0])
        assert float(abs(values).max()) == largest, row


def test_amax_of_wide_results():
    check_all(case("row", "row", m=40, amax=True, fast=False), "generic_decode", "generic_mma")


@pytest.mark.parametrize(("a", "b"), [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")])
@pytest.mark.skipif(e4m3().endswith("fnuz") if device.count() else False, reason="OCP formats")
def test_mixed_formats(a, b):
    check_all(case(m=32, a=a, b=b, fast=False), "generic_decode", "generic_mma")


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_rows_further_apart_than_they_are_long(modes):
    check_all(
        case(*modes, m=36, lda=1040, ldb=1056, ldo=520, bias="bfloat16", fast=False), "generic_decode", "generic_mma"
    )


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_vectors_at_odd_addresses(modes):
    rows = ("cublaslt_relayout",) if device.target(0).arch == 90 else ()
    made = case(*modes, m=36, bias="bfloat16", offset=1, fast=False, layout="mn")
    check_all(made, "generic_decode", "generic_mma", *rows)


@on_hopper
@pytest.mark.parametrize("bias", ["", "float32"])
def test_scales_of_a_that_alone_are_aligned(bias):
    """TMA loads them, though the scales of the weight and the bias begin between its words."""
    made = case("group", "block", m=100, bias=bias, offset=1, offset_a=0, fast=False, layout="mn")
    assert made.problem.vectors_alignment == 4
    assert loads_scale_tiles(made.problem)
    check_all(made, "sm90_tiled")


@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_negative_scales(modes):
    made = case(*modes, m=36, fast=False, negative=True)
    check_all(made, "generic_decode", "generic_mma")


@pytest.mark.parametrize(("n", "k"), [(511, 1024), (508, 1024), (512, 1000), (512, 1001), (5, 7), (1, 1)])
@pytest.mark.parametrize("modes", [("tensor", "tensor"), ("row", "row"), ("group", "block")])
def test_ragged_shapes_run_somewhere(n, k, modes):
    check_all(case(*modes, m=13, n=n, k=k, fast=False), "generic_decode", "generic_mma")
