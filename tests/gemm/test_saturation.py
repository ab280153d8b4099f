"""Results that are too large for FP8: every kernel of a product gives the same code (decision 10)."""

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.blaslt.epilogue import plan_end
from fp8core.kernels.gemm.generic import plan_decode, plan_mma
from fp8core.problem import ScaledMm
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import empty, matrix

LARGEST = {"float8_e4m3fn": 448.0, "float8_e4m3fnuz": 224.0, "float8_e5m2": 57344.0, "float8_e5m2fnuz": 57344.0}
"""What this library's FP8 results saturate at. For e4m3fnuz the format has 240, too."""
VALUES = np.array(
    [223, 224, 231.9, 232, 236, 240, 247, 248, 256, 447, 448, 480, 57343, 57344, 61440, 1e9, np.inf], np.float32
)
K = 16


def products(dtype):
    """Return a [2, k] and b [n, k] of which each product with a scale is one of `VALUES`, and of its negative."""
    codes = np.zeros((2, K), np.uint8)
    one = reference.encode(np.array([[1.0, -1.0]], np.float32), dtype)[0]
    codes[:, 0] = one
    weight = np.zeros((len(VALUES), K), np.uint8)
    weight[:, 0] = one[0]
    return codes, weight


def expected(out):
    values = np.stack([VALUES, -VALUES])
    codes = reference.encode(np.clip(values, -LARGEST[out], LARGEST[out]), out)
    assert np.abs(reference.decode(codes, out)).max() == LARGEST[out]
    return codes


@pytest.mark.parametrize("out", FORMATS)
def test_the_host_engine(out):
    a, b = products("float8_e4m3fn")
    scale_b = VALUES.reshape(1, -1)
    given = a.view(ml_dtypes.float8_e4m3fn), b.view(ml_dtypes.float8_e4m3fn).T
    got = fp8core.scaled_mm(*given, np.ones((2, 1), np.float32), scale_b, out_dtype=out, out_scale=1.0)
    assert (got.view(np.uint8) == expected(out)).all()


@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=str)
@pytest.mark.parametrize("plan", [plan_decode, plan_mma])
def test_the_generic_product(emulator, plan, target, out):
    a, b = products("float8_e4m3fn")
    with emulator.watch() as memory:
        left, right = matrix(memory, a, K), matrix(memory, b, K)
        scale_a, scale_b = memory.array(np.ones(2, np.float32)), memory.array(VALUES)
        result = empty(memory, (2, len(VALUES)), np.uint8, len(VALUES))
        problem = problem_of(target, out)
        plan(problem)(
            *(0, left.pointer, right.pointer, scale_a.ctypes.data, scale_b.ctypes.data, 0, result.pointer, 0, 0, 0)
        )
        assert (result.values == expected(out)).all()


@pytest.mark.parametrize("out", FORMATS)
@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=str)
def test_what_follows_the_librarys_product(emulator, target, out):
    """Of the rows cublaslt_epilogue and hipblaslt_epilogue."""
    with emulator.watch() as memory:
        acc = memory.array(np.stack([np.ones_like(VALUES), -np.ones_like(VALUES)]))
        scale_a, scale_b = memory.array(np.ones(2, np.float32)), memory.array(VALUES)
        result = empty(memory, (2, len(VALUES)), np.uint8, len(VALUES))
        plan_end(problem_of(target, out))(
            *(0, acc.ctypes.data, scale_a.ctypes.data, scale_b.ctypes.data, 0, result.pointer, 0, 0)
        )
        assert (result.values == expected(out)).all()


def problem_of(target, out):
    e4m3 = "float8_e4m3fn"
    strides = ((1, 0), (1, 0))
    n = len(VALUES)
    return ScaledMm(
        target, 2, n, K, e4m3, e4m3, out, "row", "row", *strides, "", False, False, True, False, K, K, n, 16
    )


def test_quantization_has_the_same_maximum():
    for out, largest in LARGEST.items():
        assert FORMATS[out].maximum == largest
        assert reference.MAX[out] == largest
