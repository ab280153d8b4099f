"""Products of few rows on sm_90a whose codes lie at any address and stride, by `sm90_decode` with several maps.

TMA takes addresses and strides that are multiples of 16 bytes. Every 16th row, or more of them, has such a stride: the
rows of each residue get a map of their own, which begins up to 15 bytes before the first of them and ends with it, so
that TMA itself aligns what it loads, and fills the last k-block with zeros (``cuda_src/gemm/sm90/phased_maps.cuh``).
"""

import struct
from math import gcd
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.args import Matmul, ready_kernel
from fp8core.kernels.gemm.requirements import (
    FLOAT32_SCALES,
    OCP_FORMATS,
    ROW_OR_BLOCK_SCALES,
    WHOLE_WORDS,
    WIDE_RESULT,
    few_rows,
)
from fp8core.kernels.gemm.sm90.decode import CommonArgs, launcher_for, narrow_config, panels
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS, DecodeConfig, width, without_multicast
from fp8core.kernels.gemm.sm90.tensor_maps import TensorMaps, encode, shared_maps
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import ScaledMm
from fp8core.runtime.args import PhasedMaps
from fp8core.table import Kernel, Requirement

ALIGNMENT: Final = 16
"""Bytes that TMA's addresses and strides are multiples of, and the most maps of an operand."""


class UnalignedArgs(NamedTuple):
    """Of sm90_decode, where rows of codes begin at any address."""

    weight_map: PhasedMaps
    a_map: PhasedMaps
    common: CommonArgs


def phases(*strides: int) -> int:
    """Return the least power of two of rows after which each stride is a multiple of 16 bytes."""
    return max(ALIGNMENT // gcd(ALIGNMENT, stride) for stride in strides)


class UnalignedMaps(TensorMaps):
    """PhasedMaps of the device source by the address of the operand."""

    __slots__ = ()

    def make(self, pointer: int) -> bytes:
        """Return the maps of the rows of each residue, and the offsets of the first of them."""
        rows, columns, stride, tile, count = self._geometry
        maps, offsets = [], []
        for first in range(min(count, rows)):
            begin = pointer + first * stride
            offset = begin % ALIGNMENT
            of_residue = ceil_div(rows - first, count)
            step = stride * count if of_residue > 1 else ALIGNMENT * ceil_div(columns, ALIGNMENT) + ALIGNMENT
            maps.append(encode(begin - offset, of_residue, offset + columns, step, tile // count, BLOCK_K))
            offsets.append(offset)
        # What is loaded for residues without rows is dropped.
        missing = ALIGNMENT - len(maps)
        return b"".join(maps + maps[:1] * missing) + struct.pack("16i", *offsets, *offsets[:1] * missing)


def plan_unaligned(problem: ScaledMm, config: DecodeConfig | None = None) -> Matmul:
    """Return the product as `sm90_decode` does; no bits of a row depend on where it lies."""
    if problem.m > MOST_ROWS:
        return panels(problem, plan_unaligned)
    config = config or without_multicast(narrow_config(problem), problem.n)
    count = phases(problem.lda, problem.ldb)
    launcher, grid = launcher_for(problem, config, UnalignedArgs, phases=count)
    launch = launcher.bind_args(grid, UnalignedArgs(b"", b"", CommonArgs.of(problem)))
    side = width(problem.m)
    a_maps = shared_maps(UnalignedMaps, problem.m, problem.k, problem.lda, side, min(count, side))
    b_maps = shared_maps(UnalignedMaps, problem.n, problem.k, problem.ldb, config.tile, count)
    return ready_kernel(launch, a_maps=a_maps, b_maps=b_maps)


UNALIGNED: Final = Requirement(
    lambda p: any(number % ALIGNMENT for number in (max(p.alignment, p.codes_alignment), p.lda, p.ldb)),
    "is for rows of codes that are not aligned to 16 bytes",
)
SOME_K: Final = Requirement(lambda p: 0 < p.k < 1 << 30, "needs k from 1 to 2**30, got k={p.k}")

SM90_DECODE_UNALIGNED: Final = Kernel(
    "sm90_decode_unaligned",
    (
        CUDA,
        supports("wgmma"),
        UNALIGNED,
        OCP_FORMATS,
        ROW_OR_BLOCK_SCALES,
        FLOAT32_SCALES,
        WIDE_RESULT,
        SOME_K,
        WHOLE_WORDS,
    ),
    plan_unaligned,
    (few_rows(MOST_ROWS),),
)
"""The row of `scaled_mm` for few rows at any address on Hopper."""
