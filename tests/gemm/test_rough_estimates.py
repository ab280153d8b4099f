"""What `explain` says of the time of each kernel on Hopper, and where what it says roughly decides: between two pairs."""

import re

import pytest

from bench.choice_cases import Case
from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.table import Table, no_estimate
from support.blaslt_fixtures import built, stub  # noqa: F401
from support.targets import BLACKWELL, H200

CASES = [
    Case(mode, m, n, k)
    for mode in ("row", "block")
    for m in (1, 33, 301)
    for n, k in ((4096, 4096), (5000, 4100), (4097, 2048), (1537, 7168))
]
TILE_128X128 = 20


@pytest.fixture
def library(stub):
    for number in range(1, 12):
        stub.tile(number, TILE_128X128, 3)
    return stub


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_able_kernel_has_an_estimate_on_hopper(library, case):
    told = SCALED_MM.explain(case.problem(H200))
    able = {verdict.kernel: verdict.reason for verdict in told.verdicts if verdict.status not in ("unable", "unknown")}
    assert {"generic_decode", "generic_mma"} <= set(able)
    assert [kernel for kernel, reason in able.items() if not re.match(r"(estimated|roughly) [0-9.]+ us", reason)] == []


def test_nobody_guesses_for_a_gpu_that_was_not_measured():
    told = SCALED_MM.explain(Case("row", 8, 4097, 4096).problem(BLACKWELL))
    assert told.chosen == "generic_decode"
    assert not any(" us" in verdict.reason for verdict in told.verdicts)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_rough_estimates_decide_nothing(library, case):
    without = (kernel._replace(rough=no_estimate) for kernel in SCALED_MM.kernels)
    p = case.problem(H200)
    assert Table("without", SCALED_MM.problem, *without).choice(p) == SCALED_MM.choice(p)


@pytest.mark.parametrize(
    ("kernel", "case", "measured"),
    [
        (fallback_cost.generic_decode_us, Case("row", 1, 5000, 4100), 18.5),
        (fallback_cost.generic_decode_us, Case("row", 64, 4096, 4096), 19.5),
        (fallback_cost.generic_mma_us, Case("row", 2001, 4096, 4096), 335.4),
        (fallback_cost.generic_mma_us, Case("block", 64, 14336, 4101), 121.0),
        (fallback_cost.realigned_us, Case("block", 2001, 14336, 4101), 262.0),
        (fallback_cost.realigned_us, Case("row", 8, 14336, 4101), 49.7),
        (fallback_cost.decode_us, Case("row", 16, 6144, 4096), 7.4),
    ],
)
def test_rough_estimates_are_near_what_an_h200_took(kernel, case, measured):
    assert kernel(case.problem(H200)) == pytest.approx(measured, rel=0.35)


@pytest.mark.parametrize(
    "case",
    [
        Case("row", 176, 3076, 15360),
        Case("tensor", 185, 7169, 1024),
        Case("row", 33, 1537, 7168),
        Case("block", 64, 12345, 4096),
        Case("row", 2000, 12345, 4096),
        Case("block", 8192, 14341, 2048),
    ],
    ids=str,
)
@pytest.mark.parametrize("ending", [{}, {"beta": 1.0}, {"amax": True}, {"out": "float8_e4m3fn"}], ids=str)
def test_no_result_of_odd_rows_is_copied(case, ending):
    """Whatever their number: these kernels store them at any address."""
    order = [kernel.name for kernel in SCALED_MM.ranking(case.problem(H200)._replace(**ending))]
    assert order[0] in ("sm90_decode", "sm90_tiled", *(["sm90_decode_unaligned"] if ending else []))
    assert "realigned" not in order
