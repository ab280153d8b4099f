"""`moe_permute` and `moe_unpermute` against loops over the choices, in every framework, dtype and layout."""

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import GROUP_128, PER_TENSOR, PER_TOKEN, Float8Array, Quantized
from support import reference
from support.engines import BOTH, FLOATS, assert_same_bytes, engines, fresh, fresh_fp8, fresh_scale
from support.moe import choices, placed, summed
from support.products import EXACT

POISON = 0x5A


def check_permuted(engine, made, x, ids, experts, scale=None):
    offs, inverse, tokens = placed(ids, experts)
    assert_same_bytes(engine.numpy(made.offs), offs)
    assert_same_bytes(engine.numpy(made.inverse), inverse)
    rows = made.rows.data if isinstance(made.rows, Quantized) else made.rows
    assert tuple(rows.shape) == (ids.size, x.shape[1])
    bytes_ = engine.numpy(rows).view(np.uint8) if not isinstance(rows, Float8Array) else engine.codes(rows)
    assert_same_bytes(bytes_[: len(tokens)], np.ascontiguousarray(x).view(np.uint8)[tokens])
    if scale is not None:
        assert tuple(made.rows.scale.shape) == (ids.size, *scale.shape[1:])
        assert_same_bytes(engine.numpy(made.rows.scale)[: len(tokens)], scale[tokens])


SIZES = [
    (16, 8, 128),
    (1, 1, 1),
    (7, 3, 5),
    (300, 2, 40),
    (1000, 8, 256),
    (33, 6, 64),
    (5, 4, 1024),
    (129, 10, 300),
    (9000, 8, 128),
]


@engines(*BOTH)
@pytest.mark.parametrize("outside", [False, True], ids=["all", "some"])
@pytest.mark.parametrize(("tokens", "each", "experts"), SIZES)
def test_every_division_of_the_choices(engine, tokens, each, experts, outside):
    x, ids = fresh((tokens, 48), "float32"), choices(tokens, each, experts, outside=outside)
    check_permuted(engine, fp8core.moe_permute(engine.array(x), engine.array(ids), experts), x, ids, experts)


@engines(*BOTH)
@pytest.mark.parametrize("spread", ["one", "last", "equal"])
def test_choices_that_are_not_random(engine, spread):
    tokens, each, experts = 700, 4, 96
    ids = np.zeros((tokens, each), np.int32)
    if spread == "last":
        ids += experts - 1
    if spread == "equal":
        ids = np.arange(tokens * each, dtype=np.int32)[::-1].reshape(tokens, each) % experts
    x = fresh((tokens, 16), "float16")
    made = fp8core.moe_permute(engine.array(x), engine.array(np.ascontiguousarray(ids)), experts)
    check_permuted(engine, made, x, ids, experts)


@engines(*BOTH)
@pytest.mark.parametrize("cols", [1, 7, 40, 130, 513, 4096])
@pytest.mark.parametrize("dtype", [*FLOATS, "float8_e4m3fn", "float8_e5m2fnuz"])
def test_rows_of_every_dtype_and_length(engine, dtype, cols):
    x = fresh_fp8((9, cols), dtype) if dtype.startswith("float8") else fresh((9, cols), dtype)
    ids = choices(9, 3, 6, outside=True, dtype=np.int32)
    check_permuted(engine, fp8core.moe_permute(engine.array(x), engine.array(ids), 6), x, ids, 6)


@engines()
@pytest.mark.parametrize("layout", ["k", "mn"])
@pytest.mark.parametrize("format_", ["float32", "ue8m0", "ue8m0_bytes"])
def test_scales_of_groups_keep_their_layout(engine, format_, layout):
    x, ids = fresh((21, 500), spread=1), choices(21, 2, 4, dtype=np.int32)
    q = fp8core.quantize(
        engine.array(x),
        group_shape=GROUP_128,
        scale_format=format_,
        scale_layout="k" if "jax" in engine.name else layout,
    )
    made = fp8core.moe_permute(q, engine.array(ids), 4)
    assert made.rows.group_shape == GROUP_128
    codes, scale = engine.codes(q.data).reshape(21, 500), engine.numpy(q.scale)
    check_permuted(engine, made, codes, ids, 4, scale)
    if layout == "mn" and "jax" not in engine.name:
        strides = made.rows.scale.strides if hasattr(made.rows.scale, "strides") else made.rows.scale.stride()
        assert strides[0] < strides[1]


@engines()
def test_scales_of_tokens_and_tensors(engine):
    x, ids = fresh((6, 96), spread=1), choices(6, 2, 3, dtype=np.int32)
    for group in (PER_TOKEN, PER_TENSOR):
        q = fp8core.quantize(engine.array(x), group_shape=group)
        made = fp8core.moe_permute(q, engine.array(ids), 3)
        assert made.rows.group_shape == group
        codes = engine.codes(q.data).reshape(6, 96)
        check_permuted(engine, made, codes, ids, 3, engine.numpy(q.scale) if group == PER_TOKEN else None)
        if group == PER_TENSOR:
            assert made.rows.scale is q.scale


@engines(*BOTH)
@pytest.mark.parametrize("tokens", [1, 5])
def test_forms_of_scales(engine, tokens):
    """One number stays one number, whatever its form; a number for each token becomes one for each row."""
    codes, ids = fresh_fp8((tokens, 32)), choices(tokens, 2, 3, dtype=np.int32)
    data, index = engine.array(codes), engine.array(ids)
    for number in (0.5, engine.array(np.array(0.5, np.float32))):
        assert fp8core.moe_permute(Quantized(data, number), index, 3).rows.scale is number
    flat = fresh_scale((tokens,))
    check_permuted(engine, fp8core.moe_permute(Quantized(data, engine.array(flat)), index, 3), codes, ids, 3, flat)


@engines("numpy", "cupy", "torch-cpu", "torch-cuda")
def test_rows_with_gaps(engine):
    for dtype, cols, gap in (("bfloat16", 64, 8), ("float32", 20, 3), ("float16", 33, 1)):
        x, ids = fresh((12, cols + gap), dtype), choices(12, 2, 5)
        made = fp8core.moe_permute(engine.array(x)[:, :cols], engine.array(ids), 5)
        check_permuted(engine, made, x[:, :cols], ids, 5)


@engines(*BOTH)
def test_without_tokens_experts_or_columns(engine):
    for tokens, each, experts, cols in ((0, 2, 3, 8), (4, 0, 3, 8), (4, 2, 0, 8), (4, 2, 3, 0)):
        x, ids = fresh((tokens, cols), "float32"), np.zeros((tokens, each), np.int64)
        made = fp8core.moe_permute(engine.array(x), engine.array(ids), experts)
        check_permuted(engine, made, x, ids, experts)


@engines(*BOTH)
@pytest.mark.parametrize("out", FLOATS)
@pytest.mark.parametrize("weights", [None, *FLOATS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_in_every_dtype(engine, dtype, weights, out):
    y, inverse = fresh((40, 72), dtype), placed(choices(20, 2, 8), 8)[1]
    shares = None if weights is None else fresh((20, 2), weights, spread=1)
    given = None if shares is None else engine.array(shares)
    made = fp8core.moe_unpermute(engine.array(y), engine.array(inverse), given, out_dtype=out)
    assert_same_bytes(engine.numpy(made), summed(y, inverse, shares, out))


@engines(*BOTH)
@pytest.mark.parametrize(("tokens", "each", "cols"), [(1, 1, 1), (3, 10, 7), (130, 8, 2048), (17, 3, 514), (2, 9, 100)])
def test_sums_of_every_shape(engine, tokens, each, cols):
    y, inverse = fresh((tokens * each, cols)), placed(choices(tokens, each, 12, outside=True), 12)[1]
    shares = fresh((tokens, each), "float32", spread=1)
    made = fp8core.moe_unpermute(engine.array(y), engine.array(inverse), engine.array(shares))
    assert engine.numpy(made).dtype == ml_dtypes.bfloat16
    assert_same_bytes(engine.numpy(made), summed(y, inverse, shares, "bfloat16"))


@engines()
def test_sums_in_every_framework(engine):
    y, inverse = fresh((40, 72), "float32"), placed(choices(20, 2, 8), 8)[1]
    made = fp8core.moe_unpermute(engine.array(y), engine.array(inverse))
    assert_same_bytes(engine.numpy(made), summed(y, inverse, None, "float32"))


@engines(*BOTH)
def test_choices_without_a_row_are_left_out(engine):
    """Whatever the weights of such choices and the other rows hold."""
    y = np.full((4, 16), np.nan, np.float32)
    y[1] = 2
    inverse = np.array([[-1, 1], [4, 1], [2**31 - 1, -(2**31)]], np.int32)
    shares = np.array([[np.nan, 3], [np.inf, 5], [1, 1]], np.float32)
    made = engine.numpy(fp8core.moe_unpermute(engine.array(y), engine.array(inverse), engine.array(shares)))
    assert made.tolist() == [[6.0] * 16, [10.0] * 16, [0.0] * 16]


@engines("numpy", "cupy", "torch-cpu", "torch-cuda")
def test_out_with_gaps(engine):
    for dtype, out, cols in (("bfloat16", "float32", 48), ("float32", "bfloat16", 20), ("float16", "float16", 33)):
        y, inverse = fresh((10, cols), dtype), placed(choices(5, 2, 4), 4)[1]
        whole = np.full((5, cols + 5), POISON, FLOATS[out])
        into = engine.array(whole)
        made = fp8core.moe_unpermute(engine.array(y), engine.array(inverse), out_dtype=out, out=into[:, :cols])
        want = summed(y, inverse, None, out)
        assert_same_bytes(engine.numpy(made), want)
        whole[:, :cols] = want
        assert_same_bytes(engine.numpy(into), whole)


@engines(*BOTH)
def test_a_mixture_of_experts(engine):
    """Permuted, multiplied and summed: each token's sum over its experts, one by one, in float64."""
    tokens, each, experts, n, k = 50, 3, 10, 64, 256
    x, ids = fresh((tokens, k), spread=1), choices(tokens, each, experts, outside=True)
    weight, shares = fresh((experts, n, k), spread=1), fresh((tokens, each), "float32", spread=1)
    q, stored = fp8core.quantize(engine.array(x)), fp8core.quantize(engine.array(weight), group_shape=PER_TOKEN)
    rows, offs, inverse = fp8core.moe_permute(q, engine.array(ids), experts)
    y = fp8core.grouped_scaled_mm_nt(rows, stored, offs=offs, out_dtype="float32", use_fast_accum=False)
    made = engine.numpy(fp8core.moe_unpermute(y, inverse, engine.array(shares)))
    wide, weights = (engine.numpy(one.dequantize()).astype(np.float64) for one in (q, stored))
    want = np.zeros((tokens, n))
    for token, choice in np.argwhere((ids >= 0) & (ids < experts)).tolist():
        want[token] += float(shares[token, choice]) * (weights[ids[token, choice]] @ wide[token])
    assert reference.relative_error(made, want) <= EXACT


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_120", "gfx90a", "gfx1100", "gfx1201"])
def test_every_gpu_has_kernels_for_1024_experts(target):
    x, ids = fp8core.ArraySpec((16, 2048), "bfloat16"), fp8core.ArraySpec((16, 8), "int64")
    found = fp8core.explain(fp8core.moe_permute, x, ids, 1024, target=target)
    assert found.chosen == "moe_permute"
    many = fp8core.explain(fp8core.moe_permute, x, ids, 1025, target=target)
    assert many.chosen is None
    assert "needs at most 1024 experts, got 1025" in str(many)
    y = fp8core.ArraySpec((128, 2048), "bfloat16")
    found = fp8core.explain(fp8core.moe_unpermute, y, fp8core.ArraySpec((16, 8), "int32"), target=target)
    assert found.chosen == "moe_unpermute"
