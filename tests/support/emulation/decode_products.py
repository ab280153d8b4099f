"""Checks emulated products of sm90_decode and sm90_decode_rows, one launch each, against float64."""

import math
from typing import Any, NamedTuple

import numpy as np

from fp8core.dtypes import FORMATS, ITEMSIZE
from fp8core.kernels.gemm.sm90.decode import decode
from fp8core.kernels.gemm.sm90.decode_config import DecodeConfig
from fp8core.kernels.gemm.sm90.decode_unaligned import decode_unaligned
from fp8core.kernels.linear.fused import plan_fused
from fp8core.problem import (
    BLOCK,
    BLOCK_128,
    GROUP_128,
    PER_TENSOR,
    PER_TOKEN,
    Activation,
    Granularity,
    Linear,
    Quantize,
    ScaledMm,
)
from fp8core.target import Target
from support import reference
from support.emulation.memory import Memory
from support.emulation.products import codes
from support.emulation.results import Result
from support.emulation.running import FLOATS

E4M3FN = "float8_e4m3fn"
SLACK = 64
"""Bytes of NaN before and after an operand: kernels may read the whole 16-byte words of its first and last codes."""
OUT_SCALE = 0.5
TARGET = Target("cuda", 90, 0, 132, 32, 227 << 10)


class DecodeProduct(NamedTuple):
    """A product and the layout of its operands; by default, scales are per row, and the result is bfloat16."""

    config: DecodeConfig | None
    shape: tuple[int, int, int]
    scales: tuple[Granularity, Granularity] = ("row", "row")
    out: str = "bfloat16"
    bias: str = ""
    activation: Activation = ""
    beta: float = 0.0
    amax: bool = False
    gaps: tuple[int, int, int] = (0, 0, 0)
    """Elements between the rows of a, of b and of the result."""
    offsets: tuple[int, int, int] = (0, 0, 0)
    """Offsets of a, b and the result from aligned addresses, in bytes."""
    early: bool = True
    """Whether the weight may be read before the previous kernel has ended."""
    x: str = ""
    """The 16-bit dtype of a if the kernel quantizes it, per token; empty if a has codes. With it the kernel is that of
    the fused layer."""

    def check(self, memory: Memory) -> None:
        """Launch on arrays of ``memory``, and assert that every error is within that of the dtype and of fp32 sums."""
        (m, n, k), random = self.shape, np.random.default_rng(7)
        codes_b = codes(n, k, E4M3FN, 1)
        scale_a, strides_a, wide_a = _scales(random, self.scales[0], m, k)
        scale_b, strides_b, wide_b = _scales(random, self.scales[1], n, k)
        rows = codes_a = codes(m, k, E4M3FN, 0)
        if self.x:
            rows = random.standard_normal((m, k)).astype(FLOATS[self.x])
            codes_a, wide_a = reference.quantize(rows, E4M3FN)
        gap_a, gap_b, gap_out = self.gaps
        coded, ldo = self.out in FORMATS, n + gap_out
        result = Result(memory, random, (m, n), self.out, gap_out, self.offsets[2])
        codes_alignment = math.gcd(16, *self.offsets[:2], k + gap_a, k + gap_b)
        out_alignment = math.gcd(16, self.offsets[2], ldo * ITEMSIZE[self.out])
        problem = ScaledMm(
            *(TARGET, m, n, k, E4M3FN, E4M3FN, self.out, *self.scales, strides_a, strides_b, self.bias, coded),
            *(self.amax, True, False, k + gap_a, k + gap_b, ldo, min(codes_alignment, out_alignment)),
        )._replace(
            codes_alignment=codes_alignment,
            out_alignment=out_alignment,
            activation=self.activation,
            beta=self.beta,
            prefetch_weight=self.early,
        )
        addend = random.standard_normal(n).astype(FLOATS[self.bias]) if self.bias else None
        run = self._plan(problem)
        vectors = [memory.array(x).ctypes.data if x is not None else 0 for x in (scale_a, scale_b, addend)]
        pointers: list[Any] = [
            _pointer(memory, rows, k + gap_a, self.offsets[0]),
            _pointer(memory, codes_b, k + gap_b, self.offsets[1]),
            *vectors,
            result.out.pointer,
            memory.array(np.full(1, OUT_SCALE, np.float32)).ctypes.data if coded else 0,
            result.amax.ctypes.data if self.amax else 0,
            memory.empty((run.scratch_bytes + 1,), np.uint8).ctypes.data,
        ]
        run(0, *pointers)
        ending = {"activation": self.activation, "beta": self.beta, "amax": self.amax, "out_scale": OUT_SCALE}
        result.check((codes_a, codes_b), (wide_a, wide_b), addend, **ending)

    def _plan(self, problem: ScaledMm) -> Any:
        if self.x:
            quantize = Quantize(TARGET, self.x, E4M3FN, PER_TOKEN, False, "float32", "k", problem.k, 16)
            return plan_fused(Linear(quantize, problem, problem.lda, math.inf))
        assert self.config is not None
        return (decode_unaligned if self.config.phases else decode)(problem, self.config)


def _pointer(memory: Memory, rows: np.ndarray, stride: int, offset: int) -> int:
    """Copy rows to a stride of ``stride`` elements among NaN; return the address, ``offset`` bytes off alignment."""
    count, size = len(rows), rows.dtype.itemsize
    whole = np.full(2 * SLACK + count * stride * size + offset, 0xFF, np.uint8)
    begin = SLACK + offset
    inside = whole[begin : begin + count * stride * size].reshape(count, stride * size)
    inside[:, : rows.shape[1] * size] = np.ascontiguousarray(rows).view(np.uint8).reshape(count, -1)
    return int(memory.array(whole).ctypes.data) + begin


def _scales(
    random: np.random.Generator, granularity: Granularity, rows: int, k: int
) -> tuple[np.ndarray, tuple[int, int], np.ndarray]:
    """Return scales with k as the last axis, their strides, and the scales expanded to one for each element."""
    group = {"tensor": PER_TENSOR, "row": PER_TOKEN, "group": GROUP_128, "block": BLOCK_128}[granularity]
    made = ((random.random(group.scale_shape(rows, k)) + 0.5) / 64).astype(np.float32)
    strides = {"tensor": (0, 0), "row": (1, 0)}.get(granularity, (-(-k // BLOCK), 1))
    return made, strides, reference.spread(made, group, (rows, k))
