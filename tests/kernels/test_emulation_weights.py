"""The text of the kernels over weights and scales on the CPU, against the naive oracle."""

import numpy as np
import pytest

from fp8core.kernels.weights import ALL_CLOSE, DEQUANTIZE, EXPAND, NORMALIZE, REQUANTIZE
from fp8core.problem import (
    BLOCK_128,
    GROUP_128,
    PER_TENSOR,
    PER_TOKEN,
    AllClose,
    Dequantize,
    Expand,
    GroupShape,
    Normalize,
    Requantize,
)
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import FLOATS, alignment, empty, matrix, plans, same_bytes

FN, FNUZ, E5M2, E5M2FNUZ = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"
TARGETS = pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=lambda t: str(t).split()[0])


def codes(rows: int, cols: int, seed: int = 0) -> np.ndarray:
    """Return random codes, all 256 of them among the first."""
    random = np.random.default_rng(seed).integers(0, 256, rows * cols).astype(np.uint8)
    random[:256] = np.arange(256)[: random.size]
    return random.reshape(rows, cols)


@pytest.mark.parametrize(
    ("target", "q", "out", "group_shape", "e8m0", "rows", "cols", "gap"),
    [
        (CUDA, FN, "bfloat16", PER_TENSOR, False, 9, 136, 0),
        (CUDA, FN, "float32", PER_TOKEN, False, 2100, 64, 0),
        (CUDA, E5M2, "float16", GROUP_128, True, 9, 300, 4),
        (CUDA, FN, "bfloat16", BLOCK_128, False, 200, 300, 0),
        (CUDA, FN, "bfloat16", GroupShape(-1, 1), False, 9, 33, 0),
        (CUDA, FN, "float16", GroupShape(3, 40), False, 10, 90, 3),
        (HIP_64, FNUZ, "bfloat16", PER_TOKEN, False, 19, 136, 0),
        (HIP_64, E5M2FNUZ, "float32", BLOCK_128, False, 130, 129, 0),
        (HIP_64, FN, "float16", GROUP_128, True, 9, 300, 0),
        (CUDA, FN, "bfloat16", PER_TENSOR, False, 9, 0, 0),
        (CUDA, FN, "bfloat16", PER_TENSOR, False, 0, 64, 0),
        (HIP_32, FN, "bfloat16", PER_TOKEN, False, 19, 136, 8),
    ],
)
def test_dequantize_is_the_oracle_bit_for_bit(emulator, target, q, out, group_shape, e8m0, rows, cols, gap):
    values = codes(rows, cols)
    shape = group_shape.scale_shape(rows, cols)
    random = np.random.default_rng(1)
    bytes_ = random.integers(115, 130, shape).astype(np.uint8)
    numbers = np.exp2(bytes_.astype(np.float32) - 127) if e8m0 else random.uniform(-2, 2, shape).astype(np.float32)
    with np.errstate(over="ignore"):
        want = reference.dequantize(values, q, numbers, group_shape).astype(FLOATS[out])
    with emulator.watch() as memory:
        source, result = matrix(memory, values, cols + gap), empty(memory, (rows, cols), FLOATS[out], cols + gap)
        scale = memory.array(bytes_ if e8m0 else numbers)
        strides = [0 if extent == 1 else s // scale.itemsize for extent, s in zip(shape, scale.strides, strict=True)]
        aligned = alignment(source, result)
        problem = Dequantize(target, q, out, group_shape, "ue8m0_bytes" if e8m0 else "float32", cols, aligned)
        for kernel, launch in plans(DEQUANTIZE, problem):
            launch(0, source.pointer, source.stride, scale.ctypes.data, *strides, result.pointer, result.stride, rows)
            same_bytes(result.values, want, kernel)


@pytest.mark.parametrize("target", [HIP_64, HIP_32], ids=lambda t: str(t).split()[0])
def test_a_scale_below_the_normal_numbers_is_zero_on_amd(emulator, target):
    values = np.arange(256, dtype=np.uint8).reshape(1, 256)
    want = reference.decode(values, FN) * np.float32(0)
    with emulator.watch() as memory:
        source, scale, result = (
            matrix(memory, values),
            memory.array(np.zeros(1, np.uint8)),
            empty(memory, (1, 256), "f4"),
        )
        ((_, launch),) = plans(DEQUANTIZE, Dequantize(target, FN, "float32", PER_TENSOR, "ue8m0_bytes", 256, 16))
        launch(0, source.pointer, 256, scale.ctypes.data, 0, 0, result.pointer, 256, 1)
    same_bytes(result.values, want, "zeros")


UNSET = float(np.finfo(np.float32).min)


@TARGETS
@pytest.mark.parametrize(
    ("widths", "scales", "cols"),
    [
        ((16, 32, 8), (0.5, 0.125, 0.3), 128),
        ((16, 0, 40), (0.5, 7.0, 0.3), 80),
        ((56,), (0.7,), 48),
        ((16, 40), (0.7,), 48),
        ((16, 32, 8), (0.5, UNSET, UNSET), 128),
        ((16, 32, 8), (0.5, 0.25, -448.0), 128),
        ((16, 32, 8), (0.5, -3.0, 0.25), 128),
        ((16, 32, 8), (1e-4, 1.0, 1e-2), 33),
        ((16, 32, 8), (0.0, 0.0, 0.0), 33),
        ((30, 26), (float("nan"), 1.0), 33),
        (tuple([3] * 70), tuple(np.linspace(0.1, 2, 70)), 40),
        ((2000, 300), (0.3, 0.4), 32),
        ((16, 40), (0.5, 0.7), 0),
        ((0, 0), (0.5, 0.7), 32),
    ],
    ids=str,
)
@pytest.mark.parametrize("in_place", [False, True])
def test_requantize_is_the_oracle_bit_for_bit(emulator, target, widths, scales, cols, in_place):
    dtype = FNUZ if target == HIP_64 else FN
    weight, given = codes(sum(widths), cols), np.array(scales, np.float32)
    if np.isnan(given).any() or not given.any():
        largest, want = given.max(), weight  # no code could say it better
    else:
        largest, want = reference.requantize(weight, dtype, given, list(widths))
    with emulator.watch() as memory:
        source = matrix(memory, weight, writable=in_place)
        result = source if in_place else empty(memory, weight.shape, np.uint8)
        scale, max_scale = memory.array(given), memory.empty((1,), np.float32)
        problem = Requantize(target, dtype, len(widths), cols, alignment(source, result))
        for kernel, launch in plans(REQUANTIZE, problem):
            launch(
                *(0, source.pointer, source.stride, scale.ctypes.data, given.size, widths),
                *(result.pointer, result.stride, max_scale.ctypes.data),
            )
            same_bytes(result.values, want, kernel)
            same_bytes(max_scale, np.array([largest], np.float32), f"{kernel}: max_scale")


@TARGETS
@pytest.mark.parametrize("dtype", [E5M2, E5M2FNUZ])
@pytest.mark.parametrize("shards", [40, 130])
def test_the_scale_of_every_shard_counts(emulator, target, dtype, shards):
    """The largest one, the mark "unset" and NaN, where lanes of a warp look at several scales."""
    weight, widths, stride = codes(2 * shards, 37), (2,) * shards, 41
    for place in (0, 1, 31, 32, shards - 1):
        for one in (2.5, UNSET, float("nan")):
            given = np.linspace(0.5, 1.5, shards, dtype=np.float32)
            given[place] = one
            largest, want = (np.nan, weight) if np.isnan(one) else reference.requantize(weight, dtype, given, widths)
            with emulator.watch() as memory:
                source = matrix(memory, weight, stride, offset=3)
                result = empty(memory, weight.shape, np.uint8, stride)
                scale, max_scale = memory.array(given), memory.empty((1,), np.float32)
                ((_, launch),) = plans(REQUANTIZE, Requantize(target, dtype, shards, 37, 1))
                operands = source.pointer, stride, scale.ctypes.data, shards, widths, result.pointer, stride
                launch(0, *operands, max_scale.ctypes.data)
                same_bytes(result.values, want, f"{one} at {place}")
                same_bytes(max_scale, np.array([largest], np.float32), f"{one} at {place}: max_scale")
                assert (result.gap == 0xA5).all()


@TARGETS
@pytest.mark.parametrize("dtype", [FN, FNUZ])
@pytest.mark.parametrize(("count", "offset"), [(256, 0), (8200, 0), (8200, 1), (7, 0), (0, 0)])
def test_normalize_is_the_oracle_for_every_code(emulator, target, dtype, count, offset):
    weight, scales = codes(1, count)[0], np.array([0.5, 3.0, -1.0], np.float32)
    convert, factor = (reference.fn_to_fnuz, 2) if dtype == FN else (reference.fnuz_to_fn, 0.5)
    want = np.array([convert(code) for code in range(256)], np.uint8)[weight]
    with emulator.watch() as memory:
        source = memory.array(weight, offset=offset)
        result = memory.empty((count,), np.uint8, offset=offset)
        scale, scale_out = memory.array(scales), memory.empty((3,), np.float32)
        other = memory.array(scales[:1], writable=True)
        for kernel, launch in plans(NORMALIZE, Normalize(target, dtype, 1 if offset else 16)):
            places = (scale.ctypes.data, scale_out.ctypes.data, 3, other.ctypes.data, other.ctypes.data, 1)
            launch(0, source.ctypes.data, result.ctypes.data, count, *places)
            same_bytes(result, want, kernel)
            same_bytes(scale_out, scales * np.float32(factor), f"{kernel}: scale")
            same_bytes(other, scales[:1] * np.float32(factor), f"{kernel}: input scale, in place")


@TARGETS
@pytest.mark.parametrize(
    ("values", "want"),
    [
        ([], True),
        ([3.0], True),
        ([float("nan")], False),
        ([1.0, 1.000009], True),
        ([1.0, 1.00002], False),
        ([1.0] * 3000 + [2.0], False),
        ([1.0] * 3000, True),
        ([0.0, 0.0], True),
        ([0.0, 1e-30], False),
        ([1.0, float("nan")], False),
        ([float("inf"), float("inf")], True),
        ([float("inf"), 1.0], False),
    ],
    ids=lambda v: str(v)[:30],
)
def test_all_close_is_numpy_s(emulator, target, values, want):
    x = np.array(values, np.float32)
    with emulator.watch() as memory:
        given, result = memory.array(x), memory.empty((1,), np.int32)
        for _, launch in plans(ALL_CLOSE, AllClose(target)):
            launch(0, given.ctypes.data, x.size, result.ctypes.data)
            assert result[0] == int(want)


@TARGETS
@pytest.mark.parametrize(
    ("widths", "scales"),
    [
        *[((3, 0, 500), (1.0, 2.0, 3.0)), ((5, 6), (4.0,)), (tuple([2] * 70), tuple(range(70)))],
        *[((3, 4, 5), (1.0, 2.0, -448.0)), ((3, 4, 5), (-448.0, 2.0, 3.0)), ((0, 0), (1.0, 2.0))],
    ],
    ids=str,
)
def test_expand_repeats_scales(emulator, target, widths, scales):
    given = np.array(scales, np.float32)
    with emulator.watch() as memory:
        scale, out = memory.array(given), memory.empty((sum(widths),), np.float32)
        for _, launch in plans(EXPAND, Expand(target, len(widths))):
            launch(0, scale.ctypes.data, given.size, widths, out.ctypes.data)
            assert (out == reference.expand(given, widths)[:, 0]).all()
