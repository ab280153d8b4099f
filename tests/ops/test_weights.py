"""The weight functions against the reference: fused shards, channels, the two E4M3 formats."""

import numpy as np
import pytest

import fp8core
from support import reference
from support.engines import BOTH, FP8, assert_same_bytes, engines, fresh_fp8, fresh_scale

UNSET = float(np.finfo(np.float32).min)
LISTS = {
    "three shards": ([4, 2, 10], [0.01, 0.03, 0.02]),
    "one shard": ([16], [0.5]),
    "the largest first": ([8, 8], [0.9, 0.1]),
    "equal scales": ([8, 8], [0.25, 0.25]),
    "a zero-width shard": ([0, 7, 0, 9], [0.2, 0.1, 0.4, 0.3]),
    "scales that differ by 1e4": ([5, 11], [1e-4, 1.0]),
    "unset at the end": ([5, 11], [0.3, UNSET]),
    "unset before the end": ([5, 5, 6], [0.3, UNSET, 0.4]),
    "unset and without rows": ([5, 0, 11], [0.3, UNSET, 0.4]),
    "unset as -448": ([5, 11], [0.3, -448.0]),
    "a negative scale that is a scale": ([5, 11], [0.3, -0.2]),
    "-447 is a scale": ([5, 11], [0.3, -447.0]),
    "only the first unset": ([5, 11], [UNSET, 0.3]),
    "a scale of infinity": ([5, 11], [0.3, np.inf]),
    "scales of zero": ([5, 11], [0.0, 0.0]),
    "nine shards": ([1, 2, 3, 1, 2, 3, 1, 2, 1], list(np.linspace(0.01, 0.09, 9))),
    "many shards": ([1] * 80, list(np.linspace(0.01, 0.8, 80))),
}


@engines(*BOTH)
@pytest.mark.parametrize("cols", [64, 51])
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"])
@pytest.mark.parametrize("case", LISTS)
def test_requantize_with_max_scale(engine, case, dtype, cols):
    widths, scales = LISTS[case]
    scales = np.array(scales, np.float32)
    codes = np.arange(sum(widths) * cols, dtype=np.uint8).reshape(sum(widths), cols)
    weight = codes.view(FP8[dtype])
    want_scale, want = reference.requantize(codes, dtype, scales, widths)
    kept, out = engine.array(weight.copy()), engine.array(np.zeros_like(weight))
    got_scale, got = fp8core.requantize_with_max_scale(kept, engine.array(scales), widths, out=out)
    assert got is out
    nan = np.isnan(reference.decode(want, dtype))
    same = engine.codes(got)
    np.testing.assert_array_equal(np.isnan(reference.decode(same, dtype)), nan)
    assert_same_bytes(np.where(nan, 0, same), np.where(nan, 0, want))
    assert engine.numpy(got_scale).shape == ()
    assert engine.numpy(got_scale) == want_scale
    assert_same_bytes(engine.codes(kept), codes)
    in_place = engine.array(weight.copy())
    _, returned = fp8core.requantize_with_max_scale(in_place, engine.array(scales), widths)
    assert returned is in_place
    assert_same_bytes(engine.codes(in_place), same)


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
@pytest.mark.parametrize("scales", [[1e-41, 1e-40], [-1e-40, -1e-39], [0.0, 1e-45], [1e-41] * 9 + [1e-40]], ids=str)
def test_scales_below_the_least_normal_number_are_told_apart(engine, scales):
    """GPUs compare subnormal numbers as zeros where they are told to. (XLA tells its threads on the CPU, too.)"""
    given = np.array(scales, np.float32)
    weight = fresh_fp8((len(scales), 32))
    kept = engine.array(weight.copy())
    largest, _ = fp8core.requantize_with_max_scale(kept, engine.array(given), [1] * len(scales))
    assert engine.numpy(largest).tobytes() == given.max().tobytes()
    assert_same_bytes(engine.codes(kept), weight.view(np.uint8))
    assert not fp8core.all_close_1d(engine.array(given))
    assert fp8core.all_close_1d(engine.array(np.repeat(given[-1:], 3)))


@engines(*BOTH)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_a_single_scale_on_reload_leaves_nothing_to_do(engine, shape):
    weight = fresh_fp8((12, 32))
    scale = np.full(shape, 0.125, np.float32)
    got_scale, got = fp8core.requantize_with_max_scale(engine.array(weight.copy()), engine.array(scale), [4, 4, 4])
    assert engine.numpy(got_scale) == np.float32(0.125)
    assert_same_bytes(engine.codes(got), weight.view(np.uint8))


@engines("jax-cpu", "jax-cuda")
def test_arrays_that_cannot_be_written_give_a_new_weight(engine):
    weight, scales = fresh_fp8((8, 32)), np.array([0.1, 0.2], np.float32)
    there = engine.array(weight)
    got_scale, got = fp8core.requantize_with_max_scale(there, engine.array(scales), [3, 5])
    want_scale, want = reference.requantize(weight.view(np.uint8), "float8_e4m3fn", scales, [3, 5])
    assert engine.numpy(got_scale) == want_scale
    assert_same_bytes(engine.codes(got), want)
    assert_same_bytes(engine.codes(there), weight.view(np.uint8))


@engines(*BOTH)
@pytest.mark.parametrize("case", LISTS)
def test_convert_to_channelwise(engine, case):
    widths, scales = LISTS[case]
    scales = np.array(scales, np.float32)
    got = engine.numpy(fp8core.convert_to_channelwise(engine.array(scales), widths))
    assert_same_bytes(got, reference.expand(scales, widths))


@engines(*BOTH)
def test_convert_a_single_scale_to_channels(engine):
    got = engine.numpy(fp8core.convert_to_channelwise(engine.array(np.array(0.5, np.float32)), [3, 2]))
    assert_same_bytes(got, np.full((5, 1), 0.5, np.float32))


@engines(*BOTH)
@pytest.mark.parametrize("scale", [1e-5, 0.3])
def test_per_tensor_dequantize_forms_the_product_in_fp32(engine, scale):
    codes = np.arange(0x7F, dtype=np.uint8)[None]
    got = engine.numpy(
        fp8core.per_tensor_dequantize(
            engine.array(codes.view(FP8["float8_e4m3fn"])), engine.array(np.array([scale], np.float32))
        )
    )
    want = reference.dequantize(codes, "float8_e4m3fn", np.array([[scale]], np.float32), (-1, -1)).astype(np.float16)
    assert_same_bytes(got, want)


@engines()
@pytest.mark.parametrize("shape", [(16, 16), (256,), (2, 8, 16)], ids=str)
def test_all_256_codes_to_fnuz_and_back(engine, shape):
    codes = np.arange(256, dtype=np.uint8)
    fn = engine.array(codes.reshape(shape).view(FP8["float8_e4m3fn"]))
    scale = engine.array(np.array([[0.5], [3.0]], np.float32))
    weight, weight_scale, input_scale = fp8core.normalize_e4m3fn_to_e4m3fnuz(fn, scale)
    assert str(engine.numpy(weight).dtype) == "float8_e4m3fnuz"
    assert input_scale is None
    want = np.array([reference.fn_to_fnuz(int(c)) for c in codes], np.uint8)
    assert_same_bytes(engine.codes(weight).reshape(-1), want)
    assert_same_bytes(engine.numpy(weight_scale), np.array([[1.0], [6.0]], np.float32))
    assert_same_bytes(engine.codes(fn).reshape(-1), codes)

    fnuz = engine.array(codes.reshape(shape).view(FP8["float8_e4m3fnuz"]))
    weight, weight_scale, input_scale = fp8core.normalize_e4m3fnuz_to_e4m3fn(fnuz, scale, scale)
    assert_same_bytes(
        engine.codes(weight).reshape(-1), np.array([reference.fnuz_to_fn(int(c)) for c in codes], np.uint8)
    )
    for got in (weight_scale, input_scale):
        assert_same_bytes(engine.numpy(got), np.array([[0.25], [1.5]], np.float32))


@engines("numpy", "torch-cpu", "cupy", "torch-cuda")
def test_conversion_in_place_gives_an_array_over_the_same_memory(engine):
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    weight = engine.array(codes.view(FP8["float8_e4m3fn"]).copy())
    scale = engine.array(np.ones(1, np.float32))
    got, _, _ = fp8core.normalize_e4m3fn_to_e4m3fnuz(weight, scale, out=weight)
    assert str(engine.numpy(got).dtype) == "float8_e4m3fnuz"
    want = np.array([reference.fn_to_fnuz(int(c)) for c in codes.reshape(-1)], np.uint8)
    assert_same_bytes(engine.codes(got).reshape(-1), want)
    assert_same_bytes(engine.codes(weight).reshape(-1), want)


CLOSE = {
    "empty": ([], True),
    "one": ([0.3], True),
    "equal": ([0.3] * 2000, True),
    "just inside": ([1.0, 1.0 + 0.9e-5], True),
    "just outside": ([1.0, 1.0 + 1.2e-5], False),
    "relative to the first": ([1e-20, 2e-20], False),
    "NaN": ([1.0, np.nan], False),
    "NaN first": ([np.nan, np.nan], False),
    "infinite": ([np.inf, np.inf], True),
    "infinite and not": ([np.inf, 1.0], False),
    "last differs": ([0.5] * 3000 + [0.6], False),
    "negative": ([-1.0, -1.0], True),
    "signs": ([1.0, -1.0], False),
}


@engines(*BOTH)
@pytest.mark.parametrize("case", CLOSE)
def test_all_close_1d(engine, case):
    values, want = CLOSE[case]
    assert fp8core.all_close_1d(engine.array(np.array(values, np.float32))) is want


@pytest.mark.gpu
def test_a_large_weight_in_one_launch():
    from support.engines import CupyEngine

    engine = CupyEngine()
    widths, scales = [40_000, 30_001], fresh_scale((2,))
    weight = fresh_fp8((70_001, 96))
    want_scale, want = reference.requantize(weight.view(np.uint8), "float8_e4m3fn", scales, widths)
    got_scale, got = fp8core.requantize_with_max_scale(engine.array(weight), engine.array(scales), widths)
    assert engine.numpy(got_scale) == want_scale
    assert_same_bytes(engine.codes(got), want)
