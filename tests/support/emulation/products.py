"""An emulated product of few rows: operands in guarded memory, launches, and the allowed errors."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fp8core.problem import Granularity, ScaledMm
from fp8core.table import Kernel
from fp8core.target import Target
from support import reference
from support.emulation.running import FLOATS, empty, matrix

ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}
"""The largest relative error of one rounding."""
SUMS = 2.0e-6
"""The allowed error of about 1000 fp32 additions, relative to the sum of magnitudes."""
BOUND = {"bfloat16": 2.0e-3, "float16": 3.0e-4, "float32": 2.0e-6}
"""The bound of the relative Frobenius error, from section 5 of the specification; extended to all result dtypes."""
ENOUGH = 400
"""`BOUND` is checked from this many results on: with fewer, their mean rounding error may be far from the expected."""


@lru_cache(16)
def codes(rows: int, cols: int, dtype: str, seed: int) -> np.ndarray:
    """Return FP8 bytes of normal numbers, which are read only: the schedules of a product share them."""
    made = reference.encode(np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * 8, dtype)
    made.flags.writeable = False
    return made


class Scales(NamedTuple):
    """The scales of one operand."""

    granularity: Granularity
    kept: np.ndarray
    """The scales as stored, among NaN."""
    strides: tuple[int, int]
    each: np.ndarray
    """The scales expanded to one for each row or element of the operand."""


class EmulatedProduct:
    """Operands of a product in guarded memory, and its launches."""

    kernel: ClassVar[Kernel]
    plan: ClassVar[Callable[[ScaledMm], Any]]

    def __init__(
        self,
        memory: Any,
        target: Target,
        shape: tuple[int, int, int],
        dtypes: tuple[str, str, str],
        scale_a: Scales,
        scale_b: Scales,
        bias: str,
        *,
        gaps: int,
        invariant: bool,
    ) -> None:
        (m, n, k), (a, b, out) = shape, dtypes
        codes_a, codes_b = codes(m, k, a, 0), codes(n, k, b, 1)
        addend = (np.random.default_rng(4).standard_normal(n) * 100).astype(FLOATS[bias]) if bias else None
        numbers = reference.decode(codes_a, a), reference.decode(codes_b, b).T, scale_a.each, scale_b.each.T
        self.want = reference.scaled_mm(*numbers, addend)
        self.magnitude = reference.scaled_mm(*map(np.abs, numbers))
        self.left, self.right = matrix(memory, codes_a, k + gaps), matrix(memory, codes_b, k + 2 * gaps)
        self.scales = memory.array(scale_a.kept), memory.array(scale_b.kept)
        self.bias = memory.array(addend) if addend is not None else None
        self.memory, self.shape, self.out = memory, (m, n), out
        self.problem = ScaledMm(
            *(target, m, n, k, a, b, out, scale_a.granularity, scale_b.granularity, scale_a.strides, scale_b.strides),
            *(bias, False, False, True, invariant, self.left.stride, self.right.stride, n + gaps, 16),
        )

    def __call__(self) -> np.ndarray:
        """Launch and return the result; it fails if anything else is written."""
        result = empty(self.memory, self.shape, FLOATS[self.out], self.problem.ldo)
        assert self.kernel.refusal(self.problem) is None
        type(self).plan(self.problem)(
            *(0, self.left.pointer, self.right.pointer, *(scale.ctypes.data for scale in self.scales)),
            *(self.bias.ctypes.data if self.bias is not None else 0, result.pointer, 0, 0, 0),
        )
        assert (result.gap.view(np.uint8) == 0xA5).all()
        return result.values

    def check(self, got: np.ndarray) -> None:
        """Assert that each error is within that of the dtype and of fp32 sums, and all together within `BOUND`."""
        error = np.abs(got.astype(np.float64) - self.want)
        assert (error <= ROUNDING[self.out] * np.abs(self.want) + SUMS * (self.magnitude + 400)).all()
        if got.size >= ENOUGH:
            assert reference.relative_error(got, self.want) < BOUND[self.out]

    def check_not_finite(self) -> None:
        """Assert that NaN and infinity of an e5m2 a, and NaN of an e4m3 b, stay in their rows and channels."""
        self.left.buffer[2, 7], self.right.buffer[11, 3], self.left.buffer[4, 9] = 0x7F, 0x7F, 0x7C
        self.memory.keep()
        result = self()
        assert np.isnan(result[2]).all()
        assert np.isnan(result[:, 11]).all()
        assert np.isfinite(np.delete(np.delete(result, [2, 4], 0), 11, 1)).all()
        assert not np.isfinite(result[4]).any()
