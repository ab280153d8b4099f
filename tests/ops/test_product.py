"""`scaled_mm`, `linear` and `Fp8Linear` against float64, within bounds that follow from the formats."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, PER_TOKEN
from support import reference
from support.engines import BOTH, FLOATS, FP8, engines, fresh, fresh_fp8
from support.products import EVEN, EXACT, FAST, MODES, ODD, operands


@engines(*BOTH)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ODD + EVEN, ids=str)
def test_every_mode_and_shape(engine, shape, mode, fast):
    m, n, k = shape
    a, weight, scale_a, scale_b, exact = operands(m, n, k, mode)
    got = fp8core.scaled_mm(
        engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b), use_fast_accum=fast
    )
    result = engine.numpy(got)
    assert result.shape == (m, n)
    assert result.dtype == ml_dtypes.bfloat16
    assert reference.relative_error(result, exact) <= (FAST if fast else EXACT)


@engines(*BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("bias_dtype", [None, "out", "float32"])
@pytest.mark.parametrize("m", [3, 96])
def test_bias_on_every_path(engine, mode, out, bias_dtype, m):
    n, k = 256, 512
    a, weight, scale_a, scale_b, exact = operands(m, n, k, mode)
    bias = None if bias_dtype is None else fresh((n,), out if bias_dtype == "out" else "float32", spread=1) * 1
    got = fp8core.scaled_mm(
        engine.array(a),
        engine.array(weight).T,
        engine.array(scale_a),
        engine.array(scale_b),
        bias=None if bias is None else engine.array(bias),
        out_dtype=out,
        use_fast_accum=False,
    )
    want = exact if bias is None else exact + bias.astype(np.float64)
    assert engine.numpy(got).dtype == FLOATS[out]
    assert reference.relative_error(engine.numpy(got), want) <= EXACT


@engines(*BOTH)
@pytest.mark.parametrize("pair", [("float8_e4m3fn", "float8_e5m2"), ("float8_e5m2", "float8_e4m3fn")], ids=str)
@pytest.mark.parametrize("mode", ["tensor-tensor", "row-row"])
@pytest.mark.parametrize("m", [4, 80])
def test_mixed_formats(engine, pair, mode, m):
    a, weight, scale_a, scale_b, exact = operands(m, 128, 256, mode, *pair)
    got = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b))
    assert reference.relative_error(engine.numpy(got), exact) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("mode", ["tensor-tensor", "row-row", "group-block"])
@pytest.mark.parametrize("m", [5, 80])
def test_an_fp8_result_and_its_amax(engine, mode, m):
    a, weight, scale_a, scale_b, exact = operands(m, 128, 256, mode)
    out_scale = np.array([np.abs(exact).max() / 300], np.float32)
    amax = engine.array(np.full(1, -1, np.float32))
    got = fp8core.scaled_mm(
        engine.array(a),
        engine.array(weight).T,
        engine.array(scale_a),
        engine.array(scale_b),
        out_dtype="float8_e4m3fn",
        out_scale=engine.array(out_scale),
        amax=amax,
        use_fast_accum=False,
    )
    back = reference.decode(engine.codes(got), "float8_e4m3fn") * out_scale
    # half a step of three mantissa bits, half a step of the subnormals, and the sum's own error, which does not shrink
    # with a sum that cancels: four times its bound over all elements
    summed = 4 * EXACT * np.sqrt((exact**2).mean())
    assert (np.abs(back - exact) <= np.abs(exact) / 16 + out_scale * 2.0**-10 + summed * (1 + 1 / 16)).all()
    np.testing.assert_allclose(engine.numpy(amax), np.abs(exact).max(), rtol=1e-3)


@engines(*BOTH)
@pytest.mark.parametrize("out_dtype", ["float32", "float8_e4m3fn"])
@pytest.mark.parametrize("m", [5, 80])
def test_amax_ignores_nan_and_is_0_if_there_is_nothing_else(engine, m, out_dtype):
    a, weight = fresh_fp8((m, 256)), fresh_fp8((128, 256))
    a.view(np.uint8)[1, 3] = 0x7F
    options = {"out_dtype": out_dtype, **({"out_scale": 1.0} if out_dtype in FP8 else {})}
    for bias, largest in ((0, None), (np.nan, 0)):
        amax, added = engine.array(np.full(1, -1, np.float32)), engine.array(np.full(128, bias, np.float32))
        fp8core.scaled_mm_nt(engine.array(a), engine.array(weight), 1.0, 1.0, bias=added, amax=amax, **options)
        want = a.astype(np.float64) @ weight.astype(np.float64).T
        np.testing.assert_allclose(engine.numpy(amax), np.nanmax(np.abs(want)) if largest is None else 0, rtol=1e-3)


@engines(*BOTH)
@pytest.mark.parametrize(("m", "n"), [(0, 128), (5, 0)])
def test_amax_is_0_without_elements(engine, m, n):
    a, weight, amax = fresh_fp8((m, 256)), fresh_fp8((n, 256)), engine.array(np.full(1, -1, np.float32))
    fp8core.scaled_mm_nt(engine.array(a), engine.array(weight), 1.0, 1.0, amax=amax)
    assert engine.numpy(amax) == 0


@engines(*BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [9, 80])
def test_negative_scales(engine, mode, m):
    a, weight, scale_a, scale_b, exact = operands(m, 256, 384, mode, low=-0.1)
    assert min(scale_a.min(), scale_b.min()) < 0
    got = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b))
    assert reference.relative_error(engine.numpy(got), exact) <= FAST


@engines(*BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1e-23, 1e23])
@pytest.mark.parametrize("m", [4, 80])
def test_scales_of_extreme_size(engine, size, mode, m):
    a, weight, scale_a, scale_b, exact = operands(m, 256, 512, mode)
    got = fp8core.scaled_mm(
        engine.array(a),
        engine.array(weight).T,
        engine.array(scale_a),
        engine.array((scale_b * size).astype(np.float32)),
        out_dtype="float32",
    )
    assert reference.relative_error(engine.numpy(got), exact * size) <= FAST


@engines("numpy", "cupy")
def test_same_inputs_same_bits(engine):
    a, weight, scale_a, scale_b, _ = operands(16, 512, 2048, "row-row")
    there = [engine.array(x) for x in (a, weight, scale_a, scale_b)]
    results = [engine.numpy(fp8core.scaled_mm(there[0], there[1].T, there[2], there[3])) for _ in range(5)]
    for result in results[1:]:
        np.testing.assert_array_equal(result.view(np.uint16), results[0].view(np.uint16))


@engines(*BOTH)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("n", "k"), [(256, 1024), (100, 333), (96, 128)])
def test_batch_invariant_rows_have_the_same_bits_for_every_m(engine, mode, n, k):
    a, weight, scale_a, scale_b, exact = operands(150, n, k, mode)
    there, scale_there = engine.array(weight).T, engine.array(scale_b)

    def rows(first, last):
        scale = scale_a if mode.startswith("tensor") else scale_a[first:last]
        given = engine.array(np.ascontiguousarray(a[first:last])), engine.array(np.ascontiguousarray(scale))
        result = fp8core.scaled_mm(given[0], there, given[1], scale_there, batch_invariant=True)
        return engine.numpy(result)

    whole = rows(0, 150)
    assert reference.relative_error(whole, exact) <= FAST
    for first, last in ((0, 1), (149, 150), (3, 5), (0, 8), (60, 77), (7, 40), (0, 64), (64, 129), (1, 130)):
        np.testing.assert_array_equal(rows(first, last).view(np.uint16), whole[first:last].view(np.uint16))


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 40), n=st.integers(1, 200), k=st.integers(1, 400), mode=st.sampled_from(MODES))
def test_any_shape_on_the_host(m, n, k, mode):
    a, weight, scale_a, scale_b, exact = operands(m, n, k, mode)
    got = fp8core.scaled_mm(a, weight.T, scale_a, scale_b, out_dtype="float32")
    assert reference.relative_error(got, exact) <= 1e-5


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 200),
    n=st.one_of(st.integers(1, 300), st.integers(1, 40).map(lambda x: 16 * x)),
    k=st.one_of(st.integers(1, 600), st.integers(1, 80).map(lambda x: 16 * x)),
    mode=st.sampled_from(MODES),
)
def test_any_shape_on_the_gpu(m, n, k, mode):
    from support.engines import CupyEngine

    engine = CupyEngine()
    a, weight, scale_a, scale_b, exact = operands(m, n, k, mode)
    got = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(scale_a), engine.array(scale_b))
    few = 2.0**-8 * (m * n < 256)  # the rounding of a single result to bfloat16; over many it averages out
    assert reference.relative_error(engine.numpy(got), exact) <= FAST + few


LINEARS = {
    "channel": ({"weight_group_shape": PER_CHANNEL}, 0.06),
    "tensor": ({"weight_group_shape": PER_TENSOR, "group_shape": PER_TENSOR}, 0.06),
    "block": ({"weight_group_shape": BLOCK_128, "group_shape": GROUP_128}, 0.06),
    "token x tensor": ({"weight_group_shape": PER_TENSOR}, 0.06),
    "tensor x channel": ({"group_shape": PER_TENSOR}, 0.06),
}


@engines()
@pytest.mark.parametrize("scheme", LINEARS)
@pytest.mark.parametrize("shape", [(1, 256), (5, 256), (2, 3, 256), (0, 256)], ids=str)
def test_linear_is_near_the_product_of_the_unquantized(engine, scheme, shape):
    options, bound = LINEARS[scheme]
    x, weight = fresh(shape, "float32", spread=1), fresh((384, 256), "float32", spread=1)
    bias = fresh((384,), "float32", spread=0)
    layer = fp8core.Fp8Linear.from_weight(engine.array(weight), bias=engine.array(bias), **options)
    got = engine.numpy(layer(engine.array(x)))
    want = x.astype(np.float64) @ weight.T.astype(np.float64) + bias
    assert got.shape == want.shape
    assert got.dtype == np.float32
    assert reference.relative_error(got, want) <= bound


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
def test_linear_is_quantize_and_scaled_mm(engine):
    x, weight = engine.array(fresh((5, 384))), engine.array(fresh((256, 384)))
    q = fp8core.quantize(weight)
    given_scale = engine.array(np.array([0.02], np.float32))
    for options in ({}, {"input_scale": given_scale}):
        data, scale = fp8core.quantize(x, scale=options.get("input_scale"), group_shape=PER_TOKEN)
        want = fp8core.scaled_mm(data, q.data.T, scale, q.scale, out_dtype="bfloat16")
        got = fp8core.linear(x, q.data, q.scale, **options)
        np.testing.assert_array_equal(engine.numpy(got).view(np.uint16), engine.numpy(want).view(np.uint16))
    data, scale = fp8core.quantize(x)
    already = fp8core.linear(data, q.data, q.scale, input_scale=scale)
    np.testing.assert_array_equal(
        engine.numpy(already).view(np.uint16), engine.numpy(fp8core.linear(x, q.data, q.scale)).view(np.uint16)
    )
