"""Products of few rows on sm_90a with operands at any address and stride: a mode of `sm90_decode`.

TMA reads from multiples of 16 bytes. The rows of each residue modulo 16, or less, begin equally far behind such a
multiple: they have a map of their own, and a tile has rows of one residue, which the threads that multiply them align
in their registers (``cuda_src/gemm/sm90/phases.cuh``). The weight is read as it lies; an unaligned a is copied first.
"""

import struct
from math import gcd
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.args import Matmul, ready, ready_kernel
from fp8core.kernels.gemm.realigned import ALIGNMENT, aligned, plan_realign
from fp8core.kernels.gemm.requirements import (
    FLOAT32_SCALES,
    OCP_FORMATS,
    ROW_OR_BLOCK_SCALES,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
    WIDE_RESULT,
)
from fp8core.kernels.gemm.sm90.decode import CommonArgs, launcher_for, panels
from fp8core.kernels.gemm.sm90.decode_config import (
    MOST_ROWS,
    CostModel,
    DecodeConfig,
    cheapest,
    cost_model,
    width,
    without_multicast,
    without_prefetch,
)
from fp8core.kernels.gemm.sm90.tensor_maps import TensorMaps, encode, shared_maps, tensor_maps
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import ScaledMm
from fp8core.runtime.args import Float32, PhasedMaps, TensorMap
from fp8core.table import Kernel, Requirement

SMALL, LARGE = 64, 128
"""Channels of the tiles of sm90_decode."""


class UnalignedArgs(NamedTuple):
    """Of sm90_decode, where rows of the weight begin at any address."""

    weight_map: PhasedMaps
    a_map: TensorMap
    common: CommonArgs
    beta: Float32


def phases_of(stride: int) -> int:
    """Return after how many rows they begin equally far behind a multiple of 16 bytes."""
    return ALIGNMENT // gcd(ALIGNMENT, stride)


class UnalignedMaps(TensorMaps):
    """PhasedMaps of the device source by the address of the weight."""

    __slots__ = ()

    def make(self, pointer: int) -> bytes:
        """Return the maps of the rows of each residue, and how far behind the maps' their codes begin.

        A row's first word of 16 bytes is read whole: memory is allocated in such words.
        """
        rows, columns, stride, *box = self._geometry
        count = phases_of(stride)
        maps, offsets = [], []
        for first in range(min(count, rows)):
            begin = pointer + first * stride
            offset = begin % ALIGNMENT
            of_residue = ceil_div(rows - first, count)
            maps.append(encode(begin - offset, of_residue, offset + columns, stride * count, *box))
            offsets.append(offset)
        missing = ALIGNMENT - len(maps)  # no channels have them: what they load is dropped
        return b"".join(maps + maps[:1] * missing) + struct.pack("16i", *offsets, *offsets[:1] * missing)


def layout(problem: ScaledMm) -> DecodeConfig:
    """Return how a product is laid out on the multiprocessors: as `sm90_decode`, for the channels that its tiles hold.

    Tiles that are not full are as many as there are residues: where large tiles would hold more channels so than small
    ones, these are taken. With one residue the layout is that of `sm90_decode`, so that a row that is aligned by chance
    gets the same bits from it.
    """
    count = phases_of(problem.ldb)
    # The order of a sum must not depend on m where it is asked not to: nor then may the config.
    model = cost_model(MOST_ROWS if problem.batch_invariant else width(problem.m), problem.scale_a == "group")
    n, most = problem.n, LARGE
    if count > 1:
        n, in_large = (ceil_div(n, count * side) * count * side for side in (SMALL, LARGE))
        most = LARGE if in_large == n else SMALL
    config = cheapest(n, problem.k, limited(model, most), problem.target)
    if width(problem.m) < 8 * config.multicast_tiles:
        config = without_multicast(config, n)
    config = config._replace(phases=count)
    return config if problem.prefetch_weight else without_prefetch(config, problem.target)


def limited(model: CostModel, most: int) -> CostModel:
    """Return a cost model with those candidates whose tiles have at most so many channels."""
    configs = tuple(c for c in model.configs if SMALL * c.m_warpgroups <= most)
    return model._replace(configs=configs, small=limited(model.small, most) if model.small else None)


def copies_a(p: ScaledMm) -> bool:
    """Return whether a is copied: where not all of its rows begin at multiples of 16 bytes."""
    return bool(p.lda % ALIGNMENT) or max(p.alignment, p.codes_alignment) < ALIGNMENT


def decode_unaligned(problem: ScaledMm, config: DecodeConfig | None = None) -> Matmul:
    """Return the product of up to 64 rows, with the bits of `sm90_decode` in the same layout of aligned operands."""
    config = config or layout(problem)
    launcher, grid = launcher_for(problem, config, UnalignedArgs)
    multiply = launcher.bind_args(grid, UnalignedArgs(b"", b"", CommonArgs.of(problem), problem.beta))
    b_maps = shared_maps(UnalignedMaps, problem.n, problem.k, problem.ldb, config.tile, config.weight_columns)
    tiles = config.multicast_tiles
    rows = width(problem.m) // tiles if tiles > 1 else problem.m
    if not copies_a(problem):
        a_maps = tensor_maps(problem.m, problem.k, problem.lda, rows)
        return ready_kernel(multiply, a_maps=a_maps, b_maps=b_maps)
    ld = aligned(problem.k)
    copy, a_maps = plan_realign(problem._replace(n=0)), tensor_maps(problem.m, ld, ld, rows)

    def launch(stream: int, a: int, b: int, scale_a: int, scale_b: int, bias: int, out: int, *others: int) -> None:
        copied = others[-1]
        copy(stream, a, copied, 0, 0)
        multiply(stream, b_maps[b], a_maps[copied], scale_a, scale_b, bias, out)

    return ready(launch, scratch_bytes=problem.m * ld, prefetches_weight=True)


def plan_unaligned(problem: ScaledMm) -> Matmul:
    """Return the launches of the row "sm90_decode_unaligned"."""
    return decode_unaligned(problem) if problem.m <= MOST_ROWS else panels(problem, decode_unaligned)


UNALIGNED: Final = Requirement(
    lambda p: any(number % ALIGNMENT for number in (max(p.alignment, p.codes_alignment), p.lda, p.ldb)),
    "is for rows of codes that are not aligned to 16 bytes",
)
SOME_K: Final = Requirement(lambda p: p.k > 0, "needs k > 0, got k={p.k}")
FEW_ROWS: Final = Requirement(
    lambda p: p.m <= MOST_ROWS or p.batch_invariant,
    f"needs at most {MOST_ROWS} rows or batch_invariant, got m={{p.m}}",
)

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
        FEW_ROWS,
        WHOLE_ELEMENTS,
        WHOLE_WORDS,
    ),
    plan_unaligned,
)
"""The row of `scaled_mm` for few rows at any address on Hopper."""
