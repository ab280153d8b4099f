"""What stands around a library's product, on the CPU against float64."""

import numpy as np
import pytest

from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.blaslt.epilogue import plan_end
from fp8core.kernels.gemm.blaslt.moves import Relayout, plan_moves
from fp8core.kernels.gemm.generic import plan_clear_amax
from fp8core.kernels.gemm.realigned import plan_copy, plan_realign
from fp8core.ops.example_problems import example_product
from fp8core.problem import ScaledMm
from fp8core.target import HOST
from support import reference
from support.emulation import CUDA, HIP_32, HIP_64
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import FLOATS, empty, matrix, same_bytes

FN, FNUZ, E5M2 = "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"
BOUND = {"bfloat16": 2.0e-3, "float16": 3.0e-4, "float32": 2.0e-6}
"""Relative Frobenius error: the rounding of the result, or fp32's for 300 additions."""


def scales_for(granularity, rows, k, seed):
    """Return scales of rows x blocks of k, their strides as the problem has them, and one scale an element."""
    random = np.random.default_rng(seed)
    blocks = -(-k // 128)
    shape = {"tensor": (1, 1), "row": (rows, 1), "group": (rows, blocks), "block": (-(-rows // 128), blocks)}[
        granularity
    ]
    scale = random.uniform(0.5, 2, shape).astype(np.float32) * np.exp2(random.integers(-6, 3, shape)).astype(np.float32)
    group = {"tensor": (-1, -1), "row": (1, -1), "group": (1, 128), "block": (128, 128)}[granularity]
    strides = {"tensor": (0, 0), "row": (1, 0)}.get(granularity, (shape[1], 1))
    return scale, strides, reference.spread(scale, group, (rows, k))


@pytest.mark.parametrize(
    ("target", "m", "n", "out", "scale_a", "scale_b", "bias", "amax"),
    [
        (CUDA, 5, 1031, "bfloat16", "row", "row", "bfloat16", False),
        (CUDA, 300, 64, "float32", "tensor", "row", "", True),
        (CUDA, 5, 70, "float16", "row", "tensor", "float32", False),
        (CUDA, 5, 70, FN, "tensor", "tensor", "", True),
        (HIP_64, 5, 1031, "bfloat16", "row", "row", "bfloat16", True),
    ],
)
def test_rescale_rounds_once(emulator, target, m, n, out, scale_a, scale_b, bias, amax):
    acc = np.random.default_rng(0).standard_normal((m, n)).astype(np.float32) * 100
    given_a, strides_a, _ = scales_for(scale_a, m, 1, 2)
    given_b, strides_b, _ = scales_for(scale_b, n, 1, 3)
    addend = np.random.default_rng(4).standard_normal(n).astype(FLOATS[bias]) if bias else np.zeros(n, np.float32)
    want = given_a * (given_b.T * acc) + addend.astype(np.float32)
    with emulator.watch() as memory:
        given, result = memory.array(acc), empty(memory, (m, n), FLOATS.get(out, np.uint8), n + 1)
        scale_left, scale_right, added = memory.array(given_a), memory.array(given_b), memory.array(addend)
        out_scale = memory.array(np.array([0.37], np.float32))
        largest = memory.empty((1,), np.float32)
        problem = ScaledMm(
            *(target, m, n, 64, FN, FN, out, scale_a, scale_b, strides_a, strides_b, bias, out in FORMATS, amax),
            *(True, False, 64, 64, n + 1, 16),
        )
        plan_end(problem)(
            *(0, given.ctypes.data, scale_left.ctypes.data, scale_right.ctypes.data, added.ctypes.data if bias else 0),
            *(result.pointer, out_scale.ctypes.data if out in FORMATS else 0, largest.ctypes.data if amax else 0),
        )
        if out in FORMATS:
            want_codes = reference.encode(want * (np.float32(1) / np.float32(0.37)), out)
            same_bytes(result.values, want_codes, "rescale")
        else:
            same_bytes(result.values, want.astype(FLOATS[out]), "rescale")
        if amax:
            assert largest[0] == np.abs(want).max()


@pytest.mark.parametrize("target", [CUDA, HIP_64])
def test_arranged_scales_lie_as_the_libraries_want_them(emulator, target):
    random = np.random.default_rng(0)
    tokens, weight = random.random((7, 300)).astype(np.float32), random.random((3, 5)).astype(np.float32)
    one = np.array([0.3], np.float32)
    with emulator.watch() as memory:
        first, second, number = memory.array(tokens), memory.array(weight), memory.array(one)
        moved, padded, inverted = (
            memory.empty((300, 7), np.float32),
            memory.empty((3, 8), np.float32),
            memory.empty((1,), np.float32),
        )
        halves, copy = memory.array(np.arange(33, dtype=np.uint16)), memory.empty((33,), np.uint16)
        launch = plan_moves(target, (Relayout(1, 300, 300, 7, 7), Relayout(5, 1, 3, 5, 8)), halves.size)
        launch(
            *(0, (first.ctypes.data, second.ctypes.data), (moved.ctypes.data, padded.ctypes.data)),
            *((halves.ctypes.data, copy.ctypes.data), (number.ctypes.data, inverted.ctypes.data)),
        )
        assert (copy == halves).all()
        assert (moved == tokens.T).all()
        assert (padded[:, :5] == weight).all()
        assert inverted[0] == np.float32(1) / one[0]
        assert (padded[:, 5:] == 1).all()


@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=str)
def test_the_amax_of_an_empty_product_is_written(emulator, target):
    with emulator.watch() as memory:
        largest = memory.empty((1,), np.float32)
        assert largest[0] != 0
        plan_clear_amax(target)(0, largest.ctypes.data)
        assert largest.tobytes() == bytes(4)
    assert emulator.launches == ["clear_amax"]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("target", [CUDA, HIP_64, HIP_32], ids=str)
def test_a_copy_in_aligned_rows_clears_an_amax(emulator, target, given):
    p = example_product(target, "row", "row", m=5, n=0, k=37)._replace(lda=41)
    codes = np.random.default_rng(0).integers(0, 256, (5, 41), np.uint8)
    with emulator.watch() as memory:
        a, copy, largest = (
            memory.array(codes, offset=3),
            memory.empty((5, 48), np.uint8),
            memory.empty((1,), np.float32),
        )
        before = largest.tobytes()
        plan_realign(p)(0, a.ctypes.data, copy.ctypes.data, 0, 0, largest.ctypes.data if given else 0)
        assert (copy[:, :37] == codes[:, :37]).all()
        assert (copy[:, 37:] == 0).all()
        assert largest.tobytes() == (bytes(4) if given else before)
    assert emulator.launches == ["realign_codes"]


@pytest.mark.parametrize("itemsize", [1, 2, 4])
@pytest.mark.parametrize("target", [CUDA, HIP_64], ids=str)
def test_a_few_blocks_copy_many_rows_of_many_columns(emulator, target, itemsize):
    rows, columns = 70, 2050
    random = np.random.default_rng(itemsize)
    values = random.integers(0, 256, (rows, columns * itemsize), np.uint8).view(f"u{itemsize}")
    with emulator.watch() as memory:
        source = matrix(memory, values, columns + 3, offset=itemsize)
        out = empty(memory, values.shape, values.dtype, columns + 5, offset=itemsize)
        strides = source.stride, out.stride
        plan_copy(target._replace(multiprocessors=1), rows, columns, itemsize, *strides)(0, source.pointer, out.pointer)
        assert (out.values == values).all()
        assert (out.gap.view(np.uint8) == 0xA5).all()


def test_the_amax_of_an_empty_product_is_written_on_the_host():
    largest = np.full(3, 7.5, np.float32)
    plan_clear_amax(HOST)(0, largest[1:].ctypes.data)
    assert largest.tolist() == [7.5, 0.0, 7.5]
