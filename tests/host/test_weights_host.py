"""The host engine on weights: requantization, the other E4M3, equality of scales, one scale a row."""

import numpy as np
import pytest

from fp8core import host
from fp8core.host import codes
from fp8core.host.memory import CHUNK, Workspace
from fp8core.problem import AllClose, Expand, Normalize, Requantize
from fp8core.target import HOST
from support import reference
from support.host_launches import FP8, Poisoned, assert_same, row_stride, strided
from support.launches import whole

LOWEST = float(np.finfo(np.float32).min)
SCALES = {
    "three": ([0.02, 0.013, 0.05], [5, 7, 3]),
    "equal": ([0.02, 0.02], [4, 4]),
    "far apart": ([1e-4, 1.0, 3e-2], [4, 4, 4]),
    "no rows": ([0.5, 2.0, 1.0], [4, 0, 6]),
    "the largest has no rows": ([0.5, 8.0, 1.0], [4, 0, 6]),
    "unset": ([0.02, LOWEST, LOWEST], [5, 5, 5]),
    "unset in the middle": ([0.02, LOWEST, 0.5], [5, 5, 5]),
    "unset by -448": ([0.02, 0.04, -448.0], [5, 5, 5]),
    "negative": ([0.02, -0.04, -447.0], [5, 5, 5]),
    "all negative": ([-0.5, -0.02, -3.0], [5, 5, 5]),
    "first is the mark": ([LOWEST, 0.5], [5, 5]),
    "one shard": ([0.3], [9]),
    "one for all": ([0.3], [3, 3, 3]),
    "many": (list(np.linspace(0.01, 1, 70)), [1] * 70),
    "near 2**-126": ([2.0**-126, 2.0**-127], [3, 3]),
}
UNTOUCHED = {
    "zero": [0.0, -1.0],
    "infinite": [1.0, np.inf],
    "nan": [1.0, np.nan, 2.0],
    "subnormal": [1e-40, 1e-41],
}


def requantize(codes: np.ndarray, dtype: str, scales: list[float], widths: list[int], in_place: bool = False):
    given = np.array(scales, np.float32)
    out, max_scale = Poisoned(*codes.shape, np.uint8), np.full(1, 7.5, np.float32)
    where = (codes.ctypes.data, row_stride(codes)) if in_place else (out.pointer, out.stride)
    launch = whole(host.plan_requantize(Requantize(HOST, dtype, len(widths), codes.shape[1], 1)))
    operands = (codes.ctypes.data, row_stride(codes), given.ctypes.data, len(given), tuple(widths))
    launch(0, *operands, *where, max_scale.ctypes.data)
    return max_scale[0], codes.copy() if in_place else out.result()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("case", SCALES)
@pytest.mark.parametrize("dtype", FP8)
def test_requantize_is_the_oracle_bit_for_bit(dtype, case, in_place):
    scales, widths = SCALES[case]
    codes = np.random.default_rng(0).integers(0, 256, (sum(widths), 300), np.uint8)
    want_scale, want = reference.requantize(codes, dtype, np.array(scales, np.float32), widths)
    got_scale, got = requantize(strided(codes), dtype, scales, widths, in_place)
    assert got_scale == want_scale
    assert_same(got, want)


@pytest.mark.parametrize("case", UNTOUCHED)
def test_requantize_leaves_the_codes_where_no_scale_could_say_them_better(case):
    scales = UNTOUCHED[case]
    codes = np.random.default_rng(0).integers(0, 256, (2 * len(scales), 40), np.uint8)
    got_scale, got = requantize(codes, "float8_e4m3fn", scales, [2] * len(scales))
    assert_same(np.float32(got_scale).reshape(1), np.max(np.array(scales, np.float32)).reshape(1))
    assert_same(got, codes)


def test_requantize_of_no_rows():
    got_scale, got = requantize(np.zeros((0, 16), np.uint8), "float8_e4m3fn", [0.5, 2.0], [0, 0])
    assert got_scale == 2.0
    assert got.shape == (0, 16)


@pytest.mark.parametrize(
    ("dtype", "other", "convert", "factor"),
    [
        ("float8_e4m3fn", "float8_e4m3fnuz", reference.fn_to_fnuz, 2.0),
        ("float8_e4m3fnuz", "float8_e4m3fn", reference.fnuz_to_fn, 0.5),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_normalize_is_the_oracle_for_every_code(dtype, other, convert, factor, in_place):
    codes = np.tile(np.arange(256, dtype=np.uint8), 3)
    want = np.tile(np.array([convert(code) for code in range(256)], np.uint8), 3)
    before = codes.copy()
    scale, input_scale = np.array([0.5, 3.0, -1e-3], np.float32), np.array([0.25], np.float32)
    out = codes if in_place else np.full(768, 0xA5, np.uint8)
    scale_out, input_out = np.full(3, 7.5, np.float32), np.full(1, 7.5, np.float32)
    launch = whole(host.plan_normalize(Normalize(HOST, dtype, 1)))
    scales = (scale.ctypes.data, scale_out.ctypes.data, 3, input_scale.ctypes.data, input_out.ctypes.data, 1)
    launch(0, codes.ctypes.data, out.ctypes.data, 768, *scales)
    assert_same(out, want)
    assert_same(scale_out, scale * np.float32(factor))
    assert_same(input_out, input_scale * np.float32(factor))
    same = ~np.isin(before, [0x7F, 0x80, 0xFF])
    assert_same(reference.decode(out, other)[same] * np.float32(factor), reference.decode(before, dtype)[same])


def test_normalize_without_an_input_scale_or_codes():
    scale, scale_out = np.array([0.5], np.float32), np.full(1, 7.5, np.float32)
    launch = whole(host.plan_normalize(Normalize(HOST, "float8_e4m3fn", 1)))
    launch(0, 0, 0, 0, scale.ctypes.data, scale_out.ctypes.data, 1, 0, 0, 0)
    assert scale_out[0] == 1.0


@pytest.mark.parametrize(
    ("numbers", "close"),
    [
        ([], True),
        ([0.3], True),
        ([1.0] * 200_000, True),
        ([1.0] * 150_000 + [1.1] + [1.0] * 9, False),
        ([1.0] * (CHUNK - 1) + [1.1] + [1.0] * 9, False),
        ([1.0] * CHUNK + [1.1] + [1.0] * 9, False),
        ([1.0, 1.000005, 0.999995], True),
        ([1e5, 100_001.0, 99_999.0], True),  # the tolerance is 1
        ([1e5, 100_001.01], False),
        ([1.0, 1.00002], False),
        ([-1.0, -1.000005], True),
        ([1.0, -1.0], False),
        ([0.0, 0.0, -0.0], True),
        ([0.0, 1e-30], False),
        ([np.nan], False),
        ([1.0, np.nan], False),
        ([np.inf, np.inf], True),
        ([np.inf, 1.0], False),
        ([np.inf, -np.inf], False),
        ([1.0, np.inf], False),
    ],
)
def test_all_close_compares_each_number_with_the_first(numbers, close):
    x, result = np.array(numbers, np.float32), np.full(2, -7, np.int32)
    whole(host.plan_all_close(AllClose(HOST)))(0, x.ctypes.data, len(x), result.ctypes.data)
    assert result.tolist() == [int(close), -7]


EXPANSIONS = [([0.5, 2.0, 3.0], (2, 0, 4)), ([0.5], (2, 0, 4)), ([1.5], (3,)), ([1.5], (0,))]


@pytest.mark.parametrize(("scales", "widths"), EXPANSIONS)
def test_expand_repeats_scales(scales, widths):
    given, out = np.array(scales, np.float32), np.full(sum(widths) + 1, 7.5, np.float32)
    whole(host.plan_expand(Expand(HOST, len(widths))))(0, given.ctypes.data, len(given), widths, out.ctypes.data)
    each = given if len(given) > 1 else np.repeat(given, len(widths))
    assert_same(out, np.append(np.repeat(each, widths), np.float32(7.5)))


@pytest.mark.parametrize("shape", [(3, 5), (3, 6), (1, 7), (4, 1), (0, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32])
def test_codes_are_replaced_in_pairs_and_one_by_one(shape, dtype, monkeypatch):
    table = np.arange(256)[::-1].astype(dtype)
    given = np.random.default_rng(5).integers(0, 256, (shape[0], 8), np.uint8)[:, : shape[1]]
    for pairs in (0, 1 << 20):
        monkeypatch.setattr(codes, "WORTH_PAIRS", pairs)
        out = np.zeros((shape[0], 10), dtype)
        codes.replace(given, table, out[:, : shape[1]], Workspace.of(64))
        assert_same(out[:, : shape[1]], table[given])
        assert not out[:, shape[1] :].any()
