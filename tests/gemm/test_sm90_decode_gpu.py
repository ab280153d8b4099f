"""Products of the row "sm90_decode" on an H100 or H200 against float64."""

import pytest

from fp8core.kernels.gemm.sm90 import decode, decode_config
from support.sm90_products import MODES, OUTS, SMALL, Case

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 32, 33, 48, 63, 64)


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("m", ROWS)
def test_rows_and_modes(m, modes):
    Case(m, 1000 + 8 * m, 1024 + 16 * m, modes, gap=16 * (m % 3), seed=m // 4 + (m % 4 == 0)).check()


@pytest.mark.parametrize("n", [1, 7, 63, 64, 65, 127, 129, 1001, 8193])
@pytest.mark.parametrize("k", [1, 16, 100, 128, 129, 1000, 3000])
def test_ragged_shapes(n, k):
    for out, modes in (("float32", ("row", "row")), ("bfloat16", ("group", "block")), ("float16", ("tensor", "row"))):
        Case(5, n, k, modes, out=out, size=SMALL[out], seed=n + k).check()


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("m", [5, 16, 40])
def test_rows_of_the_result_at_any_of_its_elements(m, out):
    for n, ldo, shift in OUTS:
        Case(m, n, 1500, out=out, ldo=ldo, shift=shift, seed=ldo).check()


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("m", "n"), [(16, 163_840), (32, 81_928), (64, 40_960), (61, 41_000), (64, 41_001)])
def test_results_that_stay_in_the_cache(m, n, modes):
    case = Case(m, n, 256, modes, seed=m)
    case.check(decode.config_for(case.problem)._replace(keeps_result=True))


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("n", "k"), [(28672, 4096), (512, 16384)])
def test_an_early_read_waits_for_what_the_launch_before_it_waited_for(n, k, modes):
    Case(8, n, k, modes, seed=6).check_a_weight_written_by_a_kernel_that_does_not_wait()


@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", ["", "bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("a", "b"), [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")])
def test_any_dtype_of_operands_bias_and_result(out, bias, a, b):
    modes = ("group", "block") if bias == "float32" else ("row", "row")
    Case(17, 520, 640, modes, a=a, b=b, out=out, bias=bias, size=SMALL[out], seed=3).check()


@pytest.mark.parametrize("span", [1e-23, 1e-15, 1e23])
@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
def test_extreme_scales(span, modes):
    Case(6, 640, 1024, modes, span=span, seed=5).check()


@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (6144, 4096), (28672, 1024), (7168, 16384), (512, 16384)])
@pytest.mark.parametrize("fast", [True, False])
def test_models_shapes(n, k, fast):
    for m, modes in ((1, ("row", "row")), (64, ("tensor", "tensor")), (16, ("group", "block"))):
        Case(m, n, k, modes, fast=fast, seed=m).check()


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2112, 7168), (28672, 1024)])
def test_a_row_has_its_bits_whatever_the_batch(n, k, modes):
    case = Case(200, n, k, modes, invariant=True, seed=2)
    full = case.run()
    case.check()
    for m in (1, 5, 8, 9, 16, 31, 64, 65):
        case.problem, case.m = case.problem._replace(m=m), m
        assert bool((case.run() == full[:m]).all()), m


@pytest.mark.parametrize("modes", [("row", "row"), ("group", "block")])
@pytest.mark.parametrize(("blocks", "tiles_together"), [(1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)])
@pytest.mark.parametrize("groups", [(1, 1), (1, 2), (2, 1)])
def test_blocks_that_share_what_they_load_of_a_give_the_same_bits(groups, blocks, tiles_together, modes):
    case = Case(64, 2600, 3000, modes, seed=4)  # tiles and chunks that no cluster divides
    for clusters in (1, 3):
        plan = decode_config.DecodeConfig(blocks, clusters, *groups, 1, 8, multicast_tiles=tiles_together)
        alone = decode_config.without_multicast(plan, case.n)
        assert alone.cluster == blocks
        assert bool((case.run(plan=plan) == case.run(plan=alone)).all()), clusters
    case.check()


@pytest.mark.parametrize("k", [1024, 16384])
def test_a_weight_that_the_kernel_before_wrote(k):
    Case(8, 8192, k, seed=9).check_a_written_weight()
