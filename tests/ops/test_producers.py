"""The fused producers against float64, and against what they fuse: `quantize` of the same numbers."""

import weakref

import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core import operation
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE, plan_norm_quantize, plan_silu_quantize
from fp8core.problem import NormQuantize, SiluQuantize
from fp8core.runtime import device, jit
from fp8core.runtime.plans import RmsNormNumbers, SiluNumbers
from fp8core.target import Target
from support import reference
from support.engines import BOTH, FLOATS, MAKERS, assert_same_bytes, engines, fresh, fresh_scale
from support.launches import whole
from support.recorder import Recorder
from support.targets import H200

SHAPES = ((1, 4096), (7, 576), (3, 1024), (130, 256), (2, 5136), (5, 8192))
SCALINGS = {
    "static": {"group_shape": PER_TENSOR, "scale": True},
    "token": {"group_shape": PER_TOKEN},
    "token ue8m0": {"group_shape": PER_TOKEN, "scale_format": "ue8m0"},
    "bounded token": {"group_shape": PER_TOKEN, "scale_ub": 1.5},
    "groups": {"group_shape": GROUP_128},
    "groups ue8m0": {"group_shape": GROUP_128, "scale_format": "ue8m0"},
    "groups for the product": {"group_shape": GROUP_128, "scale_layout": "mn"},
}
STEP = 2.0**-3
"""Between neighbours of e4m3 lies an eighth of the lower one at most."""


def options_of(engine, scaling):
    options = dict(SCALINGS[scaling])
    if options.pop("scale", False):
        options["scale"] = engine.array(np.array([0.01], np.float32))
    return options


def check(engine, got, exact, scaling):
    near((engine.codes(got.data), np.ascontiguousarray(engine.numpy(got.scale))), exact, scaling)


def near(got, exact, scaling):
    """Assert that codes stand within one step of what they should: the last bits of the fp32 values may differ."""
    options = dict(SCALINGS[scaling])
    given = np.array([0.01], np.float32) if options.pop("scale", False) else None
    options.pop("scale_layout", None)
    want = reference.quantize(
        exact.astype(np.float32), group_shape=tuple(options.pop("group_shape")), scale=given, **options
    )
    codes, scale = got
    assert codes.shape == exact.shape
    if "ue8m0" in scaling:
        ratio = scale / want.scale
        assert np.isin(ratio, (0.5, 1.0, 2.0)).all()
        assert (ratio != 1).mean() < 0.01
        same = np.broadcast_to(
            np.repeat(ratio == 1, 128, 1)[:, : codes.shape[1]] if scale.shape[1] > 1 else ratio == 1, codes.shape
        )
    else:
        np.testing.assert_allclose(scale.reshape(want.scale.shape), want.scale, rtol=1e-6)
        same = np.ones(codes.shape, bool)
    a, b = (reference.decode(c, "float8_e4m3fn") for c in (codes, want.codes))
    near = np.abs(a - b) <= np.maximum(np.maximum(np.abs(a), np.abs(b)) * STEP, 2.0**-9)
    assert near[same].all()
    assert (codes != want.codes)[same].mean() < 1e-3


@engines(*BOTH)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("residual", [False, True])
def test_rms_norm_quant(engine, residual, scaling, x_dtype):
    for shape in SHAPES:
        x, weight = fresh(shape, x_dtype, spread=2), fresh((shape[1],), x_dtype, spread=1)
        normed, stored, extra = x, None, {}
        if residual:
            other = fresh(shape, x_dtype, spread=3)
            there = engine.array(other.copy())
            normed, stored = reference.add(x, other)
            extra = {"residual": there}
        got = fp8core.rms_norm_quant(
            engine.array(x), engine.array(weight), 1e-5, **extra, **options_of(engine, scaling)
        )
        check(engine, got, reference.rms_norm(normed, weight, 1e-5), scaling)
        if residual:
            assert_same_bytes(engine.numpy(there), stored)


@engines(*BOTH)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_silu_and_mul_quant(engine, scaling, x_dtype):
    for rows, cols in SHAPES:
        x = fresh((rows, 2 * cols), x_dtype, spread=2)
        got = fp8core.silu_and_mul_quant(engine.array(x), **options_of(engine, scaling))
        check(engine, got, reference.silu(x[:, :cols]) * x[:, cols:].astype(np.float64), scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("multiprocessors", [1, 3, 9, 132])
@pytest.mark.parametrize("scaling", ["static", "token", "bounded token", "groups"])
@pytest.mark.parametrize("cols", [4096, 4104, 5120, 7296, 8192, 14336, 40000])
def test_blocks_by_the_number_of_rows(cols, scaling, multiprocessors):
    """Nine rows are many for a device of one multiprocessor, and are shared by clusters on one of 132."""
    engine, rows, options = MAKERS["cupy"](), 9, dict(SCALINGS[scaling])
    static, bound = options.pop("scale", False), options.pop("scale_ub", float("inf"))
    target = device.target(0)._replace(multiprocessors=multiprocessors)
    x, other, weight = (engine.array(fresh((count, cols), spread=2)) for count in (rows, rows, 1))
    both = engine.array(np.concatenate([engine.numpy(x), engine.numpy(other)], axis=1))

    def results(call):
        scale = engine.cupy.full(options["group_shape"].scale_shape(rows, cols), 0.01 if static else 0, np.float32)
        data = engine.cupy.zeros((rows, cols), np.uint8)
        strides = [0 if extent == 1 else s // 4 for extent, s in zip(scale.shape, scale.strides, strict=True)]
        call((data.data.ptr, cols, scale.data.ptr, *strides, rows, 0, bound, 1e-10))
        return engine.numpy(data), engine.numpy(scale)

    form = (options["group_shape"], static, "float32", "k")
    exact = [engine.numpy(a).astype(np.float64) for a in (x, other, weight)]
    for residual in (None, other.copy()):
        how = ("bfloat16", "bfloat16", "float8_e4m3fn", *form, residual is not None, False, cols, 16)
        launch = whole(plan_norm_quantize(NormQuantize(target, *how)))
        there = residual.data.ptr if residual is not None else 0
        got = results(lambda out, f=launch, r=there: f(0, x.data.ptr, cols, r, cols, weight.data.ptr, 1e-5, *out))
        h, stored = reference.add(engine.numpy(x), engine.numpy(other)) if there else (exact[0], None)
        near(got, reference.rms_norm(h, exact[2][0], 1e-5), scaling)
        if residual is not None:
            assert_same_bytes(engine.numpy(residual), stored)
    silu = whole(plan_silu_quantize(SiluQuantize(target, "bfloat16", "float8_e4m3fn", *form, False, cols, 16)))
    got = results(lambda out: silu(0, both.data.ptr, 2 * cols, *out))
    near(got, reference.silu(engine.numpy(x)) * exact[1], scaling)


@pytest.mark.parametrize(
    ("producer", "rows", "cols", "block", "all_shared"),
    [
        ("norm", 16, 8192, (128, 2, 4), True),
        ("norm", 66, 8192, (128, 2, 4), True),
        ("norm", 128, 2048, (256, 1, 1), True),
        ("norm", 133, 2048, (256, 1, 1), False),
        ("norm", 1024, 8192, (512, 2, 1), False),
        ("silu", 1, 3584, (128, 1, 4), True),
        ("silu", 16, 3584, (448, 1, 1), True),
        ("silu", 16, 4096, (128, 1, 4), True),
        ("silu", 1024, 3584, (256, 2, 1), False),
        ("silu", 16, 8192, (256, 1, 4), True),
        ("silu", 16, 14336, (224, 2, 4), True),
        ("silu", 16, 1024, (128, 1, 1), True),
        ("silu", 133, 1024, (128, 1, 1), False),
    ],
)
def test_kernels_of_few_rows_leave_multiprocessors_as_products_need_them(
    producer, rows, cols, block, all_shared, monkeypatch
):
    found = []

    def prepare(target, source, entry, constants, arguments, **launch):
        found.append((tuple(constants[f"FP8_{name}"] for name in ("THREADS", "VECTORS", "BLOCKS")), launch))
        return Recorder(entry, [])

    monkeypatch.setattr(jit, "prepare", prepare)
    form = (PER_TOKEN, False, "float32", "k", *((True,) if producer == "norm" else ()), False, cols, 16)
    if producer == "norm":
        plan = plan_norm_quantize(NormQuantize(H200, "bfloat16", "bfloat16", "float8_e4m3fn", *form))
        plan.bind(RmsNormNumbers(cols, cols, 1e-5, cols, 1, 0, rows, 1.0, 1e-10))
    else:
        plan = plan_silu_quantize(SiluQuantize(H200, "bfloat16", "float8_e4m3fn", *form))
        plan.bind(SiluNumbers(2 * cols, cols, 1, 0, rows, 1.0, 1e-10))
    [(got, launch)] = found
    assert (got, launch["all_shared"], launch["block"]) == (block, all_shared, block[0])


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("function", ["norm", "silu"])
def test_given_memory_and_leading_axes(engine, function):
    x = fresh((2, 3, 512), spread=1)
    cols = 512 if function == "norm" else 256
    out = (
        engine.array(np.zeros((2, 3, cols), fp8core.quantize(x[0]).data.dtype)),
        engine.array(np.zeros((2, 3, 1), np.float32)),
    )
    if function == "norm":
        weight = engine.array(fresh((512,)))
        got = fp8core.rms_norm_quant(engine.array(x), weight, 1e-6, out=out)
        fresh_result = fp8core.rms_norm_quant(engine.array(x), weight, 1e-6)
    else:
        got = fp8core.silu_and_mul_quant(engine.array(x), out=out)
        fresh_result = fp8core.silu_and_mul_quant(engine.array(x))
    assert got.data is out[0]
    assert got.scale is out[1]
    assert_same_bytes(engine.codes(got.data), engine.codes(fresh_result.data))
    assert_same_bytes(engine.numpy(got.scale), engine.numpy(fresh_result.scale))


CALLS = {
    "norm": lambda x, weight, epsilon, residual: fp8core.rms_norm_quant(x, weight, epsilon),
    "add + norm": lambda x, weight, epsilon, residual: fp8core.rms_norm_quant(x, weight, epsilon, residual=residual),
    "silu": lambda x, weight, epsilon, residual: fp8core.silu_and_mul_quant(x),
}


@engines("torch-cpu", "torch-cuda")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_repeated_call_is_that_of_its_own_operands(engine, call):
    for epsilon in (1e-6, 1e-6, 1.0):
        x, residual, weight = engine.torch.randn(3, 4, 512, device=engine.device)
        left = residual.clone()
        got = call(x, weight[0], epsilon, left)
        operation.forget()
        want = call(x, weight[0], epsilon, residual)
        assert_same_bytes(engine.codes(got.data), engine.codes(want.data))
        assert_same_bytes(engine.numpy(got.scale), engine.numpy(want.scale))
        assert_same_bytes(engine.numpy(left), engine.numpy(residual))


@engines("torch-cpu")
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_kept_of_a_call_keeps_no_operand(engine, call):
    operands = [engine.torch.ones(*shape) for shape in ((4, 512), (512,), (4, 512))]
    for _ in range(2):
        call(operands[0], operands[1], 1e-6, operands[2])
    alive = [weakref.ref(operand) for operand in operands]
    del operands
    assert [there() for there in alive] == [None] * 3


@engines(*BOTH)
@pytest.mark.parametrize("function", ["quantize", "norm", "silu"])
@pytest.mark.parametrize(
    ("group", "least"),
    [(PER_TOKEN, np.float32(1 / (448 * 512))), (GROUP_128, np.float32(1e-10) / np.float32(448))],
    ids=str,
)
def test_groups_of_nothing_but_nan_have_the_least_scale(engine, function, group, least):
    """Also those of a row of a norm that has one NaN, which makes the mean square NaN."""
    x = fresh((3, 1024), "bfloat16", spread=1)
    x[1, 5 if function == "norm" else slice(None)] = np.nan
    if function == "norm":
        got = fp8core.rms_norm_quant(engine.array(x), engine.array(fresh((1024,))), 1e-6, group_shape=group)
    else:
        call = fp8core.quantize if function == "quantize" else fp8core.silu_and_mul_quant
        got = call(engine.array(x), group_shape=group)
    codes, scale = engine.codes(got.data), engine.numpy(got.scale)
    assert (codes[1] == 0x7F).all()
    assert (scale[1] == least).all()
    assert (scale[::2] > 1e-4).all()
    assert not (codes[::2] & 0x7F == 0x7F).any()


@engines(*BOTH)
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float16"])
def test_rounding_in_between_as_static_kernels_of_vllm_do(engine, x_dtype):
    x, scale = fresh((9, 1024), x_dtype, spread=1), np.array([0.02], np.float32)
    got = fp8core.silu_and_mul_quant(
        engine.array(x), group_shape=PER_TENSOR, scale=engine.array(scale), round_intermediate=True
    )
    rounded = reference.silu(x[:, :512]).astype(np.float32).astype(FLOATS[x_dtype])
    product = (rounded.astype(np.float32) * x[:, 512:].astype(np.float32)).astype(FLOATS[x_dtype])
    want = reference.quantize(product, group_shape=(-1, -1), scale=scale)
    assert (engine.codes(got.data) != want.codes).mean() < 2e-3


@engines(*BOTH)
@pytest.mark.parametrize("static", [False, True])
def test_the_sum_is_rounded_before_the_norm_only_with_rounding_and_a_given_scale(engine, static):
    """The sums are halfway between numbers of bfloat16, so that one rounded before the norm gives other codes."""
    x = fresh((6, 512), spread=0)
    other = (x.astype(np.float32) * np.float32(2.0**-7)).astype(x.dtype)
    weight, there = np.ones(512, x.dtype), engine.array(other.copy())
    options = {"group_shape": PER_TENSOR, "scale": engine.array(np.array([0.01], np.float32))} if static else {}
    got = fp8core.rms_norm_quant(
        engine.array(x), engine.array(weight), 1e-5, residual=there, round_intermediate=True, **options
    )
    normed, stored = reference.add(x, other, rounded=static)
    values = reference.rms_norm(normed, weight, 1e-5).astype(np.float32).astype(x.dtype)
    given = np.array([0.01], np.float32) if static else None
    want = reference.quantize(values, group_shape=(-1, -1) if static else (1, -1), scale=given)
    assert_same_bytes(engine.numpy(there), stored)
    assert (engine.codes(got.data) != want.codes).mean() < 2e-3


@engines(*BOTH)
def test_activations_of_float16_are_rounded_as_those_of_the_formula(engine):
    gate, activated = reference.gates_near_ties(slack=3 if engine.name == "numpy" else 2)
    assert len(gate) > 16
    # Up puts the products all over the codes: some product of every activation is between two codes at a tie.
    up = np.linspace(1, 2, 512)[None] * np.exp2(-np.floor(np.log2(np.abs(activated.astype(np.float64)))))[:, None]
    up = np.minimum(up, 32768).astype(np.float16)
    x = np.concatenate([np.broadcast_to(gate[:, None], up.shape), up], axis=1)
    scale = np.ones(1, np.float32)
    got = fp8core.silu_and_mul_quant(
        engine.array(x), group_shape=PER_TENSOR, scale=engine.array(scale), round_intermediate=True
    )
    product = (activated.astype(np.float32)[:, None] * up.astype(np.float32)).astype(np.float16)
    assert_same_bytes(engine.codes(got.data), reference.quantize(product, group_shape=(-1, -1), scale=scale).codes)


@engines(*BOTH)
def test_gates_of_every_size(engine):
    gate = np.concatenate([np.linspace(-120, 120, 1000), [np.inf, 0.0, -0.0, 1e-30, 88.7, -88.7, -103.9]])
    x = np.concatenate([gate, np.ones_like(gate)])[None].astype(np.float32)
    got = fp8core.silu_and_mul_quant(
        engine.array(x), group_shape=PER_TENSOR, scale=engine.array(fresh_scale((1,)) * 0 + 1)
    )
    with np.errstate(over="ignore", invalid="ignore"):
        exact = reference.silu(np.where(np.isinf(gate), 1e9, gate))
    back = reference.decode(engine.codes(got.data), "float8_e4m3fn")[0]
    np.testing.assert_allclose(back, np.clip(exact, -448, 448), rtol=STEP / 2 + 1e-3, atol=2.0**-10)


@engines(*BOTH)
@pytest.mark.parametrize("function", ["norm", "silu"])
def test_a_given_scale_may_be_a_number_and_comes_back_as_an_array(engine, function):
    x, weight = engine.array(fresh((4, 64))), engine.array(fresh((64,)))
    scales = 0.25, engine.array(np.float32([0.25]))
    calls = {
        "norm": lambda scale: fp8core.rms_norm_quant(x, weight, 0.0, scale=scale),
        "silu": lambda scale: fp8core.silu_and_mul_quant(x, scale=scale),
    }
    got, want = map(calls[function], scales)
    assert_same_bytes(engine.codes(got.data), engine.codes(want.data))
    assert_same_bytes(engine.numpy(got.scale), engine.numpy(want.scale))


@pytest.mark.parametrize("function", ["norm", "silu"])
def test_arguments_that_do_not_fit_are_refused(function):
    x, weight = fresh((4, 64)), fresh((64,))
    call = (
        (lambda **o: fp8core.rms_norm_quant(x, weight, 1e-6, **o))
        if function == "norm"
        else (lambda **o: fp8core.silu_and_mul_quant(x, **o))
    )
    with pytest.raises(fp8core.UnsupportedProblemError, match="no kernel"):
        call(group_shape=PER_TENSOR)
    with pytest.raises(fp8core.DTypeError, match="dtype"):
        call(dtype="float16")
    with pytest.raises(fp8core.ShapeError, match=r"weight needs 64|gate and up"):
        fp8core.rms_norm_quant(x, fresh((63,)), 1e-6) if function == "norm" else fp8core.silu_and_mul_quant(
            fresh((4, 63))
        )


def test_a_residual_of_another_shape_is_refused_before_anything_is_written():
    x, residual = fresh((4, 64)), fresh((4, 32))
    before = residual.tobytes()
    with pytest.raises(fp8core.ShapeError, match="residual needs shape"):
        fp8core.rms_norm_quant(x, fresh((64,)), 1e-6, residual=residual)
    assert residual.tobytes() == before


@pytest.mark.parametrize("table", [NORM_QUANTIZE, SILU_QUANTIZE], ids=lambda table: table.name)
def test_rows_past_whose_end_a_block_cannot_count_are_refused(table):
    """The number of passes over a row, rounded up in 32 bits, would be negative: nothing would be written."""
    most, target = (1 << 31) - (1 << 16), Target("cuda", 90, 0, 132, 32, 227 * 1024)
    form = (PER_TOKEN, False, "float32", "k")

    def refusal(cols):
        if table is NORM_QUANTIZE:
            problem = NormQuantize(target, "bfloat16", "bfloat16", "float8_e4m3fn", *form, False, False, cols, 16)
        else:
            problem = SiluQuantize(target, "bfloat16", "float8_e4m3fn", *form, False, cols, 16)
        return table.kernels[0].refusal(problem)

    assert refusal(most) is None
    assert refusal(most + 8) == f"needs at most {most} columns, got {most + 8}"
