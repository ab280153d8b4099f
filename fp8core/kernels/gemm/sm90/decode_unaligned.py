"""Products of few rows on sm_90a with a weight at any address and stride: `sm90_decode` on copies of a.

TMA reads from multiples of 16 bytes. The rows of each residue modulo 16, or less, begin equally far behind such a
multiple: they have a map of their own, a tile has rows of one residue, and is multiplied by a copy of a whose rows
begin as far behind theirs (``cuda_src/gemm/sm90/phases.cuh``). The weight is read as it lies; what is copied is a.
"""

import struct
from math import gcd
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.args import Matmul, ready
from fp8core.kernels.gemm.requirements import (
    FLOAT32_SCALES,
    OCP_FORMATS,
    ROW_SCALES,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
    WIDE_RESULT,
)
from fp8core.kernels.gemm.sm90.decode import CommonArgs, launcher_for
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    MOST_ROWS,
    CostModel,
    DecodeConfig,
    cheapest,
    cost_model,
    width,
    without_prefetch,
)
from fp8core.kernels.gemm.sm90.tensor_maps import TensorMaps, encode, shared_maps, tensor_maps
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import Float32, Int32, Int64, PhasedMaps, Pointer, TensorMap
from fp8core.table import Kernel, Launch, Requirement

ALIGNMENT: Final = 16
"""Bytes that TMA reads from multiples of, and the most maps of a weight."""
MOST_COPIED: Final = 1 << 30
"""Bytes of all copies of a at most: the memory that a call takes beside its result."""
SMALL, LARGE = 64, 128
"""Channels of the tiles of sm90_decode."""
THREADS: Final = 256
BLOCKS_A_MULTIPROCESSOR: Final = 8


class ShiftArgs(NamedTuple):
    """Of shift_codes."""

    a: Pointer
    lda: Int64
    out: Pointer
    b: Pointer
    ldb: Int64
    m: Int32
    k: Int32
    ld: Int32
    copy_rows: Int32


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


def plan_shift(p: ScaledMm, ld: int) -> Launch:
    """Return ``launch(stream, a, copies, b)``: a for each residue of b's rows, in rows of ``ld`` codes."""
    count = phases_of(p.ldb)
    launcher = jit.prepare(p.target, "gemm/sm90/shift", "shift_codes", {}, ShiftArgs, block=THREADS, programmatic=True)
    blocks = ceil_div(p.m * ld // ALIGNMENT, THREADS)
    most = ceil_div(p.target.multiprocessors * BLOCKS_A_MULTIPROCESSOR, count)
    args = ShiftArgs(0, p.lda, 0, 0, p.ldb, p.m, p.k, ld, width(p.m))
    return launcher.bind_args((min(blocks, most), count, 1), args)


def layout(problem: ScaledMm) -> DecodeConfig:
    """Return how a product is laid out on the multiprocessors: as `sm90_decode`, for the channels that its tiles hold.

    Tiles that are not full are as many as there are residues: where large tiles would hold more channels so than small
    ones, these are taken.
    """
    count, model = phases_of(problem.ldb), cost_model(width(problem.m), False)
    n, most = (ceil_div(problem.n, count * side) * count * side for side in (SMALL, LARGE))
    config = cheapest(n, problem.k, alone(model, LARGE if most == n else SMALL), problem.target)
    return config if problem.prefetch_weight else without_prefetch(config, problem.target)


def alone(model: CostModel, most: int) -> CostModel:
    """Return a cost model with those candidates whose tiles have at most so many channels and an a of their own."""
    configs = tuple(c for c in model.configs if SMALL * c.m_warpgroups <= most and c.multicast_tiles == 1)
    return model._replace(configs=configs, small=alone(model.small, most) if model.small else None)


def plan_unaligned(problem: ScaledMm, config: DecodeConfig | None = None) -> Matmul:
    """Return the product as `sm90_decode` does, after the launch that copies a."""
    config = config or layout(problem)
    count, side = phases_of(problem.ldb), width(problem.m)
    ld = ceil_div(problem.k + ALIGNMENT - 1, BLOCK_K) * BLOCK_K
    launcher, grid = launcher_for(problem, config, UnalignedArgs, phases=count)
    multiply = launcher.bind_args(grid, UnalignedArgs(b"", b"", CommonArgs.of(problem._replace(k=ld)), problem.beta))
    shift = plan_shift(problem, ld)
    b_maps = shared_maps(UnalignedMaps, problem.n, problem.k, problem.ldb, config.tile, BLOCK_K)
    a_maps = tensor_maps(count * side, ld, ld, side)

    def launch(stream: int, a: int, b: int, scale_a: int, scale_b: int, bias: int, out: int, *others: int) -> None:
        copies = others[-1]
        shift(stream, a, copies, b)
        multiply(stream, b_maps[b], a_maps[copies], scale_a, scale_b, bias, out)

    return ready(launch, scratch_bytes=count * side * ld, prefetches_weight=True)


UNALIGNED: Final = Requirement(
    lambda p: any(number % ALIGNMENT for number in (max(p.alignment, p.codes_alignment), p.lda, p.ldb)),
    "is for rows of codes that are not aligned to 16 bytes",
)
SOME_K: Final = Requirement(
    lambda p: p.k > 0 and phases_of(p.ldb) * MOST_ROWS * p.k < MOST_COPIED,
    f"needs k > 0 and copies of a of less than {MOST_COPIED} bytes, got k={{p.k}} ldb={{p.ldb}}",
)
FEW_ROWS: Final = Requirement(lambda p: p.m <= MOST_ROWS, f"needs at most {MOST_ROWS} rows, got m={{p.m}}")
ANY_ORDER: Final = Requirement(
    lambda p: not p.batch_invariant, "not batch-invariant: more rows than it takes get their sums in another order"
)

SM90_DECODE_UNALIGNED: Final = Kernel(
    "sm90_decode_unaligned",
    (
        CUDA,
        supports("wgmma"),
        UNALIGNED,
        OCP_FORMATS,
        ROW_SCALES,
        FLOAT32_SCALES,
        WIDE_RESULT,
        SOME_K,
        FEW_ROWS,
        ANY_ORDER,
        WHOLE_ELEMENTS,
        WHOLE_WORDS,
    ),
    plan_unaligned,
)
"""The row of `scaled_mm` for few rows at any address on Hopper."""
