"""Checks emulated products of sm90_tiled, one launch each, against float64."""

from typing import Any, NamedTuple

import numpy as np

from fp8core.kernels.gemm.sm90 import tiled
from fp8core.kernels.gemm.sm90.tiled_cost import Scales, Tile
from fp8core.problem import Activation, ScaledMm
from fp8core.target import Target
from support.emulation.memory import Memory
from support.emulation.products import codes
from support.emulation.results import Result
from support.emulation.running import FLOATS, matrix

E4M3FN = "float8_e4m3fn"


class TiledProduct(NamedTuple):
    """A product and its tile; by default, scales are per row, and there are a bias and a bfloat16 result."""

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
    """Elements between the result's rows; TMA does not store rows with an odd gap."""
    offset: int = 0
    """The offset of the result from an aligned address, in bytes."""
    early: bool = False
    """Whether the weight may be read before the previous kernel has ended."""
    scale_tiles: bool = True
    """Whether TMA may load 1x128 scales of a."""
    alike: bool = False
    """Whether all rows of a are the same: then those of the result have the same bits."""

    def check(self, memory: Memory) -> None:
        """Launch on arrays of ``memory``, and assert that every error is within that of the dtype and of fp32 sums."""
        (m, n, k), (random, k_blocks) = self.shape, (np.random.default_rng(7), -(-self.shape[2] // 128))
        codes_a, codes_b = codes(m, k, E4M3FN, 0), codes(n, k, E4M3FN, 1)
        if self.alike:
            codes_a = codes_a[:1].repeat(m, 0)
        along_k = self.scales in ("block", "group")
        rows_b = -(-n // 128) if self.scales == "block" else n

        def draw(*size: int) -> np.ndarray:
            return ((random.random(size) + 0.5) / 64).astype(np.float32)

        columns = (k_blocks + 3) // 4 * 4 if along_k and self.scale_tiles else k_blocks
        scale_a = draw(columns if along_k else 1, m)  # k first
        if self.alike:
            scale_a[:, 1:] = scale_a[:, :1]
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
            *(self.scales != "promoted", False, k, k, n + self.gap, 1 if self.gap % 8 or self.offset else 16),
        )._replace(activation=self.activation, beta=self.beta, prefetch_weight=self.early)
        assert tiled.scales_of(problem) == self.scales
        addend = random.standard_normal(n).astype(FLOATS[self.bias]) if self.bias else None
        result = Result(memory, random, (m, n), self.out, self.gap, self.offset)
        a, b = matrix(memory, codes_a, k), matrix(memory, codes_b, k)
        vectors = [memory.array(x).ctypes.data if x is not None else 0 for x in (scale_a, scale_b, addend)]
        pointers: list[Any] = [
            a.pointer,
            b.pointer,
            *vectors,
            result.out.pointer,
            0,
            result.amax.ctypes.data if self.amax else 0,
            0,
        ]
        tiled.tiled(problem, self.tile)(0, *pointers)
        ending = {"activation": self.activation, "beta": self.beta, "amax": self.amax}
        result.check((codes_a, codes_b), (wide_a, wide_b), addend, **ending)
        assert not self.alike or (result.out.values == result.out.values[0]).all()
