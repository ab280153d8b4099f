"""Tensors without columns have scales where a group spans all columns: the least of their mode, written by every row."""

import warnings

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from fp8core.core.specs import TensorSpec
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.linear import LINEAR_CALLS, LinearOptions
from fp8core.problem import GroupShape, NormQuantize, Quantize, SiluQuantize
from support import reference
from support.emulation import CUDA, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import plans, same_bytes
from support.engines import BOTH, assert_same_bytes, engines

LEAST = {PER_TENSOR: 2.0**-126, PER_TOKEN: 1 / (448 * 512), GroupShape(4, -1): np.float32(1e-10) / np.float32(448)}
SHAPES = [*LEAST, GROUP_128, BLOCK_128, GroupShape(-1, 1)]
ROWS = 6
E4M3 = "float8_e4m3fn"


def wanted(group_shape, rows, padded):
    """Return the scales that the specification gives: the least of the mode, and 1 for padding rows."""
    scale = reference.quantize(
        np.zeros((rows, 0), np.float32), group_shape=tuple(group_shape), rows_padded=padded
    ).scale
    if group_shape in LEAST and rows:
        assert scale[0, 0] == np.float32(LEAST[group_shape])
    return scale


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=str)
@pytest.mark.parametrize("alignment", [16, 1])
@pytest.mark.parametrize("padded", [ROWS, ROWS + 7])
@pytest.mark.parametrize("group_shape", SHAPES, ids=str)
def test_every_row_of_the_table_writes_the_scales_alone(emulator, group_shape, padded, alignment, target):
    want = wanted(group_shape, ROWS, padded)
    problem = Quantize(target, "bfloat16", E4M3, group_shape, False, "float32", "k", 0, alignment)
    for _, launch in plans(QUANTIZE, problem):
        with emulator.watch() as memory:
            scale = memory.empty(want.shape, np.float32)
            strides = [0 if extent == 1 else s // 4 for extent, s in zip(want.shape, scale.strides, strict=True)]
            limits = (0, float("inf"), 1e-10)
            launch(0, 4096, 0, 4096, 0, scale.ctypes.data, *strides, ROWS, padded, *limits)
            same_bytes(scale, want, "scale")


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=str)
@pytest.mark.parametrize("alignment", [16, 2])
@pytest.mark.parametrize("table", [NORM_QUANTIZE, SILU_QUANTIZE], ids=lambda t: t.name)
def test_producers_write_the_scales_alone(emulator, table, alignment, target):
    form = (E4M3, PER_TOKEN, False, "float32", "k")
    if table is NORM_QUANTIZE:
        problem = NormQuantize(target, "bfloat16", "bfloat16", *form, True, False, 0, alignment)
        inputs = (4096, 0, 4096, 0, 4096, 1e-6)
    else:
        problem, inputs = SiluQuantize(target, "bfloat16", *form, False, 0, alignment), (4096, 0)
    want = wanted(PER_TOKEN, ROWS, ROWS)
    for _, launch in plans(table, problem):
        with emulator.watch() as memory:
            scale = memory.empty(want.shape, np.float32)
            launch(0, *inputs, 4096, 0, scale.ctypes.data, 1, 0, ROWS, 0, float("inf"), 1e-10)
            same_bytes(scale, want, "scale")


@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=str)
@pytest.mark.parametrize("rows", [ROWS, 100])
@pytest.mark.parametrize("group_shape", [PER_TOKEN, PER_TENSOR], ids=str)
def test_a_layer_of_no_columns_reads_no_scale_that_is_not_there(emulator, group_shape, rows, target):
    x, weight = (TensorSpec("", dtype, (n, 0), (1, 1), target) for dtype, n in (("bfloat16", rows), (E4M3, 8)))
    weight_scale = TensorSpec("weight_scale", "float32", (8, 1), (1, 1), target)
    options = LinearOptions(group_shape, None, None, True, False)
    planned = LINEAR_CALLS.describe((x, weight, weight_scale, None, None, None, None), options).plan()
    with emulator.watch() as memory:
        out, scratch = memory.empty((rows, 8), np.uint16), memory.empty((planned.scratch_bytes,), np.uint8)
        scale = memory.array(np.ones((8, 1), np.float32))
        planned.launch(0, 0, 0, scale.ctypes.data, 0, 0, 0, out.ctypes.data, scratch.ctypes.data)
        assert not out.any()


@engines(*BOTH)
@pytest.mark.parametrize("rows", [ROWS, 100])
@pytest.mark.parametrize("group_shape", [PER_TOKEN, PER_TENSOR], ids=str)
def test_a_layer_of_no_columns_returns_its_bias(engine, group_shape, rows):
    x, bias = engine.array(np.zeros((rows, 0), np.float32)), np.arange(8, dtype=np.float32)
    weight = fp8core.quantize(engine.array(np.zeros((8, 0), np.float32)))
    for _ in range(2):
        got = fp8core.linear(x, weight, bias=engine.array(bias), group_shape=group_shape)
        assert_same_bytes(engine.numpy(got), np.tile(bias, (rows, 1)))


@engines(*BOTH)
@pytest.mark.parametrize("padded", [None, ROWS + 7])
@pytest.mark.parametrize("group_shape", SHAPES, ids=str)
def test_quantizing_no_columns_writes_the_least_scales(engine, group_shape, padded):
    x, want = np.zeros((ROWS, 0), np.float16), wanted(group_shape, ROWS, padded)
    out = None
    for _ in range(3):  # checked, with given memory, as new memory may have the numbers, then out of the cache
        got = fp8core.quantize(engine.array(x), group_shape=group_shape, rows_padded=padded, out=out)
        assert got.data.shape == (padded or ROWS, 0)
        scale = engine.numpy(got.scale)
        assert_same_bytes(scale.reshape(want.shape), want)
        out = got.data, engine.array(np.full(scale.shape, np.nan, np.float32))


@engines(*BOTH)
@pytest.mark.parametrize("producer", ["norm", "silu"])
def test_producers_of_no_columns_write_the_least_scales(engine, producer):
    x, weight = engine.array(np.zeros((ROWS, 0), np.float16)), engine.array(np.zeros(0, np.float16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = None
        for _ in range(3):
            norm, silu = fp8core.rms_norm_quant, fp8core.silu_and_mul_quant
            got = norm(x, weight, 1e-6, out=out) if producer == "norm" else silu(x, out=out)
            assert got.data.shape == (ROWS, 0)
            assert_same_bytes(engine.numpy(got.scale), wanted(PER_TOKEN, ROWS, ROWS))
            out = got.data, engine.array(np.full((ROWS, 1), np.nan, np.float32))
