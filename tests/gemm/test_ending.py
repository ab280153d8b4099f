"""What ends a product, its activation and beta: what is asked for, refused and chosen, on the host and emulated."""

import math

import numpy as np
import pytest

import fp8core
from fp8core import ArraySpec, Quantized, explain, linear, quantize, scaled_mm, scaled_mm_nt
from fp8core.errors import DTypeError, Fp8Error, LayoutError, ScaleError
from fp8core.host.activations import activated
from fp8core.kernels.gemm.amd.decode import plan_decode as plan_gfx9_decode
from fp8core.kernels.gemm.blaslt.epilogue import plan_end
from fp8core.kernels.gemm.generic import plan_decode, plan_mma
from fp8core.kernels.gemm.mma.decode import plan_decode as plan_sm89_decode
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.example_problems import example_product
from fp8core.problem import GROUP_128, ScaledMm
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import FLOATS, empty, matrix
from support.targets import TARGETS

ENDINGS = [("gelu", 0.0), ("gelu_tanh", -0.5), ("silu", 2.0), (None, 1.0)]
"""Activations and betas."""
ACTIVATIONS = ("gelu", "gelu_tanh", "silu")
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
FORMULA = 2.0**-16
"""What an activation may be off, relatively, up to a magnitude of 12."""


def ended(value, before, activation, beta):
    """Return what ends a value, in float64: the oracle."""
    return reference.activated(value.astype(np.float64) + beta * before.astype(np.float64), activation)


def near(got, want, out):
    """Assert that results are their value, rounded once."""
    error = np.abs(got.astype(np.float64) - want)
    assert (error <= (ROUNDING[out] + FORMULA) * np.abs(want) + 1e-6).all(), error.max()


# ---- the formulas


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_on_the_host_is_near_float64(activation):
    x = np.linspace(-12, 12, 4801).astype(np.float32)
    want = reference.activated(x, activation)
    with np.errstate(over="ignore"):
        got = activated(x, activation)
    assert (np.abs(got - want) <= FORMULA * np.abs(want) + 1e-35).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_of_what_is_not_ordinary(activation):
    with np.errstate(all="ignore"):
        got = activated(np.float32([0, 1e30, math.inf, -1e30, math.nan]), activation)
    assert got[:3].tolist() == [0, np.float32(1e30), math.inf]
    assert got[3] == 0
    assert math.isnan(got[4])


# ---- calls on the host


def operands(m=5, n=7, k=200):
    rng = np.random.default_rng(m)
    x, weight = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((n, k)).astype(np.float32) / 8
    return quantize(x), quantize(weight), rng.standard_normal(n).astype(np.float32)


@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize(("activation", "beta"), ENDINGS)
def test_a_product_ends_in_both(activation, beta, out):
    a, weight, bias = operands()
    dtype = FLOATS[out]
    before = (np.random.default_rng(1).standard_normal((5, 7)) * 3).astype(dtype)
    plain = scaled_mm_nt(a, weight, bias=bias, out_dtype="float32")
    want = ended(plain, before, activation, beta)
    for product, b in ((scaled_mm_nt, weight), (scaled_mm, weight.T)):
        result = np.full((5, 9), 77, dtype)
        result[:, :7] = before
        keywords = {"bias": bias, "activation": activation, "beta": beta, "out_dtype": out, "out": result[:, :7]}
        product(a, b, **keywords)
        near(result[:, :7], want, out)
        assert (result[:, 7:] == 77).all()


def test_without_beta_out_is_not_read():
    a, weight, _ = operands()
    out = np.full((5, 7), np.nan, np.float32)
    scaled_mm_nt(a, weight, out=out, out_dtype="float32", beta=0)
    assert np.isfinite(out).all()
    scaled_mm_nt(a, weight, out=(bad := np.full((5, 7), np.nan, np.float32)), out_dtype="float32", beta=1)
    assert np.isnan(bad).all()


def test_no_depth_adds_to_what_there_is():
    a, weight, bias = operands(k=0)
    out = np.ones((5, 7), np.float32)
    scaled_mm_nt(a, weight, bias=bias, out=out, out_dtype="float32", beta=-2.0)
    assert (out == bias - 2).all()


def test_amax_and_codes_are_those_of_the_activation():
    a, weight, _ = operands()
    amax = np.zeros(1, np.float32)
    plain = scaled_mm_nt(a, weight, out_dtype="float32")
    codes = scaled_mm_nt(a, weight, out_dtype="float8_e4m3fn", out_scale=0.5, activation="silu", amax=amax)
    want = reference.activated(plain, "silu")
    assert abs(amax[0] / np.abs(want).max() - 1) < 1e-6
    assert (codes.view(np.uint8) == reference.encode((want * 2).astype(np.float32), "float8_e4m3fn")).all()


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_linear_and_layers_take_an_activation(activation):
    rng = np.random.default_rng(3)
    x, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 256), (130, 256)))
    for group, weight_group in (((1, -1), (1, -1)), (GROUP_128, (128, 128))):
        q = quantize(weight, group_shape=weight_group)
        plain = linear(x, q, group_shape=group)
        near(linear(x, q, group_shape=group, activation=activation), reference.activated(plain, activation), "float32")
        layer = fp8core.Fp8Linear(q, group_shape=group, activation=activation)
        near(layer(x), reference.activated(plain, activation), "float32")
        near(
            layer(quantize(x, group_shape=group)).astype(np.float32), reference.activated(plain, activation), "bfloat16"
        )


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"beta": 1.0}, LayoutError, "beta needs out, whose values it scales and adds, got beta=1.0 without out"),
        ({"beta": "1"}, DTypeError, "beta needs a number, got str"),
        ({"beta": True}, DTypeError, "beta needs a number, got bool"),
        ({"beta": np.ones(1, np.float32)}, DTypeError, "beta needs a number, got ndarray"),
        ({"beta": math.nan}, ScaleError, "finite"),
        ({"beta": 1e39}, ScaleError, "finite"),
        ({"activation": "relu"}, DTypeError, "activation needs None or one of gelu, gelu_tanh, silu, got 'relu'"),
        ({"activation": ""}, DTypeError, "got ''"),
        ({"activation": ["gelu"]}, DTypeError, "got \\['gelu'\\]"),
    ],
)
def test_what_means_nothing_is_refused(keywords, error, words):
    a, weight, _ = operands()
    for product, b in ((scaled_mm_nt, weight), (scaled_mm, weight.T)):
        with pytest.raises(error, match=words):
            product(a, b, **keywords)


def test_codes_are_not_added_to():
    a, weight, _ = operands()
    out = quantize(np.ones((5, 7), np.float32)).data
    before = out.tobytes()
    with pytest.raises(DTypeError, match="beta needs a result of float32, float16, bfloat16, got float8_e4m3fn"):
        scaled_mm_nt(a, weight, out=out, out_dtype="float8_e4m3fn", out_scale=1.0, beta=1.0)
    assert out.tobytes() == before


def test_a_layer_refuses_an_activation_that_there_is_not():
    with pytest.raises(DTypeError, match="activation needs"):
        fp8core.Fp8Linear(operands()[1], activation="tanh")


# ---- the table


@pytest.mark.parametrize(("activation", "beta"), ENDINGS)
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_every_target_has_a_kernel(target, activation, beta):
    for m in (1, 64, 300):
        for scales in (("tensor", "tensor"), ("row", "row"), ("group", "block")):
            asked = example_product(target, *scales, m=m)._replace(activation=activation or "", beta=beta)
            chosen = SCALED_MM.explain(asked).chosen
            assert chosen is not None
            if target.arch == 90:
                assert chosen in {1: ["sm90_decode"], 64: ["sm90_decode", "sm90_tiled"], 300: ["sm90_tiled"]}[m]


def test_rows_say_what_they_do_not_take():
    on_sm90 = example_product(TARGETS[0]._replace(arch=90), "row", "row", m=301)
    silu, both = on_sm90._replace(activation="silu"), on_sm90._replace(activation="gelu_tanh", beta=1.0)
    reasons = {v.kernel: v.reason for v in SCALED_MM.explain(silu).verdicts}
    assert reasons["cublaslt"] == "the library has no activation but gelu_tanh, got silu"
    assert "activation" not in {v.kernel: v.reason for v in SCALED_MM.explain(both).verdicts}["cublaslt"]
    block = both._replace(scale_a="group", scale_b="block", scale_a_strides=(1, 301), scale_b_strides=(32, 1))
    reasons = {v.kernel: v.reason for v in SCALED_MM.explain(block).verdicts}
    assert reasons["cublaslt_split_m"].startswith("takes no activation, as it copies or divides the result, got gelu_")
    reasons = {v.kernel: v.reason for v in SCALED_MM.explain(block._replace(activation="")).verdicts}
    assert reasons["cublaslt_split_m"] == "takes no beta, as it copies or divides the result, got 1.0"
    odd = both._replace(n=4001, ldo=4001, alignment=1, codes_alignment=16)
    reasons = {v.kernel: v.reason for v in SCALED_MM.explain(odd).verdicts}
    assert reasons["realigned"] == "takes no beta where it copies the result, got 1.0"
    assert SM90_TILED.refusal(silu) is SM90_TILED.refusal(both) is SM90_DECODE.refusal(both) is None


def test_explain_shows_the_activation_and_beta():
    a = Quantized(ArraySpec((16, 4096), "float8_e4m3fn"), ArraySpec((16, 1), "float32"), (1, -1))
    weight = Quantized(ArraySpec((8192, 4096), "float8_e4m3fn"), ArraySpec((8192, 1), "float32"), (1, -1))
    out = ArraySpec((16, 8192), "bfloat16")
    told = explain(scaled_mm_nt, a, weight, activation="gelu", beta=1.0, out=out, target="sm_90")
    assert (told.chosen, told.problem.activation, told.problem.beta) == ("sm90_decode", "gelu", 1.0)
    told = explain(linear, ArraySpec((16, 4096), "bfloat16"), weight, activation="silu", target="sm_90")
    assert told.problem.activation == "silu"
    with pytest.raises(Fp8Error, match="beta needs out, whose values"):
        explain(scaled_mm_nt, a, weight, beta=1.0, target="sm_90")


# ---- device sources on the CPU


FN, FNUZ = "float8_e4m3fn", "float8_e4m3fnuz"
SOURCES = [
    *(
        (name, plan, target, FN)
        for name, plan in (("decode", plan_decode), ("mma", plan_mma))
        for target in (CUDA, HIP_32)
    ),
    ("sm89_decode", plan_sm89_decode, CUDA, FN),
    ("gfx9_decode", plan_gfx9_decode, HIP_64, FNUZ),
    *(("apply_epilogue", plan_end, target, FN) for target in (CUDA, HIP_64)),
]


@pytest.mark.parametrize(("name", "plan", "target", "e4m3"), SOURCES, ids=lambda x: x if isinstance(x, str) else None)
def test_device_sources_end_in_both(emulator, name, plan, target, e4m3):
    """Each against its own plain product in float32, whose bits it has before it ends."""
    m, n, k = 5, 41, 256
    rng = np.random.default_rng(0)
    with emulator.watch() as memory:
        if name == "apply_epilogue":
            left, right = memory.array(rng.standard_normal((m, n)).astype(np.float32) * 256), None
        else:
            numbers = (rng.standard_normal(shape).astype(np.float32) * 4 for shape in ((m, k), (n, k)))
            left, right = (matrix(memory, reference.encode(x, e4m3), k) for x in numbers)
        scales = [memory.array(rng.uniform(0.05, 0.15, count).astype(np.float32)) for count in (m, n)]
        bias = memory.array(rng.standard_normal(n).astype(np.float32))
        plain = ScaledMm(
            *(target, m, n, k, e4m3, e4m3, "float32", "row", "row", (1, 0), (1, 0), "float32"),
            *(False, False, True, False, k, k, n + 2, 16),
        )

        def run(problem, before):
            result = empty(memory, (m, n), FLOATS[problem.out], problem.ldo)
            result.values[...] = before
            given = (scale.ctypes.data for scale in (*scales, bias))
            if right is None:
                plan(problem)(0, left.ctypes.data, *given, result.pointer, 0, 0)
            else:
                plan(problem)(0, left.pointer, right.pointer, *given, result.pointer, 0, 0, 0)
            assert (result.gap.view(np.uint8) == 0xA5).all()
            return result.values

        before = (rng.standard_normal((m, n)) * 2).astype(np.float32)
        value = run(plain, before)
        assert np.abs(value).max() > 4
        for out, (activation, beta) in zip(("bfloat16", "float16", "float32", "float32"), ENDINGS, strict=True):
            held = before.astype(FLOATS[out])
            got = run(plain._replace(out=out, activation=activation or "", beta=beta), held)
            near(got, ended(value, held, activation, beta), out)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=["cuda", "hip"])
def test_an_activation_of_the_device_sources_is_near_float64(emulator, target, activation):
    """Of accumulators of all magnitudes up to 12, and of what is not ordinary. (A GPU's exp2 adds 2 ulp, its 1 / x one.)"""
    magnitudes = np.geomspace(2.0**-40, 12, 4000)
    x = np.concatenate([magnitudes, -magnitudes, [0, 1e30, math.inf, -1e30, -math.inf, math.nan]]).astype(np.float32)
    with emulator.watch() as memory:
        left, one = memory.array(x[None]), memory.array(np.ones(1, np.float32))
        problem = ScaledMm(
            *(target, 1, x.size, 16, FN, FN, "float32", "tensor", "tensor", (0, 0), (0, 0), ""),
            *(False, False, True, False, 16, 16, x.size, 16),
        )
        result = empty(memory, (1, x.size), np.float32, x.size)
        scales = one.ctypes.data, one.ctypes.data
        launch = plan_end(problem._replace(activation=activation))
        launch(0, left.ctypes.data, *scales, 0, result.pointer, 0, 0)
        got = result.values[0].copy()
    want = reference.activated(x[:-6], activation)
    assert (np.abs(got[:-6] - want) <= FORMULA * np.abs(want) + 1e-35).all()
    assert got[-6:-2].tolist() == [0, np.float32(1e30), math.inf, 0]
    assert np.isnan(got[-2:]).all()
