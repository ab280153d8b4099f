"""Checks emulated grouped products, one launch each, against float64."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from fp8core.problem import Granularity, GroupedMm, ScaledMm, Target
from support import reference
from support.emulation.memory import Memory
from support.emulation.products import ROUNDING, SUMS, codes
from support.emulation.running import FLOATS, empty, matrix

E4M3FN = "float8_e4m3fn"


class Grouped(NamedTuple):
    """A grouped product: the given ends of its groups, and what else may go wrong."""

    ends: tuple[int, ...]
    rows: int
    n: int = 200
    k: int = 272
    scales: tuple[Granularity, Granularity] = ("row", "row")
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
        random, k_blocks = np.random.default_rng(11), -(-k // 128)
        codes_a, codes_b = codes(m, k, E4M3FN, 0), codes(groups * n, k, E4M3FN, 1)
        of_a, of_b = self.scales
        across = k_blocks if of_a == "group" else 1
        down = {"tensor": 1, "row": n, "group": n, "block": -(-n // 128)}[of_b]

        def draw(*size: int) -> np.ndarray:
            return ((random.random(size) + 0.5) / 64).astype(np.float32)

        scale_a = draw(across, m if self.scale_tiles or of_a != "group" else m + 1)  # k first
        scale_b = draw(groups, down, across)
        addend = random.standard_normal((groups, n)).astype(FLOATS[self.bias]) if self.bias else None
        one = ScaledMm(
            *(self.target._replace(multiprocessors=self.multiprocessors), m, n, k, E4M3FN, E4M3FN, self.out),
            *self.scales,
            *((1, scale_a.shape[1]) if of_a == "group" else (1, 0),),
            *({"tensor": (0, 0), "row": (1, 0)}.get(of_b, (across, 1)), self.bias, False, False, True, False),
            *(k, k, n + self.gap, 1 if self.gap % 8 or k % 16 or n % 8 else 16),
        )._replace(codes_alignment=16 if k % 16 == 0 else 1)
        problem = GroupedMm(groups, one, n * k, down * across, n if self.bias else 0)
        before = random.standard_normal((m, n)).astype(FLOATS[self.out])
        out = empty(memory, (m, n), FLOATS[self.out], n + self.gap)
        out.values[...] = before
        a, b = matrix(memory, codes_a, k), matrix(memory, codes_b, k)
        vectors = [memory.array(x).ctypes.data if x is not None else 0 for x in (scale_a, scale_b, addend)]
        offs = memory.array(np.array(self.ends, np.int32))
        plan(problem)(0, a.pointer, b.pointer, *vectors, offs.ctypes.data, out.pointer)
        start = 0
        for group, end in enumerate(self.ends):
            rows = slice(start, max(start, min(end, m)))
            start = rows.stop
            wide_a = np.repeat(scale_a.T[rows, :across], 128 if across > 1 else k, 1)[:, :k]
            wide_b = np.repeat(scale_b[group], {"tensor": n, "block": 128}.get(of_b, 1), 0)[:n]
            wide_b = np.repeat(wide_b, 128 if across > 1 else k, 1)[:, :k]
            numbers = (
                *(
                    reference.decode(codes_a[rows], E4M3FN),
                    reference.decode(codes_b[group * n : (group + 1) * n], E4M3FN).T,
                ),
                *(wide_a, wide_b.T),
            )
            want = reference.scaled_mm(*numbers, None if addend is None else addend[group])
            magnitude = reference.scaled_mm(*map(np.abs, numbers))
            error = np.abs(out.values[rows].astype(np.float64) - want)
            far = ~(error <= 1.01 * ROUNDING[self.out] * np.abs(want) + SUMS * (magnitude + 1))
            assert not far.any(), f"group {group}: {far.sum()} of {far.size}, the first at {np.argwhere(far)[0]}"
        assert (out.values[start:] == before[start:]).all()
        assert (out.gap.view(np.uint8) == 0xA5).all()
