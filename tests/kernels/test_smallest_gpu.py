"""The smallest case of every kernel: what compute-sanitizer is run over (docs/dev/testing.md), for it is slow."""

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core.scaling import EPS
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.table import LINEAR
from fp8core.problem import Linear
from fp8core.runtime.plans import QuantizeNumbers
from support import reference
from support.engines import CupyEngine, assert_same_bytes, fresh, fresh_fp8, fresh_scale
from support.moe import choices, placed, summed

pytestmark = pytest.mark.gpu


@pytest.fixture
def engine():
    return CupyEngine()


@pytest.mark.parametrize(
    ("shape", "group_shape"),
    [
        ((2, 128), PER_TOKEN),
        ((17, 1032), PER_TOKEN),
        ((2, 256), GROUP_128),
        ((3, 136), GROUP_128),
        ((130, 136), BLOCK_128),
        ((2, 64), PER_TENSOR),
        ((132, 136), PER_TENSOR),
        ((1000, 136), PER_TENSOR),
        ((3, 20), (-1, 1)),
        ((5, 21), (3, 7)),
    ],
    ids=str,
)
def test_quantizations_are_the_reference_bit_for_bit(engine, shape, group_shape):
    x = fresh(shape)
    got = fp8core.quantize(engine.array(x), group_shape=group_shape)
    want = reference.quantize(x, group_shape=tuple(group_shape))
    assert_same_bytes(engine.codes(got.data), want.codes)
    scale = fresh_scale(fp8core.GroupShape(*group_shape).scale_shape(*shape))
    static = fp8core.quantize(engine.array(x), group_shape=group_shape, scale=engine.array(scale))
    assert_same_bytes(
        engine.codes(static.data), reference.quantize(x, group_shape=tuple(group_shape), scale=scale).codes
    )
    back = fp8core.dequantize(got.data, got.scale, group_shape=group_shape)
    assert engine.numpy(back).shape == shape


def test_functions_on_weights_give_the_reference(engine):
    weight, scales = fresh_fp8((6, 32)), fresh_scale((2,))
    want_scale, want = reference.requantize(weight.view(np.uint8), "float8_e4m3fn", scales, [2, 4])
    got_scale, got = fp8core.requantize_with_max_scale(engine.array(weight), engine.array(scales), [2, 4])
    assert engine.numpy(got_scale) == want_scale
    assert_same_bytes(engine.codes(got), want)
    assert engine.numpy(fp8core.convert_to_channelwise(engine.array(scales), [2, 4])).shape == (6, 1)
    fnuz, scale, _ = fp8core.normalize_e4m3fn_to_e4m3fnuz(engine.array(weight), engine.array(scales))
    back, _, _ = fp8core.normalize_e4m3fnuz_to_e4m3fn(fnuz, scale)
    values = engine.numpy(back).astype(np.float32)
    np.testing.assert_array_equal(values, weight.astype(np.float32))
    assert fp8core.all_close_1d(engine.array(np.ones(5, np.float32)))


@pytest.mark.parametrize("cols", [256, 6144], ids=["a block a row", "a cluster a row"])
@pytest.mark.parametrize("group_shape", [PER_TOKEN, GROUP_128], ids=str)
def test_producers_run_in_blocks_and_clusters(engine, group_shape, cols):
    x, weight = engine.array(fresh((2, cols))), engine.array(fresh((cols,)))
    residual = engine.array(fresh((2, cols), spread=1))
    for got in (
        fp8core.rms_norm_quant(x, weight, 1e-6, group_shape=group_shape),
        fp8core.rms_norm_quant(x, weight, 1e-6, residual=residual, group_shape=group_shape),
    ):
        assert engine.codes(got.data).shape == (2, cols)
    assert engine.codes(fp8core.silu_and_mul_quant(x, group_shape=group_shape).data).shape == (2, cols // 2)


@pytest.mark.parametrize("tokens", [3, 1100], ids=["one launch", "chunks counted before"])
def test_rows_of_experts_are_sorted_and_summed(engine, tokens):
    x, ids, shares = fresh((tokens, 72)), choices(tokens, 2, 5, outside=True), fresh((tokens, 2), "float32")
    q = fp8core.quantize(engine.array(x), group_shape=GROUP_128)
    rows, offs, inverse = fp8core.moe_permute(q, engine.array(ids), 5)
    want, places, of = placed(ids, 5)
    assert_same_bytes(engine.numpy(offs), want)
    assert_same_bytes(engine.numpy(inverse), places)
    # Rows behind the last expert's are not written: initcheck reports whoever reads them.
    assert_same_bytes(engine.codes(rows.data[: len(of)]), engine.codes(q.data)[of])
    assert_same_bytes(engine.numpy(rows.scale[: len(of)]), engine.numpy(q.scale)[of])
    y = fresh((ids.size, 72), spread=1)
    made = fp8core.moe_unpermute(engine.array(y), inverse, engine.array(shares))
    assert_same_bytes(engine.numpy(made), summed(y, places, shares, "bfloat16"))


MODES = {
    "row": ((3, 1), (1, 32), 128),
    "mixed": ((1,), (1, 32), 128),
    "odd": ((3, 1), (1, 32), 129),
    "block": ((3, 2), (2, 1), 256),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernel", [kernel.name for kernel in SCALED_MM.kernels if kernel.name != "host"])
def test_every_able_row_multiplies(engine, kernel, mode):
    """Plan each row of the table that can run the problem here, not only the preferred one."""
    shape_a, shape_b, k = MODES[mode]
    a, weight = fresh_fp8((3, k)), fresh_fp8((32, k))
    scale_a, scale_b = fresh_scale(shape_a), fresh_scale(shape_b)
    there = [engine.array(x) for x in (a, weight, scale_a, scale_b)]
    problem = fp8core.explain(fp8core.scaled_mm, there[0], there[1].T, there[2], there[3]).problem
    row = next(row for row in SCALED_MM.kernels if row.name == kernel)
    refusal = row.refusal(problem)
    if refusal is not None:
        pytest.skip(refusal)
    launch = row.plan(problem)
    out = engine.cupy.zeros((3, 32), fresh((1,)).dtype)
    scratch = engine.cupy.zeros(launch.scratch_bytes + 256, "uint8")
    pointers = [there[0].codes.data.ptr, there[1].codes.data.ptr, there[2].data.ptr, there[3].data.ptr]
    launch(0, *pointers, 0, out.data.ptr, 0, 0, -(-scratch.data.ptr // 256) * 256)
    wide_a = np.repeat(scale_a, 128, 1)[:, :k] if mode == "block" else scale_a
    wide_b = np.repeat(np.repeat(scale_b, 128, 0)[:k], 128, 1)[:, :32] if mode == "block" else scale_b
    exact = reference.scaled_mm(a.astype(np.float32), weight.astype(np.float32).T, wide_a, wide_b)
    assert reference.relative_error(engine.numpy(out), exact) <= 3e-3


@pytest.mark.parametrize("static", [False, True], ids=["token", "static"])
@pytest.mark.parametrize("kernel", [kernel.name for kernel in LINEAR.kernels])
def test_every_able_row_runs_a_layer(engine, kernel, static):
    """Plan each row of the table: a ragged end of k, and a cluster that shares it where there is one."""
    m, n, k = 3, 32, 400
    options = {"input_scale": engine.array(fresh_scale((1,))), "group_shape": PER_TENSOR} if static else {}
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((n, k), "float16")), **options)
    x = engine.array(fresh((m, k), "float16", spread=1))
    told = layer.explain(x)
    problem = next(step.problem for step in (*told.before, told) if isinstance(step.problem, Linear))
    row = next(row for row in LINEAR.kernels if row.name == kernel)
    refusal = row.refusal(problem)
    if refusal is not None:
        pytest.skip(refusal)
    quantize, product = row.plan(problem)
    codes, out = engine.cupy.zeros((m, k), "uint8"), engine.cupy.zeros((m, n), "float16")
    scale = options.get("input_scale", engine.cupy.zeros(m, "float32"))
    a = x if quantize is None else codes
    if quantize is not None:
        strides = problem.product.scale_a_strides
        launch = quantize.bind(QuantizeNumbers(k, k, *strides, m, m, problem.scale_ub, EPS))
        launch(0, x.data.ptr, codes.data.ptr, scale.data.ptr, 0)
    weight = layer.weight.codes.data.ptr, scale.data.ptr, layer.weight_scale.data.ptr
    product(0, a.data.ptr, *weight, 0, out.data.ptr, 0, 0, 0)
    np.testing.assert_array_equal(engine.numpy(out), engine.numpy(layer(x)))
