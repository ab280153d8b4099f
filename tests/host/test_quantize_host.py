"""The host engine's quantization and dequantization against the naive reference, bit for bit."""

import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from fp8core import host
from fp8core.dtypes import FORMATS
from fp8core.host import codes, memory, tiles
from fp8core.problem import PER_TENSOR, GroupShape, Quantize
from fp8core.target import HOST
from support import reference
from support.host_launches import FP8, INPUTS, assert_same, dequantize, quantize, storage, strided
from support.launches import whole

GROUPS = ((-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128), (1, 32), (3, 5), (2, -1), (-1, 7))
SCALE_FORMATS = ("float32", "ue8m0", "ue8m0_bytes")
STATIC_SCALES = (1.0, 0.0373, 3.1e4, 2.0**-9, -0.5, 1e-30, 1e-39, 2.0**-120, 0.0, np.inf, np.nan)


def fresh(rows: int, cols: int, dtype: str, seed: int = 0) -> np.ndarray:
    """Numbers of many magnitudes, their rows differing much, with corners strewn in."""
    rng = np.random.default_rng((rows, cols, seed))
    magnitudes = 2.0 ** (rng.integers(-9, 9, (rows, 1)) + rng.integers(-6, 3, (rows, cols)))
    x = (rng.standard_normal((rows, cols)) * magnitudes).astype(storage(dtype))
    corners = np.array([0.0, -0.0, 1e-40, -1e-40, 2.0**-126, 1.0, -1.0], np.float32).astype(x.dtype)
    flat = x.reshape(-1)
    flat[rng.integers(0, max(flat.size, 1), flat.size // 16)] = rng.choice(corners, flat.size // 16)
    return x


def every(dtype: str) -> np.ndarray:
    """All 65,536 numbers of a format of 16 bits, in one row."""
    return np.arange(1 << 16, dtype=np.uint16).view(storage(dtype)).reshape(1, -1)


def near_midpoints(dtype: str) -> np.ndarray:
    """All numbers of an FP8 format, the midpoints between them and what is around these, in fp32."""
    numbers = np.unique(np.abs(reference.decode(np.arange(256), dtype)))
    numbers = numbers[np.isfinite(numbers)]
    midpoints = (numbers[1:] + numbers[:-1]) / 2
    halves = np.concatenate([numbers, midpoints, [reference.MAX[dtype] * 1.5]]).astype(np.float32)
    steps = np.array([-65536, -65535, -32768, -2, -1, 0, 1, 2, 32767, 32768, 65535, 65536], np.int32)
    around = np.maximum(halves.view(np.int32)[:, None] + steps, 0).view(np.float32).reshape(-1)
    return np.concatenate([around, -around]).reshape(1, -1)


def wanted(x: np.ndarray, dtype: str, group_shape: tuple[int, int] = (1, -1), **how) -> tuple[np.ndarray, np.ndarray]:
    result = reference.quantize(x, dtype, group_shape, **how)
    return result.codes, result.scale


@pytest.mark.parametrize("dtype", FP8)
def test_codes_are_decoded_as_their_format_says(dtype):
    every_code = np.arange(256, dtype=np.uint8)
    assert_same(codes.decode_table(dtype), reference.decode(every_code, dtype))
    assert_same(codes.decode_table(dtype), every_code.view(getattr(ml_dtypes, dtype)).astype(np.float32))


@pytest.mark.parametrize("dtype", FP8)
def test_codes_of_finite_numbers_come_back(dtype):
    numbers = reference.decode(np.arange(256), dtype)
    kept = np.flatnonzero(np.isfinite(numbers) & (np.abs(numbers) <= FORMATS[dtype].maximum)).astype(np.uint8)
    got, _ = quantize(numbers[kept].reshape(1, -1), dtype, (-1, -1), scale=np.ones((1, 1), np.float32))
    assert_same(got, kept.reshape(1, -1))


@pytest.mark.parametrize("scale", STATIC_SCALES)
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("source", ["bfloat16", "float16"])
def test_every_16_bit_number_under_a_given_scale(source, dtype, scale):
    x, scales = every(source), np.full((1, 1), scale, np.float32)
    want, _ = wanted(x, dtype, (-1, -1), scale=scales)
    assert_same(quantize(x, dtype, (-1, -1), scale=scales)[0], want)
    many = np.tile(x, (8, 1))  # enough for the table of all patterns
    assert_same(quantize(many, dtype, (-1, -1), scale=scales)[0], np.tile(want, (8, 1)))


@pytest.mark.parametrize("scale", STATIC_SCALES)
@pytest.mark.parametrize("dtype", FP8)
def test_fp32_under_a_given_scale(dtype, scale):
    bits = np.random.default_rng(7).integers(0, 1 << 32, (4, 20000), np.uint32).view(np.float32)
    scales = np.full((1, 1), scale, np.float32)
    with np.errstate(all="ignore"):
        scaled = near_midpoints(dtype) * np.float32(scale)
    for x in (bits, near_midpoints(dtype), scaled):
        assert_same(quantize(x, dtype, (-1, -1), scale=scales)[0], wanted(x, dtype, (-1, -1), scale=scales)[0])


@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("group_shape", GROUPS)
@pytest.mark.parametrize("source", INPUTS)
def test_dynamic_scales_and_codes_are_those_of_the_oracle(source, group_shape, dtype):
    x = fresh(19, 200, source)
    for scale_format in SCALE_FORMATS:
        got = quantize(strided(x), dtype, group_shape, scale_format=scale_format)
        for mine, theirs in zip(got, wanted(x, dtype, group_shape, scale_format=scale_format), strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("group_shape", GROUPS)
@pytest.mark.parametrize("source", INPUTS)
def test_given_scales_of_every_shape_and_stride(source, group_shape):
    x = fresh(19, 200, source)
    shape = GroupShape(*group_shape).scale_shape(*x.shape)
    scales = (2.0 ** np.random.default_rng(1).uniform(-9, 3, shape)).astype(np.float32)
    want, _ = wanted(x, "float8_e4m3fn", group_shape, scale=scales)
    for layout in (scales, np.asfortranarray(scales), strided(scales, 5)):
        assert_same(quantize(x, "float8_e4m3fn", group_shape, scale=layout)[0], want)
    broadcast = np.broadcast_to(scales[:1, :1], shape)
    want, _ = wanted(x, "float8_e4m3fn", group_shape, scale=broadcast)
    assert_same(quantize(x, "float8_e4m3fn", group_shape, scale=broadcast)[0], want)


@pytest.mark.parametrize("group_shape", GROUPS)
def test_given_scales_multiply_by_their_reciprocals(group_shape):
    """Numbers near midpoints times a scale, which a division rounds otherwise."""
    rng, groups = np.random.default_rng(2), GroupShape(*group_shape)
    scales = (2.0 ** rng.uniform(-9, 3, groups.scale_shape(19, 200))).astype(np.float32)
    of = [np.arange(extent) // (side if side > 0 else extent) for extent, side in zip((19, 200), groups, strict=True)]
    x = rng.choice(near_midpoints("float8_e4m3fn")[0], (19, 200)) * scales[np.ix_(*of)]
    want, _ = wanted(x, "float8_e4m3fn", group_shape, scale=scales)
    assert_same(quantize(x, "float8_e4m3fn", group_shape, scale=scales)[0], want)


def test_given_scales_as_exponents():
    x, exponents = fresh(5, 256, "bfloat16"), np.array([[120, 127]] * 5, np.uint8)
    problem = Quantize(HOST, "bfloat16", "float8_e4m3fn", GroupShape(1, 128), True, "ue8m0_bytes", "k", 256, 1)
    out = np.full((5, 256), 0xA5, np.uint8)
    limits = (5, 5, 0, float("inf"), 0.0)
    whole(host.plan_quantize(problem))(
        0, x.ctypes.data, 256, out.ctypes.data, 256, exponents.ctypes.data, 2, 1, *limits
    )
    scales = np.exp2(exponents.astype(np.float32) - 127)
    assert_same(out, wanted(x, "float8_e4m3fn", (1, 128), scale=scales)[0])


@pytest.mark.parametrize("scale_ub", [None, 1e-3, 2.0, 1e9, float("inf"), float("nan")])
@pytest.mark.parametrize("source", INPUTS)
def test_the_upper_bound_is_of_amax(source, scale_ub):
    x = fresh(19, 130, source)
    want = wanted(x, "float8_e4m3fn", scale_ub=scale_ub)
    by_value = quantize(x, scale_ub=scale_ub)
    by_address = quantize(x, upper=None if scale_ub is None else np.array([scale_ub], np.float32))
    for got in (by_value, by_address):
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


@pytest.mark.parametrize("eps", [0.0, 1e-40, 1e-10, 0.5, 1e4])
@pytest.mark.parametrize("group_shape", [(1, 128), (128, 128), (-1, 1)])
def test_the_least_amax_of_a_group(group_shape, eps):
    x = fresh(5, 300, "float32")
    x[:, 128:256] = 0
    got = quantize(x, "float8_e5m2", group_shape, eps=eps)
    for mine, theirs in zip(got, wanted(x, "float8_e5m2", group_shape, eps=eps), strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("corner", [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-45, 3e38, 65504.0])
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("group_shape", [(-1, -1), (1, -1), (1, 128), (128, 128), (-1, 1)])
@pytest.mark.parametrize("source", INPUTS)
def test_extreme_values_among_others_and_alone_are_the_reference(source, group_shape, dtype, corner):
    with np.errstate(over="ignore"):
        value = np.float32(corner).astype(storage(source))
    strewn = fresh(4, 260, source)
    strewn[1, 3] = strewn[2, 200] = value
    alone = np.full((2, 200), value)
    for x in (strewn, alone):
        for scale_format in SCALE_FORMATS[:2]:
            got = quantize(x, dtype, group_shape, scale_format=scale_format)
            for mine, theirs in zip(got, wanted(x, dtype, group_shape, scale_format=scale_format), strict=True):
                assert_same(mine, theirs)


@pytest.mark.parametrize("group_shape", [(-1, -1), (1, -1), (1, 128), (128, 128), (-1, 1), (3, 7)])
@pytest.mark.parametrize(("source", "bits"), [("float32", 0x7F91E354), ("bfloat16", 0x7F91), ("float16", 0x7C91)])
def test_signaling_nan_is_nan_like_any_other(source, bits, group_shape):
    quiet = fresh(40, 300, source)
    places = np.random.default_rng(3).random(quiet.shape) < 0.1
    quiet[places] = np.nan
    signaling = quiet.copy()
    signaling.view(f"u{quiet.itemsize}")[places] = bits
    for mine, theirs in zip(
        quantize(signaling, "float8_e4m3fn", group_shape), quantize(quiet, "float8_e4m3fn", group_shape), strict=True
    ):
        assert_same(mine, theirs)


def test_negative_underflow_is_minus_zero_in_fn_and_zero_in_fnuz():
    x, one = np.array([[-1e-30, -1e-40, -0.0]], np.float32), np.ones((1, 1), np.float32)
    got = [quantize(x, dtype, (-1, -1), scale=one)[0].tolist() for dtype in FP8]
    assert got == [[[0x80] * 3], [[0] * 3], [[0x80] * 3], [[0] * 3]]


def test_infinity_dequantizes_to_nan_and_never_to_a_number():
    x = np.array([[1.0, np.inf, 2.0]], np.float32)
    data, scale = quantize(x)
    assert np.isinf(scale).all()
    assert np.isnan(dequantize(data, "float8_e4m3fn", scale, (1, -1), "float32")).all()


@pytest.mark.parametrize("group_shape", GROUPS)
@pytest.mark.parametrize(("rows", "padded"), [(0, 0), (0, 4), (1, 1), (5, 17), (16, 16), (17, 16), (129, 300)])
def test_padding_rows_are_zeros_with_scale_1(group_shape, rows, padded):
    x = fresh(rows, 33, "bfloat16")
    for scale_format in ("float32", "ue8m0_bytes"):
        got = quantize(x, "float8_e4m3fn", group_shape, scale_format=scale_format, rows_padded=padded)
        want = wanted(x, "float8_e4m3fn", group_shape, scale_format=scale_format, rows_padded=padded)
        assert_same(got[0], want[0])
        assert_same(got[1], want[1])


@pytest.mark.parametrize("group_shape", GROUPS)
def test_given_scales_of_padding_rows_stay_as_they_are(group_shape):
    x, shape = fresh(5, 33, "bfloat16"), GroupShape(*group_shape).scale_shape(17, 33)
    given = (2.0 ** np.random.default_rng(1).uniform(-9, 3, shape)).astype(np.float32)
    before = given.copy()
    codes, _ = quantize(x, "float8_e4m3fn", group_shape, scale=given, rows_padded=17)
    padded = np.concatenate([x, np.zeros((12, 33), x.dtype)])
    assert_same(codes, wanted(padded, "float8_e4m3fn", group_shape, scale=before)[0])
    assert_same(given, before)


@pytest.mark.parametrize("group_shape", [(1, -1), (1, 128), (-1, -1)])
def test_a_matrix_without_columns_has_scales_of_the_usual_shape(group_shape):
    data, scale = quantize(np.zeros((3, 0), np.float32), group_shape=group_shape)
    assert data.shape == (3, 0)
    assert scale.shape == GroupShape(*group_shape).scale_shape(3, 0)


@pytest.mark.parametrize("group_shape", [(-1, -1), (1, -1), (1, 128), (2, 66000), (300, 300)])
def test_rows_longer_than_a_chunk(group_shape):
    x = fresh(3, 2 * memory.CHUNK + 77, "bfloat16")
    x[:, 66001] = 1e6  # of the second group of 66,000 columns, in the chunk that the first ends in
    for gap in (0, 3):
        got = quantize(x, "float8_e4m3fn", group_shape, gap=gap)
        for mine, theirs in zip(got, wanted(x, "float8_e4m3fn", group_shape), strict=True):
            assert_same(mine, theirs)


@pytest.mark.parametrize("group_shape", [(-1, 100), (6000, 144), (6000, -1), (1 << 20, 1 << 20)])
def test_one_group_with_enough_numbers_for_a_table_of_all_patterns(group_shape):
    x = fresh(6000, 100, "float16")
    for mine, theirs in zip(
        quantize(x, "float8_e4m3fn", group_shape), wanted(x, "float8_e4m3fn", group_shape), strict=True
    ):
        assert_same(mine, theirs)


@pytest.mark.parametrize("seed", range(60))
def test_any_shape_in_small_chunks(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    chunk = int(rng.integers(1, 70))
    monkeypatch.setattr(memory, "CHUNK", chunk)
    monkeypatch.setattr(tiles, "CHUNK", chunk)
    rows, cols = (int(n) for n in rng.integers(1, 40, 2))
    group_shape = tuple(int(n) for n in rng.choice([-1, 1, 2, 3, 7, 16, 128], 2))
    x = fresh(rows, cols, INPUTS[seed % 3], seed)
    data, scale = quantize(strided(x), "float8_e4m3fn", group_shape)
    for mine, theirs in zip((data, scale), wanted(x, "float8_e4m3fn", group_shape), strict=True):
        assert_same(mine, theirs)
    want = reference.dequantize(data, "float8_e4m3fn", scale, group_shape)
    assert_same(dequantize(strided(data), "float8_e4m3fn", scale, group_shape, "float32"), want)


def test_rows_backwards_and_repeated():
    x = fresh(6, 40, "float32")
    assert_same(quantize(x[::-1])[0], wanted(x[::-1], "float8_e4m3fn")[0])
    repeated = np.broadcast_to(x[:1], x.shape)
    assert_same(quantize(repeated)[0], wanted(repeated, "float8_e4m3fn")[0])


@pytest.mark.parametrize("out", INPUTS)
@pytest.mark.parametrize("group_shape", GROUPS)
@pytest.mark.parametrize("dtype", FP8)
def test_dequantize_is_the_oracle_bit_for_bit(dtype, group_shape, out):
    rng = np.random.default_rng(3)
    data = rng.integers(0, 256, (37, 300), np.uint8)
    shape = GroupShape(*group_shape).scale_shape(*data.shape)
    scale = (2.0 ** rng.uniform(-20, 9, shape)).astype(np.float32) * rng.choice([-1, 1], shape).astype(np.float32)
    if scale.size > 3:
        scale.reshape(-1)[:4] = np.nan, np.inf, 0.0, 1e-40
    with np.errstate(all="ignore"):
        want = reference.dequantize(data, dtype, scale, group_shape).astype(storage(out))
    for layout in (scale, np.asfortranarray(scale)):
        assert_same(dequantize(strided(data), dtype, layout, group_shape, out), want)
    assert_same(dequantize(data, dtype, scale, group_shape, out), want)


def test_exponents_are_dequantized_as_powers_of_two():
    data = np.random.default_rng(5).integers(0, 256, (4, 256), np.uint8)
    exponents = np.array([[0, 1], [127, 130], [254, 255], [3, 100]], np.uint8)
    scales = np.where(exponents == 255, np.nan, np.exp2(np.minimum(exponents, 254).astype(np.float64) - 127))
    scales = scales.astype(np.float32)
    want = reference.dequantize(data, "float8_e4m3fn", scales, (1, 128))
    assert_same(dequantize(data, "float8_e4m3fn", exponents, (1, 128), "float32"), want)


@pytest.mark.parametrize("group_shape", [(-1, -1), (1, -1), (-1, 1), (1, 128), (128, 128)])
def test_temporary_memory_is_a_few_megabytes(group_shape):
    x, data = np.ones((2048, 4096), np.float32), np.empty((2048, 4096), np.uint8)
    shape = GroupShape(*group_shape).scale_shape(*x.shape)
    scale = np.empty(shape, np.float32)
    problem = Quantize(HOST, "float32", "float8_e4m3fn", GroupShape(*group_shape), False, "float32", "k", 4096, 16)
    operands = (x.ctypes.data, 4096, data.ctypes.data, 4096, scale.ctypes.data, shape[1], 1)
    tracemalloc.start()
    try:
        whole(host.plan_quantize(problem))(0, *operands, 2048, 2048, 0, float("inf"), 1e-10)
        assert tracemalloc.get_traced_memory()[1] < 4e6
    finally:
        tracemalloc.stop()


def test_floating_point_errors_are_not_reported():
    with np.errstate(all="raise"):
        data, _ = quantize(np.array([[np.inf, np.nan, 0.0]], np.float32), group_shape=PER_TENSOR)
    assert data.tolist() == [[0x7F, 0x7F, 0x00]]


def test_importing_the_engine_imports_no_numpy():
    program = "import sys, fp8core.host; assert 'numpy' not in sys.modules and 'ml_dtypes' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
