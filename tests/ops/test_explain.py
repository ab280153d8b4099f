"""`explain` and `capabilities`: the same rows that calls are planned with, on any target, without a device."""

import numpy as np
import pytest

import fp8core
from fp8core import Target
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.explain import example_product
from support.engines import fresh, fresh_fp8, fresh_scale

H200 = Target("cuda", 90, 0, 132, 32, 232_448)
ADA = Target("cuda", 89, 0, 128, 32, 101_376)
AMPERE = Target("cuda", 80, 0, 108, 32, 166_912)
MI300 = Target("hip", 0x942, 0, 304, 64, 65_536)
MI250 = Target("hip", 0x90A, 0, 104, 64, 65_536)


def test_nothing_runs_and_exactly_one_kernel_is_chosen():
    out = np.full((4, 32), 7, np.float32)
    got = fp8core.explain(
        fp8core.scaled_mm,
        fresh_fp8((4, 64)),
        fresh_fp8((32, 64)).T,
        fresh_scale((1,)),
        fresh_scale((1,)),
        out=out,
        out_dtype="float32",
    )
    assert (out == 7).all()
    assert [v.status for v in got.verdicts].count("chosen") == 1
    assert got.chosen == "host"
    assert got.problem.m == 4
    assert all(v.reason for v in got.verdicts if v.status not in ("chosen", "able"))
    text = str(got)
    for verdict in got.verdicts:
        assert f"  {verdict.kernel}" in text


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: fp8core.explain(fp8core.quantize, fresh((4, 64)), group_shape=(1, 16)), "Quantize"),
        (lambda: fp8core.explain(fp8core.dequantize, fresh_fp8((4, 64)), fresh_scale((4, 1))), "Dequantize"),
        (lambda: fp8core.explain(fp8core.rms_norm_quant, fresh((4, 64)), fresh((64,)), 1e-6), "NormQuantize"),
        (lambda: fp8core.explain(fp8core.silu_and_mul_quant, fresh((4, 64))), "SiluQuantize"),
        (
            lambda: fp8core.explain(
                fp8core.scaled_mm_nt, fresh_fp8((4, 64)), fresh_fp8((8, 64)), fresh_scale((1,)), fresh_scale((1,))
            ),
            "ScaledMm",
        ),
        (
            lambda: fp8core.explain(fp8core.linear, fresh((4, 64)), fresh_fp8((8, 64)), fresh_scale((1,))),
            "ScaledMm",
        ),
        (lambda: fp8core.explain(fp8core.Fp8Linear(fresh_fp8((8, 64)), fresh_scale((1,))), fresh((4, 64))), "ScaledMm"),
    ],
)
def test_every_operation_explains_itself(call, problem):
    got = call()
    assert type(got.problem).__name__ == problem
    assert got.chosen == "host"


def test_a_linear_explains_the_quantization_before_its_product():
    got = fp8core.explain(fp8core.linear, fresh((4, 64)), fresh_fp8((8, 64)), fresh_scale((1,)))
    assert [type(step.problem).__name__ for step in got.before] == ["Quantize", "Linear"]
    assert "Quantize(" in str(got)


def test_a_linear_explains_every_call_that_it_takes():
    x, out = fresh((4, 64)), fresh((4, 8))
    before = out.tobytes()
    got = fp8core.explain(fp8core.linear, x, fresh_fp8((8, 64)), fresh_scale((1,)), out=out, stream=None)
    assert got.chosen == "host"
    assert out.tobytes() == before
    with pytest.raises(fp8core.ScaleError, match="weight_scale"):
        fp8core.explain(fp8core.linear, x, fresh_fp8((8, 64)))


def test_what_does_not_choose_cannot_be_explained():
    with pytest.raises(TypeError, match="quantize"):
        fp8core.explain(len, [])


@pytest.mark.parametrize("target", [AMPERE, MI250], ids=str)
def test_gpus_without_fp8_tensor_cores_still_run_products(target):
    assert SCALED_MM.explain(example_product(target)).chosen == "simt"


def test_both_e5m2_runs_nowhere():
    for target in (H200, ADA, AMPERE, MI300, fp8core.problem.HOST):
        got = SCALED_MM.explain(example_product(target, a="float8_e5m2", b="float8_e5m2"))
        assert got.chosen is None
        assert "e5m2" in str(got)


def test_odd_shapes_go_to_another_row():
    got = SCALED_MM.explain(example_product(H200, m=100, n=4097, k=4104))
    assert got.chosen == "simt"
    reasons = {v.kernel: v.reason for v in got.verdicts}
    assert "16" in reasons["cublaslt"]


def test_capabilities_name_the_kernel_or_the_reason():
    for target in (H200, AMPERE, MI300, None):
        found = fp8core.capabilities(target)
        assert {"quantize_per_token", "scaled_mm_per_tensor", "scaled_mm_block", "grouped_mm", "sparse_mm"} <= set(
            found
        )
        for able, reason in found.values():
            assert isinstance(able, bool)
            assert reason
    assert not fp8core.capabilities(AMPERE)["scaled_mm_per_tensor"].able
