"""`fp8core.quantize` and `dequantize` against the reference, bit for bit: formats, rounding, scales, special values."""

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from support import reference
from support.engines import BOTH, FLOATS, FP8, assert_same_bytes, engines, fresh, fresh_fp8, fresh_scale
from support.quantized import check


@engines(*BOTH)
@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_every_format_from_every_input(engine, dtype, x_dtype, group_shape):
    check(engine, fresh((33, 384), x_dtype, spread=2), group_shape=group_shape, dtype=dtype)


@engines(*BOTH)
@pytest.mark.parametrize("scale_format", ["ue8m0", "ue8m0_bytes"])
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_scales_that_are_powers_of_two(engine, group_shape, scale_format):
    x = fresh((130, 640), "float32")
    x[0, :128] = 448 * 2.0**-3  # exactly a power of two
    x[1, :128] = np.nextafter(np.float32(448 * 2.0**-3), np.float32(1e9))  # just above one
    got = fp8core.quantize(engine.array(x), group_shape=group_shape, scale_format=scale_format)
    want = reference.quantize(x, "float8_e4m3fn", tuple(group_shape), scale_format=scale_format)
    assert_same_bytes(engine.codes(got.data), want.codes)
    scale = engine.numpy(got.scale)
    got_scale = scale.view(np.uint8) if scale_format == "ue8m0_bytes" else scale
    assert_same_bytes(got_scale.reshape(want.scale.shape), want.scale)


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, (-1, 1), GROUP_128, BLOCK_128, (3, 7)], ids=str)
@pytest.mark.parametrize("x_dtype", FLOATS)
def test_static_multiplies_by_the_rounded_reciprocal(engine, group_shape, x_dtype):
    x = fresh((37, 321), x_dtype)
    scale = fresh_scale(fp8core.GroupShape(*group_shape).scale_shape(37, 321))
    got = fp8core.quantize(engine.array(x), group_shape=group_shape, scale=engine.array(scale))
    want = reference.quantize(x, "float8_e4m3fn", tuple(group_shape), scale=scale)
    assert_same_bytes(engine.codes(got.data), want.codes)
    assert_same_bytes(engine.numpy(got.scale), scale)


@engines(*BOTH)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("wide", ["bfloat16", "float16"])
def test_all_65536_inputs_of_16_bits(engine, dtype, wide):
    x = np.arange(65536, dtype=np.uint16).view(FLOATS[wide]).reshape(256, 256)
    for value in (1.0, 0.37):
        scale = np.array([value], np.float32)
        got = fp8core.quantize(engine.array(x), dtype=dtype, group_shape=PER_TENSOR, scale=engine.array(scale))
        assert_same_bytes(engine.codes(got.data), reference.quantize(x, dtype, (-1, -1), scale=scale).codes)


@engines(*BOTH)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("wide", FLOATS)
def test_all_256_codes_dequantize(engine, dtype, wide):
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128).view(FP8[dtype])
    scale = np.array([[0.3], [1e-5]], np.float32)
    got = engine.numpy(fp8core.dequantize(engine.array(codes), engine.array(scale), dtype=wide))
    want = reference.dequantize(codes.view(np.uint8), dtype, scale, (1, -1)).astype(FLOATS[wide])
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    assert_same_bytes(np.where(nan, 0, got), np.where(nan, 0, want))


@engines(*BOTH)
def test_midpoints_and_their_neighbours_round_to_even(engine):
    numbers = np.array([reference.value_of(c, "float8_e4m3fn") for c in range(0x7F)], np.float32)
    middle = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([middle, np.nextafter(middle, np.float32(0)), np.nextafter(middle, np.float32(1e9))])
    got = fp8core.quantize(engine.array(x[None]), group_shape=PER_TENSOR, scale=engine.array(np.ones(1, np.float32)))
    assert_same_bytes(engine.codes(got.data)[0], reference.encode(x, "float8_e4m3fn"))


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
@pytest.mark.parametrize("dtype", FP8)
def test_zeros_nan_and_inf_stay_visible(engine, group_shape, dtype):
    x = fresh((256, 384), "float32")
    x[0] = 0
    x[1, 5] = np.nan
    x[2] = np.nan
    x[130, 7] = np.inf
    x[131, 200] = -np.inf
    x[3, ::2] = -0.0
    x[4] = -1e-30
    check(engine, x, group_shape=group_shape, dtype=dtype)
    q = fp8core.quantize(engine.array(x), group_shape=group_shape, dtype=dtype)
    back = engine.numpy(q.dequantize())
    assert np.isnan(back[1, 5])
    assert not np.isfinite(back[130, 7])
    assert not np.isfinite(back[131, 200])


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
@pytest.mark.parametrize(("x_dtype", "bits"), [("float32", 0x7F800001), ("float16", 0x7C01), ("bfloat16", 0x7F81)])
def test_a_signaling_nan_does_not_count_in_a_scale(engine, x_dtype, bits, group_shape):
    """The maximum of IEEE 754-2008 is NaN if an argument is a signaling one."""
    zero = fresh((130, 384), x_dtype)
    nan = zero.copy()
    at = [1, 1, 129], [5, 383, 0]
    zero[at], nan.view(f"u{nan.itemsize}")[at] = 0, bits
    want = reference.quantize(zero, "float8_e4m3fn", tuple(group_shape))
    got = fp8core.quantize(engine.array(nan), group_shape=group_shape)
    assert_same_bytes(engine.numpy(got.scale).ravel(), want.scale.ravel())
    codes = engine.codes(got.data)
    assert (codes[at] & 0x7F == 0x7F).all()
    codes[at] = 0
    assert_same_bytes(codes, want.codes)


@engines(*BOTH)
@pytest.mark.parametrize("dtype", FP8)
def test_all_zeros_per_tensor(engine, dtype):
    q = fp8core.quantize(engine.array(np.zeros((4, 300), np.float16)), group_shape=PER_TENSOR, dtype=dtype)
    assert not engine.codes(q.data).any()
    assert engine.numpy(q.scale)[0] == 2.0**-126


@engines(*BOTH)
@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_scale_ub_bounds_amax(engine, bound):
    x = fresh((9, 512))
    want = reference.quantize(x, scale_ub=bound)
    for given_bound in (bound, engine.array(np.array([bound], np.float32))):
        got = fp8core.quantize(engine.array(x), scale_ub=given_bound)
        assert_same_bytes(engine.codes(got.data), want.codes)
        assert_same_bytes(engine.numpy(got.scale), want.scale)


@engines(*BOTH)
@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, (-1, 1), GROUP_128, BLOCK_128, (5, 60)], ids=str)
@pytest.mark.parametrize("wide", FLOATS)
def test_dequantize_rounds_once(engine, group_shape, wide):
    codes = fresh_fp8((70, 300))
    scale = fresh_scale(fp8core.GroupShape(*group_shape).scale_shape(70, 300), low=1e-23, high=1e-3)
    got = fp8core.dequantize(engine.array(codes), engine.array(scale), group_shape=group_shape, dtype=wide)
    want = reference.dequantize(codes.view(np.uint8), "float8_e4m3fn", scale, tuple(group_shape)).astype(FLOATS[wide])
    assert_same_bytes(engine.numpy(got), want)
