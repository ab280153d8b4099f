"""Helpers of the emulated tests: difficult inputs, matrices with gaps between rows, and plans of every able kernel."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from fp8core.runtime.plans import Plan
from fp8core.table import Launch, Table
from support.emulation import Memory
from support.engines import FLOATS
from support.launches import whole


class Matrix(NamedTuple):
    """A matrix in a buffer of a `Memory`, with a row stride of ``stride`` elements."""

    buffer: np.ndarray
    stride: int
    cols: int

    @property
    def pointer(self) -> int:
        return self.buffer.ctypes.data

    @property
    def values(self) -> np.ndarray:
        return self.buffer[:, : self.cols]

    @property
    def gap(self) -> np.ndarray:
        return self.buffer[:, self.cols :]


def matrix(
    memory: Memory, values: np.ndarray, stride: int | None = None, *, writable: bool = False, offset: int = 0
) -> Matrix:
    """Return a copy of ``values`` with row stride ``stride``; all bits of the gaps are 1, which is NaN for floats."""
    rows, cols = values.shape
    stride = stride or cols
    filler = np.full((rows, stride * values.dtype.itemsize), 0xFF, np.uint8).view(values.dtype)
    filler[:, :cols] = values
    return Matrix(memory.array(filler, writable=writable, offset=offset), stride, cols)


def empty(memory: Memory, shape: tuple[int, int], dtype: Any, stride: int | None = None, *, offset: int = 0) -> Matrix:
    """Return a poisoned matrix that kernels may write."""
    return Matrix(memory.empty((shape[0], stride or shape[1]), dtype, offset=offset), stride or shape[1], shape[1])


def alignment(*operands: Matrix) -> int:
    """Return the largest power of two up to 16 that divides every address and every row stride in bytes."""
    together = 16
    for one in operands:
        for number in (one.pointer, one.stride * one.buffer.dtype.itemsize):
            while number % together:
                together //= 2
    return together


def plans(table: Table[Any], problem: Any) -> Iterator[tuple[str, Launch]]:
    """Yield the name and the launch of every kernel of ``table`` that can run ``problem``; there must be one."""
    able = [kernel for kernel in table.kernels if kernel.refusal(problem) is None]
    assert able, table.explain(problem)
    for kernel in able:
        plan = kernel.plan(problem)
        yield kernel.name, whole(plan) if isinstance(plan, Plan) else plan


def teasing(rows: int, cols: int, dtype: str, seed: int, *, special: bool = True) -> np.ndarray:
    """Return a matrix with rows of many magnitudes, ties, zeros and, if ``special``, NaN and infinities."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((rows, cols)).astype(np.float32)
    x *= np.exp2(random.integers(-12, 8, (rows, 1))).astype(np.float32)
    x[random.random((rows, cols)) < 0.1] = 0.0
    x[random.random((rows, cols)) < 0.05] *= -0.0
    if rows > 2:
        # Some of these lie halfway between two codes when the scale is a power of two.
        x[1] = random.integers(-64, 65, cols) * np.float32(0.25)
        x[2] = 0.0
    if special and rows > 6:
        x[3, 0] = np.nan
        x[4, cols // 2] = np.inf
        x[5, cols - 1] = -np.inf
        x[6] *= np.float32(2.0**-127) if dtype == "float32" else np.float32(2.0**-10)
    with np.errstate(over="ignore"):
        return x.astype(FLOATS[dtype])


def same_bytes(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Assert that two arrays have the same bytes except for NaN; the message has the first difference."""
    assert got.shape == want.shape, f"{what}: got the shape {got.shape}, want {want.shape}"
    with np.errstate(all="ignore"):
        number = np.uint64 if got.dtype.itemsize == 8 else f"u{got.dtype.itemsize}"
        other = np.ascontiguousarray(got).view(number) != np.ascontiguousarray(want).view(number)
        if got.dtype.kind in "fV" and got.dtype != np.uint8:
            other &= ~(np.isnan(got) & np.isnan(want))
    places = np.argwhere(other)
    if len(places):
        first = tuple(int(i) for i in places[0])
        pytest.fail(
            f"{what}: {len(places)} of {got.size} differ, first at {first}: got {got[first]!r}, want {want[first]!r}"
        )
