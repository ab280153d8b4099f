"""`fp8core.quantize` against the reference, bit for bit, on every framework: shapes, groups, strides, given memory."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from support import reference
from support.engines import BOTH, FLOATS, FP8, assert_same_bytes, engines, fresh, rng
from support.quantized import check

SHAPES = ((1, 4096), (7, 576), (3, 1025), (16, 128), (130, 257), (1, 1), (5, 16384), (2, 5137))
GROUPS = (PER_TENSOR, PER_TOKEN, (-1, 1), (1, 64), GROUP_128, (1, 256), BLOCK_128, (1, 1), (3, 7), (2, -1), (-1, 16))


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", GROUPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dynamic_is_the_reference_bit_for_bit(engine, shape, group_shape):
    check(engine, fresh(shape), group_shape=group_shape)


@engines("torch-cuda")
@pytest.mark.parametrize("x_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(2050, 1025), (300, 7168)], ids=str)
@pytest.mark.parametrize("group_shape", [PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_many_rows_are_the_reference_bit_for_bit(engine, group_shape, shape, x_dtype):
    """More than 2**21 elements: kernels shaped for a busy device, rows aligned and not."""
    x = fresh(shape, x_dtype)
    check(engine, x, group_shape=group_shape, scale_layout="mn")
    scale = np.array([0.37], np.float32)
    got = fp8core.quantize(engine.array(x), group_shape=PER_TENSOR, scale=engine.array(scale))
    assert_same_bytes(engine.codes(got.data), reference.quantize(x, "float8_e4m3fn", (-1, -1), scale).codes)


@engines(*BOTH)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize(
    "shape",
    [(17, 1032), (33, 8192), (64, 2051), (64, 8200), (64, 18944), (16, 28672), (3, 53248), (64, 53248)],
    ids=str,
)
def test_a_few_dozen_tokens_are_the_reference_bit_for_bit(engine, shape, x_dtype):
    """As clusters share them, on a device that has any."""
    x = fresh(shape, x_dtype)
    got = fp8core.quantize(engine.array(x), group_shape=PER_TOKEN)
    want = reference.quantize(x, "float8_e4m3fn", tuple(PER_TOKEN))
    assert_same_bytes(engine.codes(got.data), want.codes)
    assert_same_bytes(engine.numpy(got.scale), want.scale)


@engines()
def test_every_framework_gets_its_own_arrays_back(engine):
    x = fresh((5, 256), "float32")
    got = fp8core.quantize(engine.array(x), group_shape=GROUP_128)
    want = reference.quantize(x, group_shape=(1, 128))
    assert_same_bytes(engine.codes(got.data), want.codes)
    assert_same_bytes(engine.numpy(got.scale), want.scale)
    back = got.dequantize("float16")
    assert_same_bytes(
        engine.numpy(back), reference.dequantize(want.codes, "float8_e4m3fn", want.scale, (1, 128)).astype(np.float16)
    )


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_padding_rows_hold_zeros_and_scale_one(engine, group_shape):
    check(engine, fresh((3, 256)), group_shape=group_shape, rows_padded=17)
    check(engine, fresh((20, 256)), group_shape=group_shape, rows_padded=17)


@engines(*BOTH)
@pytest.mark.parametrize("rows", [1, 3, 64, 130])
def test_scales_in_the_layout_of_the_product(engine, rows):
    x = fresh((rows, 512))
    q = fp8core.quantize(engine.array(x), group_shape=GROUP_128, scale_layout="mn")
    want = reference.quantize(x, group_shape=(1, 128))
    assert_same_bytes(engine.codes(q.data), want.codes)
    assert_same_bytes(np.ascontiguousarray(engine.numpy(q.scale)), want.scale)
    item = np.dtype(np.float32).itemsize
    strides = tuple(q.scale.strides)
    assert rows == 1 or strides == (item, item * rows)


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", GROUPS, ids=str)
def test_rows_further_apart_than_their_length(engine, group_shape):
    wide = fresh((40, 700))
    whole = engine.array(wide)
    for view, want in ((whole[:, 3:515], wide[:, 3:515]), (whole[::3, :256], wide[::3, :256]), (whole[5:6], wide[5:6])):
        got = fp8core.quantize(view, group_shape=group_shape)
        expected = reference.quantize(want, group_shape=tuple(group_shape))
        assert_same_bytes(engine.codes(got.data), expected.codes)
        assert_same_bytes(engine.numpy(got.scale).reshape(expected.scale.shape), expected.scale)


@engines(*BOTH)
@pytest.mark.parametrize("gap", [0, 24, 3])
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FP8)
def test_one_scale_of_a_matrix_that_all_multiprocessors_share(engine, dtype, x_dtype, gap):
    wide = fresh((300, 1000 + gap), x_dtype, spread=2)
    got = fp8core.quantize(engine.array(wide)[:, :1000], group_shape=PER_TENSOR, dtype=dtype)
    want = reference.quantize(wide[:, :1000], dtype, (-1, -1))
    assert_same_bytes(engine.codes(got.data), want.codes)
    assert_same_bytes(engine.numpy(got.scale), want.scale.reshape(1))


@engines("cupy")
@pytest.mark.parametrize(
    ("x_dtype", "dtype", "gap"),
    [
        ("bfloat16", "float8_e4m3fn", 0),
        ("bfloat16", "float8_e4m3fn", 24),
        ("bfloat16", "float8_e4m3fnuz", 24),
        ("float16", "float8_e5m2", 24),
        ("float32", "float8_e4m3fn", 0),
    ],
)
def test_one_scale_of_a_matrix_that_no_device_holds(engine, x_dtype, dtype, gap):
    """98 MB of 16-bit numbers: registers and shared memory of an H200 keep 39 MB. The host engine is the oracle."""
    wide = fresh((3000, 8192 + gap), x_dtype, spread=2)
    got = fp8core.quantize(engine.array(wide)[:, :8192], group_shape=PER_TENSOR, dtype=dtype)
    want = fp8core.quantize(wide[:, :8192], group_shape=PER_TENSOR, dtype=dtype)
    assert_same_bytes(engine.codes(got.data), want.data.view(np.uint8))
    assert_same_bytes(engine.numpy(got.scale), want.scale)


@engines("torch-cuda")
def test_one_scale_on_many_streams_and_in_many_graphs_at_once(engine):
    """Blocks, clusters and grids of the whole device, each meeting among its own, whatever runs beside it."""
    torch = engine.torch
    inputs = [engine.array(fresh(shape)) for shape in ((1, 4096), (16, 8192), (100, 8192), (300, 1000), (1024, 8192))]
    want = [fp8core.quantize(x, group_shape=PER_TENSOR) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(4)]
    graphs, results = [], []
    for turn, stream in enumerate(streams):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for at in range(4 * len(inputs)):
                which = (at * (turn + 1) + turn) % len(inputs)
                results.append((which, fp8core.quantize(inputs[which], group_shape=PER_TENSOR)))
        graphs.append(graph)
    torch.cuda.synchronize()
    for turn in range(200):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        which = turn % len(inputs)
        results.append((which, fp8core.quantize(inputs[which], group_shape=PER_TENSOR)))
    torch.cuda.synchronize()
    for which, got in results:
        assert torch.equal(got.data.view(torch.uint8), want[which].data.view(torch.uint8))
        assert torch.equal(got.scale, want[which].scale)


@engines(*BOTH)
def test_leading_axes_fold(engine):
    x = fresh((2, 3, 5, 128))
    got = fp8core.quantize(engine.array(x))
    want = reference.quantize(x.reshape(30, 128))
    assert engine.numpy(got.data).shape == x.shape
    assert_same_bytes(engine.codes(got.data).reshape(30, 128), want.codes)
    assert_same_bytes(engine.numpy(got.scale), want.scale.reshape(2, 3, 5, 1))


def test_rows_that_are_there_already_are_not_added():
    x = fresh((2, 3, 64), "float32")
    got, want = fp8core.quantize(x, rows_padded=6), fp8core.quantize(x)
    assert_same_bytes(got.data, want.data)
    with pytest.raises(fp8core.ShapeError, match="x needs two axes to be padded to 7 rows"):
        fp8core.quantize(x, rows_padded=7)


def test_the_stride_of_a_single_row_has_no_meaning():
    x = fresh((3, 64), "float32")
    backwards = x[::-1][2:]
    assert backwards.strides[0] < 0
    assert_same_bytes(fp8core.quantize(backwards, rows_padded=4).data, fp8core.quantize(x[:1], rows_padded=4).data)
    column = np.asfortranarray(x)[:, :1]
    assert_same_bytes(fp8core.quantize(column).data, fp8core.quantize(np.ascontiguousarray(column)).data)


@pytest.mark.parametrize("function", ["quantize", "rms_norm_quant", "silu_and_mul_quant"])
def test_tokens_without_columns_have_the_least_scale(function):
    x, more = np.zeros((4, 0), np.float32), (np.zeros(0, np.float32), 1e-6) if function == "rms_norm_quant" else ()
    scale = np.full((4, 1), np.nan, np.float32)
    q = getattr(fp8core, function)(x, *more, out=(None, scale))
    assert q.data.shape == (4, 0)
    np.testing.assert_array_equal(scale, np.full((4, 1), np.float32(1) / np.float32(448 * 512)))


def test_exponents_are_a_given_scale():
    x, exponents = fresh((4, 64), "float32"), np.array([[127, 120], [126, 125], [128, 127], [124, 130]], np.uint8)
    scale = np.exp2(exponents.astype(np.float32) - 127)
    want = fp8core.quantize(x, group_shape=(1, 32), scale=scale)
    for options in ({}, {"scale_format": "ue8m0_bytes"}):
        given = exponents.view(ml_dtypes.float8_e8m0fnu)
        got = fp8core.quantize(x, group_shape=(1, 32), scale=given, **options)
        assert_same_bytes(got.data, want.data)
        np.testing.assert_array_equal(got.dequantize(), want.dequantize())


def test_scales_of_one_row_have_every_layout():
    x, scale = fresh((1, 256)), np.zeros((1, 8), np.float32)[:, ::4]
    want = fp8core.quantize(x, group_shape=GROUP_128)
    fp8core.quantize(x, group_shape=GROUP_128, scale_layout="mn", out=(np.empty_like(want.data), scale))
    np.testing.assert_array_equal(scale, want.scale)


@engines()
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_no_rows_give_no_rows(engine, group_shape):
    got = fp8core.quantize(engine.array(np.zeros((0, 256), np.float32)), group_shape=group_shape)
    assert tuple(engine.numpy(got.data).shape) == (0, 256)
    if group_shape == PER_TENSOR:
        assert engine.numpy(got.scale)[0] == 2.0**-126


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_given_memory_receives_the_result_and_nothing_beside_it(engine, group_shape):
    x = fresh((19, 384))
    want = reference.quantize(x, group_shape=tuple(group_shape))
    poisoned = engine.array(np.full((21, 400), 0x55, np.uint8).view(ml_dtypes.float8_e4m3fn))
    out = poisoned[1:20, 8:392] if engine.name != "cupy" else poisoned[1:20]
    x_there = engine.array(x) if engine.name != "cupy" else engine.array(np.concatenate([x, x[:, :16]], axis=1))
    if engine.name == "cupy":
        x_there = x_there[:, :400]
        want = reference.quantize(np.concatenate([x, x[:, :16]], axis=1), group_shape=tuple(group_shape))
    got = fp8core.quantize(x_there, group_shape=group_shape, out=out)
    assert got.data is out
    whole = engine.codes(poisoned)
    inside = np.zeros(whole.shape, bool)
    inside[1:20, 8:392] = True
    if engine.name == "cupy":
        inside[1:20] = True
    assert_same_bytes(whole[inside].reshape(want.codes.shape), want.codes)
    assert (whole[~inside] == 0x55).all()


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    cols=st.integers(1, 300),
    group=st.tuples(st.sampled_from([-1, 1, 2, 128]), st.sampled_from([-1, 1, 16, 128])),
    dtype=st.sampled_from(sorted(FP8)),
    wide=st.sampled_from(sorted(FLOATS)),
    exponent=st.integers(-80, 60),
)
def test_any_shape_group_and_dtype(rows, cols, group, dtype, wide, exponent):
    x = (rng(rows, cols, exponent).standard_normal((rows, cols)) * 2.0**exponent).astype(np.float32)
    with np.errstate(over="ignore"):
        x = x.astype(FLOATS[wide])
    got = fp8core.quantize(x, dtype=dtype, group_shape=group)
    want = reference.quantize(x, dtype, group)
    assert_same_bytes(got.data.view(np.uint8), want.codes)
    assert_same_bytes(got.scale.reshape(want.scale.shape), want.scale)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 200),
    before=st.integers(0, 9),
    after=st.integers(0, 9),
    step=st.integers(1, 3),
    group=st.sampled_from([PER_TENSOR, PER_TOKEN, (-1, 1), (1, 16), GROUP_128, BLOCK_128]),
    wide=st.sampled_from(sorted(FLOATS)),
)
def test_views_of_any_strides_are_quantized_into_views_and_nothing_between_is_written(
    rows, cols, before, after, step, group, wide
):
    whole = fresh((rows * step, before + cols + after), wide)
    view = whole[::step, before : before + cols]
    poisoned = np.full((rows * step, before + cols + after), 0x55, np.uint8)
    out = poisoned.view(FP8["float8_e4m3fn"])[::step, before : before + cols]
    got = fp8core.quantize(view, group_shape=group, out=out)
    want = reference.quantize(view, group_shape=tuple(group))
    assert_same_bytes(got.data.view(np.uint8), want.codes)
    assert_same_bytes(got.scale.reshape(want.scale.shape), want.scale)
    poisoned[::step, before : before + cols] = 0x55
    assert (poisoned == 0x55).all()
