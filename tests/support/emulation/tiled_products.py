"""Products by sm90_tiled that are emulated, one launch each, against float64."""

from typing import Any, NamedTuple

import numpy as np

from fp8core.kernels.gemm.sm90 import tiled
from fp8core.kernels.gemm.sm90.tiled_cost import Scales, Tile
from fp8core.problem import Activation, ScaledMm, Target
from support import reference
from support.emulation.memory import Memory
from support.emulation.products import ROUNDING, SUMS, codes
from support.emulation.running import FLOATS, empty, matrix

E4M3FN = "float8_e4m3fn"
LATER = 9
"""What an activation and what is added may be off by, in units of the rounding of a sum near 1."""


class TiledProduct(NamedTuple):
    """What is launched: by default the scales of a row of each operand, a bias and a bfloat16 result."""

    tile: Tile
    shape: tuple[int, int, int] = (300, 336, 400)
    multiprocessors: int = 3
    scales: Scales = "chain"
    out: str = "bfloat16"
    bias: str = "float32"
    activation: Activation = ""
    beta: float = 0.0
    amax: bool = False
    gap: int = 0
    """Elements between the result's rows; an odd one keeps TMA from storing it."""
    early: bool = False
    """Whether the weight may be read before the kernel before has ended."""
    scale_tiles: bool = True
    """Whether TMA may load 1x128 scales of a."""

    def check(self, memory: Memory) -> None:
        """Launch it on arrays of ``memory``; assert that every result is as near as its dtype and fp32 sums allow."""
        (m, n, k), (random, k_blocks) = self.shape, (np.random.default_rng(7), -(-self.shape[2] // 128))
        codes_a, codes_b = codes(m, k, E4M3FN, 0), codes(n, k, E4M3FN, 1)
        along_k = self.scales in ("block", "group")
        rows_b = -(-n // 128) if self.scales == "block" else n

        def draw(*size: int) -> np.ndarray:
            return ((random.random(size) + 0.5) / 64).astype(np.float32)

        columns = (k_blocks + 3) // 4 * 4 if along_k and self.scale_tiles else k_blocks
        scale_a = draw(columns if along_k else 1, m)  # k first
        scale_b = draw(rows_b, k_blocks if along_k else 1)
        wide_a = np.repeat(scale_a.T[:, : k_blocks if along_k else 1], 128 if along_k else k, 1)[:, :k]
        wide_b = np.repeat(np.repeat(scale_b, 128 if self.scales == "block" else 1, 0)[:n], 128 if along_k else k, 1)[
            :, :k
        ]
        strides_a = ((1, m) if self.scale_tiles else (1, m + 1)) if along_k else (1, 0)
        if along_k and not self.scale_tiles:  # rows of scales that TMA cannot load
            scale_a = np.concatenate([scale_a, np.full((len(scale_a), 1), np.nan, np.float32)], 1)
        problem = ScaledMm(
            *(Target("cuda", 90, 0, self.multiprocessors, 32, 227 << 10), m, n, k, E4M3FN, E4M3FN, self.out),
            *(("group", "block" if self.scales == "block" else "group") if along_k else ("row", "row")),
            *(strides_a, (k_blocks, 1) if along_k else (1, 0), self.bias, False, self.amax),
            *(self.scales != "promoted", False, k, k, n + self.gap, 1 if self.gap % 8 else 16),
        )._replace(activation=self.activation, beta=self.beta, prefetch_weight=self.early)
        assert tiled.scales_of(problem) == self.scales
        addend = random.standard_normal(n).astype(FLOATS[self.bias]) if self.bias else None
        before = random.standard_normal((m, n)).astype(FLOATS[self.out])
        a, b = matrix(memory, codes_a, k), matrix(memory, codes_b, k)
        out = empty(memory, (m, n), FLOATS[self.out], n + self.gap)
        out.values[...] = before
        largest = memory.array(np.full(1, np.nan, np.float32), writable=True)
        vectors = [memory.array(x).ctypes.data if x is not None else 0 for x in (scale_a, scale_b, addend)]
        pointers: list[Any] = [
            a.pointer,
            b.pointer,
            *vectors,
            out.pointer,
            0,
            largest.ctypes.data if self.amax else 0,
            0,
        ]
        tiled.tiled(problem, self.tile)(0, *pointers)

        numbers = reference.decode(codes_a, E4M3FN), reference.decode(codes_b, E4M3FN).T
        want = reference.scaled_mm(*numbers, wide_a, wide_b.T, addend) + self.beta * before.astype(np.float64)
        magnitude = reference.scaled_mm(*map(np.abs, (*numbers, wide_a, wide_b.T)))
        if self.activation:
            want = reference.activated(want, self.activation)
        got = out.values.astype(np.float64)
        error = SUMS * (magnitude + LATER)
        assert (np.abs(got - want) <= 1.01 * ROUNDING[self.out] * np.abs(want) + error).all()
        assert (out.gap.view(np.uint8) == 0xA5).all()
        if self.amax:
            assert abs(largest[0] - np.abs(want).max()) <= error.max()
