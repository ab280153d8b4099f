"""The rows of the product: which is chosen, and what the others say."""

from types import SimpleNamespace

import pytest

from fp8core.errors import UnsupportedProblemError
from fp8core.kernels.gemm.blaslt import query
from fp8core.kernels.gemm.blaslt.rows import CUBLASLT_PAD_M
from fp8core.kernels.gemm.requirements import MOST_COUNTED
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.target import HOST
from support.blaslt_fixtures import built, hip_stub, stub  # noqa: F401
from support.blaslt_tools import problem
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.targets import ADA, AMPERE, BLACKWELL, H200, MI300, MI350

NOWHERE = 7
"""An ordinal that no machine of these tests has."""


def verdicts(p):
    return {v.kernel: v for v in SCALED_MM.explain(p).verdicts}


def preferred(p):
    """Return the first able and preferred row behind the hand-written ones, which have tests of their own."""
    own = {kernel.name for kernel in (SM90_DECODE, SM90_TILED, SM90_DECODE_UNALIGNED)}
    return next(
        v.kernel for v in SCALED_MM.explain(p).verdicts if v.status in ("chosen", "able") and v.kernel not in own
    )


def refusal(p, row):
    verdict = verdicts(p)[row]
    assert verdict.status in ("unable", "unknown"), verdict
    return verdict.reason


CHOICES = [
    (problem(), "cublaslt"),
    (problem("row"), "cublaslt"),
    (problem("row", bias="bfloat16"), "cublaslt"),
    (problem("row", bias="float32"), "cublaslt_epilogue"),
    (problem("row", out="float16", bias="float16"), "cublaslt"),
    (problem("row", out="float16", bias="bfloat16"), "cublaslt_epilogue"),
    (problem("row", out="float32", bias="bfloat16"), "cublaslt"),
    (problem("row", out="float32", bias="float16"), "cublaslt_epilogue"),
    (problem("mixed"), "cublaslt_relayout"),
    (problem("row", scale_a_strides=(3, 0)), "cublaslt_relayout"),
    (problem("row", m=1, scale_a_strides=(3, 0)), "cublaslt"),
    (problem("group x block"), "cublaslt"),
    (problem("group x block", scale_a_strides=(32, 1)), "cublaslt_relayout"),
    (problem("group x block", k=4224, lda=4224, ldb=4224, scale_b_strides=(33, 1)), "cublaslt_relayout"),
    (problem("group x block", m=67, scale_a_strides=(1, 67)), "cublaslt_pad_m"),
    (problem("group x block", m=67, scale_a_strides=(1, 67), ldo=272), "cublaslt_split_m"),
    (problem("group x block", m=257, scale_a_strides=(1, 257)), "cublaslt_split_m"),
    (problem("group x block", m=3, scale_a_strides=(1, 3)), "generic_decode"),
    (problem("group x group"), "cublaslt"),
    (problem("group x group", scale_b_strides=(32, 1)), "cublaslt_relayout"),
    (problem(out="float8_e4m3fn", out_scale=True), "cublaslt_relayout"),
    (problem("row", out="float8_e4m3fn", out_scale=True, amax=True), "cublaslt_epilogue"),
    (problem(amax=True), "cublaslt_epilogue"),
    (problem(activation="gelu_tanh", beta=2.0), "cublaslt"),
    (problem(activation="gelu"), "cublaslt_epilogue"),
    (problem(b="float8_e5m2"), "cublaslt"),
    (problem(vectors_alignment=4), "cublaslt_relayout"),
    (problem("row", bias="bfloat16", vectors_alignment=2), "cublaslt_relayout"),
    (problem("group x block", vectors_alignment=4), "cublaslt_relayout"),
    (problem(out="float8_e4m3fn", out_scale=True, amax=True, vectors_alignment=4), "cublaslt_epilogue"),
    (problem(batch_invariant=True), "generic_decode"),
    (problem(k=4104), "generic_decode"),
    (problem(k=0), "generic_decode"),
    (problem(n=250), "generic_decode"),
    (problem(m=96, n=250), "generic_mma"),
    (problem(target=HOST), "host"),
]


@pytest.mark.parametrize(("p", "row"), CHOICES)
def test_preferred_row_where_the_library_offers(stub, p, row):
    assert preferred(p) == row, SCALED_MM.explain(p)


HIP_CHOICES = [
    (problem(target=MI300), "hipblaslt"),
    (problem("row", target=MI300), "hipblaslt"),
    (problem("mixed", target=MI300), "hipblaslt_relayout"),
    (problem("row", target=MI300, out="float16"), "hipblaslt_epilogue"),
    (problem("row", target=MI300, bias="float32"), "hipblaslt_epilogue"),
    (problem(target=MI300, out="float8_e5m2fnuz", out_scale=True), "hipblaslt_relayout"),
    (problem(target=MI300, out="float8_e4m3fnuz", out_scale=True), "hipblaslt_epilogue"),
    (problem(target=MI300, out="float8_e4m3fnuz", amax=True), "hipblaslt_epilogue"),
]


@pytest.mark.parametrize(("p", "row"), HIP_CHOICES)
def test_preferred_row_on_amd(hip_stub, p, row):
    assert preferred(p) == row, SCALED_MM.explain(p)


def test_row_falls_back_where_the_library_offers_nothing(stub):
    stub.offers(0)
    assert preferred(problem("row")) == "generic_decode"
    said = "offers no algorithm for m=64 n=256 k=4096 to bfloat16 with scales OUTER_VEC and OUTER_VEC"
    assert refusal(problem("row"), "cublaslt") == f"cuBLASLt ({stub.path}) {said}"
    said = "offers no algorithm for m=64 n=256 k=4096 to float32 with scales SCALAR and SCALAR"
    assert refusal(problem("row"), "cublaslt_epilogue") == f"cuBLASLt ({stub.path}) {said}"


BOTH = "a and b are both e5m2, which no kernel here multiplies: one of them has to be e4m3"
AWAY = "its library cannot be queried: this machine has no device 7"
REFUSALS = [
    (problem(a="float8_e5m2", b="float8_e5m2"), "cublaslt", BOTH),
    (problem(a="float8_e5m2", b="float8_e5m2"), "cublaslt_epilogue", BOTH),
    (problem(a="float8_e5m2", b="float8_e5m2"), "generic_mma", BOTH),
    (problem(target=HOST, a="float8_e5m2", b="float8_e5m2"), "host", BOTH),
    (problem(target=MI350, a="float8_e5m2", b="float8_e5m2"), "hipblaslt", BOTH),
    (problem(target=MI300), "cublaslt", "needs cuda, got gfx942 (device 0)"),
    (problem(), "hipblaslt", "needs hip, got sm_90 (device 0)"),
    (problem(target=HOST), "generic_mma", "needs cuda or hip, got host"),
    (
        problem(target=AMPERE),
        "cublaslt",
        "needs FP8 matrix instructions (sm_89 and later; gfx942, gfx950, gfx1200, gfx1201), got sm_80 (device 0)",
    ),
    (
        problem(a="float8_e4m3fnuz"),
        "cublaslt",
        "needs float8_e4m3fn or float8_e5m2, got a float8_e4m3fnuz and b float8_e4m3fn",
    ),
    (
        problem(target=MI350, a="float8_e4m3fnuz"),
        "hipblaslt",
        (
            "needs fnuz formats on gfx942 and OCP's on later GPUs,"
            " got a float8_e4m3fnuz and b float8_e4m3fn on gfx950 (device 0)"
        ),
    ),
    (
        problem(target=MI300._replace(arch=0x90A)),
        "hipblaslt",
        "needs FP8 matrix instructions (sm_89 and later; gfx942, gfx950, gfx1200, gfx1201), got gfx90a (device 0)",
    ),
    (
        problem(batch_invariant=True),
        "cublaslt",
        "the library chooses its algorithm by m, so the sums of a row would depend on the batch",
    ),
    (problem(scale_dtype="float8_e8m0fnu"), "cublaslt", "takes scales of float32, got float8_e8m0fnu"),
    (
        problem(m=MOST_COUNTED + 1),
        "cublaslt",
        f"needs m, n and k of at most {MOST_COUNTED}, got m={MOST_COUNTED + 1} n=256 k=4096",
    ),
    (problem(activation="gelu"), "cublaslt", "the library has no activation but gelu_tanh, got gelu"),
    (problem(alignment=8), "cublaslt", "needs addresses and rows aligned to 16 bytes, got 8"),
    (
        problem(k=4104),
        "cublaslt",
        "needs k (at least 16), lda and ldb that are multiples of 16, got k=4104 lda=4096 ldb=4096",
    ),
    (
        problem(n=252),
        "cublaslt",
        "needs n that is a multiple of 8 and rows of out of a multiple of 16 bytes, got n=252 and ldo=256 of bfloat16",
    ),
    (problem(vectors_alignment=4), "cublaslt", "needs scales and bias at addresses divisible by 16, got 4"),
    (problem("mixed"), "cublaslt", "the library takes no mix of modes, got scale_a per tensor and scale_b per row"),
    (
        problem("row", target=ADA),
        "cublaslt",
        "the library has scales per row and row on sm_90 only, got sm_89 (device 0)",
    ),
    (
        problem("group x block", target=BLACKWELL),
        "cublaslt_relayout",
        "the library has scales per group and block on sm_90 only, got sm_100 (device 0)",
    ),
    (
        problem("group x block", scale_a_strides=(32, 1)),
        "cublaslt",
        (
            "needs vectors without gaps, 1x128 scales stored [k/128][rows], 128x128 scales in rows of a multiple of 4,"
            " got strides (32, 1) of scale_a and (32, 1) of scale_b"
        ),
    ),
    (
        problem("group x block", m=67),
        "cublaslt",
        "needs m that is a multiple of 4 with 1x128 scales of a, got m=67",
    ),
    (problem("group x block", m=3), "cublaslt_pad_m", "needs m > 4 that is not a multiple of 4, got m=3"),
    (problem("group x block", m=64), "cublaslt_split_m", "needs m > 4 that is not a multiple of 4, got m=64"),
    (
        problem("group x block", m=67, lda=4112),
        "cublaslt_pad_m",
        "needs rows without gaps, got lda=4112 with k=4096 and ldo=256 with n=256",
    ),
    (
        problem("group x block", m=262143, n=8192, k=4112, lda=4112, ldb=4112, ldo=8192),
        "cublaslt_pad_m",
        "needs a and out of at most 2147483648 bytes, which it copies, got m=262143 n=8192 k=4112",
    ),
    (
        problem("group x block", m=1048579, k=4112, lda=4112, ldb=4112),
        "cublaslt_pad_m",
        "needs a and out of at most 2147483648 bytes, which it copies, got m=1048579 n=256 k=4112",
    ),
    (
        problem("group x block", m=67, bias="bfloat16", vectors_alignment=2),
        "cublaslt_pad_m",
        "needs a bias at an address divisible by 16, got 2",
    ),
    (problem("group x block", m=67, target=ADA), "cublaslt_pad_m", "needs wgmma (sm_90), got sm_89 (device 0)"),
    (
        problem("group x block", m=67, activation="gelu_tanh"),
        "cublaslt_pad_m",
        "takes no activation, as it copies or divides the result, got gelu_tanh",
    ),
    (
        problem("group x block", m=67, beta=2.0),
        "cublaslt_split_m",
        "takes no beta, as it copies or divides the result, got 2.0",
    ),
    (problem("row"), "cublaslt_split_m", "needs 1x128 scales of a, got scale_a per row"),
    (
        problem("row", out="float8_e4m3fn", out_scale=True),
        "cublaslt",
        "the library gives float8_e4m3fn with scales per tensor only, got scale_a per row and scale_b per row",
    ),
    (
        problem(out="float8_e4m3fn", out_scale=True),
        "cublaslt",
        "the library takes the inverse of out_scale, which has to be computed first",
    ),
    (problem(amax=True), "cublaslt", "the library gives amax with FP8 results only, got bfloat16"),
    (problem(bias="float32"), "cublaslt", "the library does not add a float32 bias to a bfloat16 result"),
    (
        problem("group x block"),
        "cublaslt_epilogue",
        "takes scales per tensor or row in any mix, got scale_a per group and scale_b per block",
    ),
    (
        problem("row", target=MI300, out="float32"),
        "hipblaslt",
        "hipBLASLt gives bfloat16 with scales per row, got float32",
    ),
    (
        problem(target=MI300, scale_b="row", out="float16"),
        "hipblaslt_relayout",
        "hipBLASLt gives bfloat16 with scales per row, got float16",
    ),
    (
        problem("group x block", scale_b="row"),
        "cublaslt",
        "the library has no mode for scale_a per group with scale_b per row",
    ),
    (problem(target=H200._replace(device=NOWHERE)), "cublaslt", AWAY),
    (problem("mixed", target=H200._replace(device=NOWHERE)), "cublaslt_relayout", AWAY),
    (problem("group x block", m=67, target=H200._replace(device=NOWHERE)), "cublaslt_split_m", AWAY),
    (problem("mixed", target=H200._replace(device=NOWHERE)), "cublaslt_epilogue", AWAY),
    (problem(target=MI350._replace(device=NOWHERE)), "hipblaslt", AWAY),
]


@pytest.mark.parametrize(("p", "row", "text"), REFUSALS)
def test_refusals_are_these_sentences(p, row, text):
    assert refusal(p, row) == text


def test_padding_many_rows_is_able_and_not_preferred(stub):
    verdict = verdicts(problem("group x block", m=257, scale_a_strides=(1, 257)))["cublaslt_pad_m"]
    assert verdict.status == "not preferred"
    assert "preferred up to 256 rows" in verdict.reason
    assert verdict.reason.endswith("got m=257")


@pytest.mark.parametrize(("k", "compared"), [(4112, True), (4128, False), (4096, False)])
def test_padding_rows_is_compared_where_codes_begin_between_sectors(monkeypatch, k, compared):
    monkeypatch.setattr(query, "algorithms", lambda product: [SimpleNamespace(us=50.0)])
    p = problem("group x block", m=257, k=k, lda=k, ldb=k)
    assert CUBLASLT_PAD_M.compared(p) == compared
    assert (CUBLASLT_PAD_M.reservation(p) is None) == compared
    assert CUBLASLT_PAD_M.rough(p) > 50.0
    assert CUBLASLT_PAD_M.us(p) == (CUBLASLT_PAD_M.rough(p) if compared else None)


@pytest.mark.parametrize("target", [H200, MI350, HOST])
def test_both_e5m2_is_refused_by_every_row(target):
    p = problem(target=target, a="float8_e5m2", b="float8_e5m2")
    assert SCALED_MM.explain(p).chosen is None
    with pytest.raises(UnsupportedProblemError, match=BOTH):
        SCALED_MM.plan(tuple(p))


def test_explanation_says_each_row_once():
    names = [kernel.name for kernel in SCALED_MM.kernels]
    assert len(set(names)) == len(names)
    text = str(SCALED_MM.explain(problem(target=H200._replace(device=NOWHERE))))
    assert text.splitlines()[0].startswith("ScaledMm(target=sm_90 (device 7), m=64, n=256, k=4096")
    assert f"unknown: {AWAY}" in text
    assert "generic_mma" in text
