"""The result of an emulated product: its content before the launch, and its allowed distance from float64."""

import numpy as np

from fp8core.dtypes import FORMATS
from fp8core.problem import Activation
from support import reference
from support.emulation.memory import Memory
from support.emulation.products import ROUNDING, SUMS
from support.emulation.running import FLOATS, empty

OF_CODES, SMALLEST = 2.0**-4, 2.0**-6
"""The relative rounding error of e4m3fn codes, and the least magnitude (the smallest normal number) that has it."""
LATER = 9
"""The allowed error of an activation and of additions after the sum, in units of `SUMS`."""


class Result:
    """A result in guarded memory, with numbers that a product may add to, and an amax that is NaN before the launch."""

    def __init__(
        self, memory: Memory, random: np.random.Generator, shape: tuple[int, int], dtype: str, gap: int, offset: int
    ) -> None:
        self.dtype, self.coded = dtype, dtype in FORMATS
        stored = np.dtype(np.uint8) if self.coded else np.dtype(FLOATS[dtype])
        self.before = np.zeros(shape, stored) if self.coded else random.standard_normal(shape).astype(stored)
        self.out = empty(memory, shape, stored, shape[1] + gap, offset=offset)
        self.out.values[...] = self.before
        self.amax = memory.array(np.full(1, np.nan, np.float32), writable=True)

    def check(
        self,
        codes: tuple[np.ndarray, np.ndarray],
        scales: tuple[np.ndarray, np.ndarray],
        bias: np.ndarray | None,
        *,
        activation: Activation,
        beta: float,
        amax: bool,
        out_scale: float = 1.0,
    ) -> None:
        """Assert that each error is within that of the dtype and of fp32 sums, and nothing was written between rows.

        Args:
            codes: e4m3fn codes of the operands, ``[m, k]`` and ``[n, k]``.
            scales: the scales of the operands, one for each code.
            bias: one number for each channel, or None.
            activation: the product's activation.
            beta: the factor on the numbers before the launch.
            amax: whether the product writes the largest magnitude.
            out_scale: the scale of the result's codes.
        """
        numbers = (*(reference.decode(some, "float8_e4m3fn") for some in codes), *scales)
        numbers = numbers[0], numbers[1].T, numbers[2], numbers[3].T
        want = reference.scaled_mm(*numbers, bias) + beta * self.before.astype(np.float64)
        magnitude = reference.scaled_mm(*map(np.abs, numbers))
        if activation:
            want = reference.activated(want, activation)
        got = reference.decode(self.out.values, self.dtype) * out_scale if self.coded else self.out.values
        error = SUMS * (magnitude + LATER)
        large = np.abs(want)
        rounding = OF_CODES * np.maximum(large, SMALLEST) if self.coded else ROUNDING[self.dtype] * large
        far = ~(np.abs(got.astype(np.float64) - want) <= 1.01 * rounding + error)
        assert not far.any(), f"{far.sum()} of {far.size}, the first at {np.argwhere(far)[0]}"
        assert (self.out.gap.view(np.uint8) == 0xA5).all()
        if amax:
            assert abs(self.amax[0] - large.max()) <= error.max()
