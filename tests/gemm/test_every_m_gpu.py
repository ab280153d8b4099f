"""Products of few rows on an H100 or H200, for every number of rows: modes and dtypes element by element, within bounds
that follow from the formats; rows that do not feel their batch; workspaces that begin poisoned."""

import numpy as np
import pytest

import fp8core
from fp8core.dtypes import HIGH_PRECISION
from fp8core.kernels.gemm.sm90 import decode_config
from fp8core.kernels.gemm.table import SCALED_MM
from support.engines import CupyEngine
from support.products import MODES as PRODUCTS
from support.products import operands
from support.sm90_products import MODES, SMALL, Case

pytestmark = pytest.mark.gpu

N, K = 500, 616
"""Neither whole tiles of 64 channels nor whole chunks of 128 of k."""
FORMS = [(out, bias) for out in HIGH_PRECISION for bias in dict.fromkeys(("", out, "float32"))]


def sizes(side):
    """Return every m whose product is compiled for ``side`` rows, the largest first."""
    return [m for m in range(side, 0, -1) if decode_config.width(m) == side]


@pytest.mark.parametrize("modes", MODES, ids="-".join)
def test_every_m_in_every_mode_and_dtype(modes):
    """A side and a mode meet two forms, with either activation; the modes of rows let each side meet all."""
    mode, seen = MODES.index(modes), []
    for number, side in enumerate(decode_config.WIDTHS):
        for turn, (out, bias) in enumerate(FORMS[(number + mode) % 4 :: 4]):
            a = ("e4m3", "e5m2")[(turn + number // 2) % 2]
            case = Case(side, N, K, modes, a=a, out=out, bias=bias, size=SMALL[out], gap=16 * turn, seed=number)
            for m in sizes(side):
                case.problem, case.m = case.problem._replace(m=m), m
                case.want, case.terms = case.want[:m], case.terms[:m]
                case.check()
                seen.append(m)
    assert sorted(seen) == sorted(2 * list(range(1, decode_config.MOST_ROWS + 1)))


@pytest.mark.parametrize("size", [1e-23, 1e23])
@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
def test_results_as_small_and_as_large_as_their_scales(out, modes, size):
    """The other extreme, scales that cancel, is in test_sm90_decode_gpu.py."""
    for m in (1, 9, 40):
        Case(m, N, K, modes, out=out, size=size, seed=m).check()


@pytest.mark.parametrize("modes", MODES, ids="-".join)
@pytest.mark.parametrize(("n", "k"), [(N, K), (96, 128), (2112, 7168), (512, 16384), (28672, 1024)])
def test_a_row_has_its_bits_in_any_batch_and_at_any_place_of_it(n, k, modes):
    rows = 3 * decode_config.MOST_ROWS + 8
    case = Case(rows, n, k, modes, invariant=True, seed=5)
    case.check()
    whole, a, scale = case.run(), case.a, case.scales[0]
    few = range(1, decode_config.MOST_ROWS) if n == N else (1, 7, 8, 9, 17, 33)
    for m in (*few, 64, 65, 128, 129, rows - 1):
        first = (7 * m) % (rows - m + 1)
        case.problem, case.m, case.a = case.problem._replace(m=m), m, a[first:]
        case.scales[0] = scale if modes[0] == "tensor" else scale[first:]
        assert bool((case.run() == whole[first : first + m]).all()), (m, first)


@pytest.mark.parametrize("mode", PRODUCTS)
@pytest.mark.parametrize("m", [5, 64, 80])
def test_a_workspace_and_a_result_may_begin_as_anything(m, mode):
    """Of each kernel of the table that can run the product here, not only of the preferred one."""
    engine, (n, k) = CupyEngine(), (272, 640)
    cp = engine.cupy
    a, weight, scale_a, scale_b, _ = operands(m, n, k, mode)
    there = [engine.array(x) for x in (a, weight, scale_a, scale_b)]
    places = [there[0].codes.data.ptr, there[1].codes.data.ptr, there[2].data.ptr, there[3].data.ptr]
    problem = fp8core.explain(fp8core.scaled_mm, there[0], there[1].T, there[2], there[3]).problem
    able = [kernel for kernel in SCALED_MM.kernels if kernel.refusal(problem) is None]
    assert able
    for kernel in able:
        launch = kernel.plan(problem)
        results = []
        for byte in (0x00, 0xFF, 0x3C):
            out = cp.full((m, n), 0xFFFF - byte, cp.uint16)
            scratch = cp.full(launch.scratch_bytes + 256, byte, cp.uint8)
            launch(0, *places, 0, out.data.ptr, 0, 0, -(-scratch.data.ptr // 256) * 256)
            results.append(out.get())
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0], kernel.name)
