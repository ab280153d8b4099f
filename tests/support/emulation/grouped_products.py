"""Checks emulated grouped products, one launch each, against float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp8core.problem import GroupedMm, ScaledMm
from fp8core.target import Target
from support.emulation.memory import Memory
from support.emulation.products import ROUNDING, SUMS
from support.emulation.running import FLOATS, empty, matrix
from support.engines import fresh
from support.grouped import exact, operands
from support.products import ceil

E4M3FN = "float8_e4m3fn"


class GroupedProduct(NamedTuple):
    """A grouped product: the given ends of its groups, and what else may go wrong."""

    ends: tuple[int, ...]
    rows: int
    n: int = 200
    k: int = 272
    mode: str = "row-row"
    out: str = "bfloat16"
    bias: str = "float32"
    gap: int = 0
    """Elements between the result's rows; TMA does not store rows with an odd gap."""
    scale_tiles: bool = True
    """Whether TMA may load 1x128 scales of a."""
    multiprocessors: int = 3
    target: Target = Target("cuda", 90, 0, 3, 32, 227 << 10)

    def check(self, memory: Memory, plan: Callable[[GroupedMm], Any]) -> None:
        """Launch on arrays of ``memory``: errors are within those of the dtype and of fp32 sums, nothing else written."""
        groups, m, n, k = len(self.ends), self.rows, self.n, self.k
        of = operands(groups, m, n, k, self.mode, low=1 / 16, high=3 / 16)
        ends, bias = np.array(self.ends, np.int32), fresh((groups, n), self.bias, spread=0) if self.bias else None
        of_a, of_b = ("tensor" if kind == "each" else kind for kind in self.mode.split("-"))
        scale_a = of.scale_a.T  # k first
        if not self.scale_tiles:  # rows of scales that TMA cannot load
            scale_a = np.concatenate([scale_a, np.full((len(scale_a), 1), np.nan, np.float32)], 1)
        one = ScaledMm(
            *(self.target._replace(multiprocessors=self.multiprocessors), m, n, k, E4M3FN, E4M3FN, self.out),
            *(of_a, of_b, (1, scale_a.shape[1] if of_a == "group" else 0)),
            *({"tensor": (0, 0), "row": (1, 0)}.get(of_b, (ceil(k, 128), 1)), self.bias, False, False, True, False),
            *(k, k, n + self.gap, 1 if self.gap % 8 or k % 16 or n % 8 else 16),
        )._replace(codes_alignment=16 if k % 16 == 0 else 1)
        problem = GroupedMm(groups, one, n * k, of.scale_b[0].size, n if self.bias else 0)
        before = fresh((m, n), self.out, spread=0)
        out = empty(memory, (m, n), FLOATS[self.out], n + self.gap)
        out.values[...] = before
        a, b = (matrix(memory, x.reshape(-1, k).view(np.uint8), k) for x in of[:2])
        vectors = [memory.array(x).ctypes.data if x is not None else 0 for x in (scale_a, of.scale_b, bias)]
        plan(problem)(0, a.pointer, b.pointer, *vectors, memory.array(ends).ctypes.data, out.pointer)
        want, magnitude = exact(of, self.mode, ends, bias), exact(of.absolute(), self.mode, ends)
        outside = np.isnan(want)
        error = np.abs(out.values.astype(np.float64) - want)
        far = ~(outside | (error <= 1.01 * ROUNDING[self.out] * np.abs(want) + SUMS * (magnitude + 1)))
        assert not far.any(), f"{far.sum()} of {far.size}, the first at {np.argwhere(far)[0]}"
        assert (out.values[outside] == before[outside]).all()
        assert (out.gap.view(np.uint8) == 0xA5).all()
