"""Calls launches of the host engine on NumPy memory; outputs are poisoned, and gaps between rows have to stay so."""

from typing import Any

import ml_dtypes
import numpy as np

from fp8core import host
from fp8core.problem import Dequantize, GroupShape, Quantize
from fp8core.target import HOST
from support.launches import whole

POISON = 0xA5
INPUTS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")


def storage(dtype: str) -> np.dtype:
    return np.dtype({"bfloat16": ml_dtypes.bfloat16, "float8_e8m0fnu": np.uint8}.get(dtype, dtype))


class Poisoned:
    """A matrix ``at`` in poisoned memory, with ``gap`` elements between its rows."""

    def __init__(self, rows: int, cols: int, dtype: Any, gap: int = 3) -> None:
        self.memory = np.zeros((rows, cols + gap), dtype)
        self.memory.view(np.uint8)[...] = POISON
        self.at = self.memory[:, :cols]
        self.pointer, self.stride = self.memory.ctypes.data, cols + gap

    def result(self) -> np.ndarray:
        gap = np.ascontiguousarray(self.memory[:, self.at.shape[1] :]).view(np.uint8)
        assert (gap == POISON).all(), "written between the rows"
        return self.at.copy()


def strided(x: np.ndarray, gap: int = 3) -> np.ndarray:
    """Return a copy of ``x`` with ``gap`` elements between its rows."""
    memory = np.ones((x.shape[0], x.shape[1] + gap), x.dtype)
    memory[:, : x.shape[1]] = x
    return memory[:, : x.shape[1]]


def row_stride(x: np.ndarray) -> int:
    return x.strides[0] // x.itemsize


def quantize(
    x: np.ndarray,
    dtype: str = "float8_e4m3fn",
    group_shape: tuple[int, int] = (1, -1),
    scale: np.ndarray | None = None,
    scale_ub: float | None = None,
    scale_format: str = "float32",
    eps: float = 1e-10,
    rows_padded: int | None = None,
    upper: np.ndarray | None = None,
    gap: int = 3,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the codes and the scales (or the bytes of their exponents) that the host's plan computes."""
    rows, cols = x.shape
    total = max(rows, rows_padded or 0)
    group_shape = GroupShape(*group_shape)
    problem = Quantize(HOST, x.dtype.name, dtype, group_shape, scale is not None, scale_format, "k", cols, 1)
    data = Poisoned(total, cols, np.uint8, gap)
    if scale is None:
        kept = np.uint8 if scale_format == "ue8m0_bytes" else np.float32
        scales = Poisoned(*group_shape.scale_shape(total, cols), kept)
        where = (scales.pointer, scales.stride, 1)
    else:
        where = (scale.ctypes.data, scale.strides[0] // scale.itemsize, scale.strides[1] // scale.itemsize)
    address = upper.ctypes.data if upper is not None else 0
    limit = float("inf") if scale_ub is None else scale_ub
    operands = (x.ctypes.data, row_stride(x), data.pointer, data.stride, *where)
    whole(host.plan_quantize(problem))(0, *operands, rows, total, address, limit, eps)
    return data.result(), scales.result() if scale is None else scale


def dequantize(codes: np.ndarray, dtype: str, scale: np.ndarray, group_shape: tuple[int, int], out: str) -> np.ndarray:
    """Return the host plan's dequantization of codes with a matrix of scales (fp32, or bytes of exponents)."""
    kept = "ue8m0_bytes" if scale.dtype == np.uint8 else "float32"
    problem = Dequantize(HOST, dtype, out, GroupShape(*group_shape), kept, codes.shape[1], 1)
    result = Poisoned(*codes.shape, storage(out))
    strides = (stride // scale.itemsize for stride in scale.strides)
    operands = (codes.ctypes.data, row_stride(codes), scale.ctypes.data, *strides)
    whole(host.plan_dequantize(problem))(0, *operands, result.pointer, result.stride, codes.shape[0])
    return result.result()


def assert_same(got: np.ndarray, want: np.ndarray) -> None:
    """Assert that two arrays have the same shape, dtype and bits; all NaN values are equal."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    integer = np.dtype(f"u{got.itemsize}")
    same = np.ascontiguousarray(got).view(integer) == np.ascontiguousarray(want).view(integer)
    if got.dtype != np.uint8:
        same |= np.isnan(got.astype(np.float32)) & np.isnan(want.astype(np.float32))
    bad = np.argwhere(~same)
    assert not len(bad), f"{len(bad)} differ, first at {bad[0]}: got {got[tuple(bad[0])]}, want {want[tuple(bad[0])]}"
