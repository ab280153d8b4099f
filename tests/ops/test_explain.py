"""`explain` and `capabilities`: the same rows that calls are planned with, on any target, without a device."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import ArraySpec
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.ops.explain import explain_product
from support.engines import fresh, fresh_fp8, fresh_scale
from support.targets import ADA, AMPERE, H200, MI250, MI300

X, CODES = fresh((4, 64)), fresh_fp8((4, 64))


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


class Layer:
    """A layer of another module, which shows its arrays."""

    def __call__(self, x):
        return x

    def __repr__(self):
        return "Fp8Linear(weight=[[1.0, ...]])"


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (len, "builtins.len"),
        (str.join, "str.join"),
        ([].append, "list.append"),
        (np.ones(2), "numpy.ndarray"),
        (Layer(), f"{__name__}.Layer"),
        (Layer().__call__, f"{__name__}.Layer.__call__"),
        (Layer, f"<class '{__name__}.Layer'>"),
    ],
)
def test_what_does_not_choose_cannot_be_explained(other, named):
    with pytest.raises(TypeError, match=f"explain needs one of quantize.* or an fp8core.Fp8Linear, got {named}$"):
        fp8core.explain(other, [])


@pytest.mark.parametrize("target", [AMPERE, MI250], ids=str)
def test_gpus_without_fp8_tensor_cores_still_run_products(target):
    assert SCALED_MM.explain(example_product(target)).chosen == "generic_mma"
    assert SCALED_MM.explain(example_product(target, m=64)).chosen == "generic_decode"


def test_both_e5m2_runs_nowhere():
    for target in (H200, ADA, AMPERE, MI300, fp8core.target.HOST):
        got = SCALED_MM.explain(example_product(target, a="float8_e5m2", b="float8_e5m2"))
        assert got.chosen is None
        assert "e5m2" in str(got)


@pytest.mark.parametrize(
    ("target", "dtype", "scale", "reason"),
    [
        (
            "sm_90",
            "float32",
            1.0,
            "needs one dynamic scale per tensor, got GroupShape(rows=-1, cols=-1) and static=True",
        ),
        ("gfx942", "float32", None, "needs a multiprocessor for each block, got gfx942 and x of float32"),
        ("gfx942", "bfloat16", None, None),
    ],
)
def test_a_reason_names_what_the_row_does_not_take(target, dtype, scale, reason):
    x = ArraySpec((64, 256), dtype)
    got = fp8core.explain(fp8core.quantize, x, group_shape=fp8core.PER_TENSOR, scale=scale, target=target)
    verdict = next(one for one in got.verdicts if one.kernel == "tensorwise")
    assert verdict.status == "chosen" if reason is None else verdict.reason == reason


def test_odd_shapes_go_to_another_row():
    got = SCALED_MM.explain(example_product(H200, m=10, n=4097, k=4104))
    assert got.chosen == "sm90_decode_unaligned"
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


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "deepcopy", "pickle"]
)
def test_what_a_device_can_do_is_sent_to_other_processes(again):
    found = fp8core.capabilities(H200)
    assert again(found) == found
    assert again(fp8core.explain(fp8core.quantize, fp8core.ArraySpec((16, 512), "bfloat16"), target="sm_90")).short


def refusal(call):
    """Return kind and words of the error that a call raises, or None."""
    try:
        call()
    except fp8core.Fp8Error as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("a", ["tensor", "row", "group"])
@pytest.mark.parametrize("b", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("k", [128, 512])
@pytest.mark.parametrize("out", ["bfloat16", "float8_e4m3fn"])
def test_a_product_of_extents_is_explained_as_the_call_is_made(a, b, m, k, out):
    """The call itself, on the host: explained alike, or refused alike."""
    groups = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}
    x = fp8core.quantize(fresh((m, k)), group_shape=groups[a], scale_layout="mn" if a == "group" else "k")
    weight = fp8core.quantize(fresh((256, k)), group_shape=groups[b])
    options = {"out_dtype": out, "out_scale": 1.0 if out != "bfloat16" else None}
    refused = refusal(lambda: fp8core.scaled_mm_nt(x, weight, **options))
    if refused is not None:
        assert refusal(lambda: explain_product(m, 256, k, scale_a=a, scale_b=b, out_dtype=out)) == refused
        return
    for target in ("host", "sm_90", "gfx942"):
        got = explain_product(m, 256, k, scale_a=a, scale_b=b, out_dtype=out, a=x.dtype, b=weight.dtype, target=target)
        want = fp8core.explain(fp8core.scaled_mm_nt, x, weight, target=target, **options)
        assert got.problem == want.problem
        assert got == want


def test_the_result_of_a_product_of_extents_may_have_the_dtype_of_any_framework():
    named = explain_product(16, 256, 128, out_dtype="float8_e4m3fn", target="sm_90")
    assert explain_product(16, 256, 128, out_dtype=ml_dtypes.float8_e4m3fn, target="sm_90") == named
    with pytest.raises(fp8core.DTypeError, match=r"out_dtype needs one of float32, .*got 'int32'"):
        explain_product(16, 256, 128, out_dtype=np.int32, target="sm_90")


@pytest.mark.parametrize("granularity", ["x", "", None, ["row"]], ids=repr)
@pytest.mark.parametrize("name", ["scale_a", "scale_b"])
def test_scales_of_a_product_of_extents_are_named(name, granularity):
    with pytest.raises(fp8core.ScaleError, match=rf"^{name} needs one of tensor, row, group, block, got "):
        explain_product(16, 256, 128, **{name: granularity})


@pytest.mark.parametrize("extent", [-1, 1.5, "16", None, [16]], ids=repr)
@pytest.mark.parametrize("name", ["m", "n", "k"])
def test_extents_of_a_product_are_whole_numbers(name, extent):
    with pytest.raises(fp8core.ShapeError, match="shape needs whole numbers of at least 0, got "):
        explain_product(**{"m": 16, "n": 256, "k": 128, name: extent})


@pytest.mark.parametrize("stream", ["default", -1, 1.5, Ellipsis], ids=repr)
def test_a_stream_that_is_none_is_refused_as_the_call_refuses_it(stream):
    x = fresh((4, 64))
    with pytest.raises(fp8core.DeviceError) as refused:
        fp8core.quantize(x, stream=stream)
    for operand in (x, ArraySpec((4, 64), "bfloat16")):
        with pytest.raises(fp8core.DeviceError) as caught:
            fp8core.explain(fp8core.quantize, operand, stream=stream)
        assert str(caught.value) == str(refused.value)
    assert fp8core.explain(fp8core.quantize, x, stream=0).chosen == "host"


@pytest.mark.parametrize("number", [1e39, 1e-60, 10**400], ids=["infinite", "zero", "int"])
@pytest.mark.parametrize(
    ("function", "operands", "name"),
    [
        (fp8core.quantize, {"x": X}, "scale"),
        (fp8core.dequantize, {"q": CODES}, "scale"),
        (fp8core.scaled_mm_nt, {"a": CODES, "weight": CODES, "scale_b": 1.0}, "scale_a"),
        (fp8core.linear, {"x": X, "weight": CODES}, "weight_scale"),
        (fp8core.requantize_with_max_scale, {"weight": CODES, "logical_widths": [4]}, "weight_scale"),
    ],
)
def test_a_number_out_of_range_is_refused_as_the_call_refuses_it(function, operands, name, number):
    given = {**operands, name: number}
    with pytest.raises(fp8core.ScaleError, match=f"^{name} needs a number that float32 holds") as refused:
        function(**given)
    for target in (None, "sm_90"):
        with pytest.raises(fp8core.ScaleError) as caught:
            fp8core.explain(function, **given, target=target)
        assert str(caught.value) == str(refused.value)


def test_a_layer_is_explained_for_any_target():
    layer = fp8core.Fp8Linear(fresh_fp8((8, 64)), fresh_scale((1,)))
    assert fp8core.explain(layer, fresh((4, 64))).chosen == "host"
    got = fp8core.explain(layer, ArraySpec((4, 64), "bfloat16"), target="sm_90")
    assert str(got.problem.quantize.target) == "sm_90"
    assert got.short == "Linear: fused"
