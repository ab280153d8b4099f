"""Products of few rows by FP8 ``mma.sync``: the weight is streamed from memory (``cuda_src/gemm/mma/decode.cu``).

For the GPUs that have the instruction in hardware and no better one: sm_89 and sm_12x. The kernel is compiled and
emulated for these, and run on an H200, which splits the instruction into others. Constants that affect only speed are
estimates.
"""

from typing import Final

from fp8core.kernels.encodings import FORMAT, TYPE, ceil_div, power_of_two
from fp8core.kernels.gemm.args import Matmul, MatmulArgs, MatmulBetaArgs, ending, ready_kernel
from fp8core.kernels.gemm.requirements import (
    COUNTABLE,
    FLOAT32_SCALES,
    OCP_FORMATS,
    ROW_OR_BLOCK_SCALES,
    SHORT_K,
    STEPS_OF_16,
    WHOLE_WORDS,
    WIDE_RESULT,
    block_count,
    few_rows,
)
from fp8core.kernels.requirements import CUDA, aligned, supports
from fp8core.problem import BLOCK, ScaledMm
from fp8core.runtime import jit
from fp8core.table import Kernel
from fp8core.target import Target

CHANNELS: Final = 16
"""Channels of a tile."""
BLOCK_K: Final = BLOCK
"""Columns of k that a warp takes at a time."""
SIDES: Final = (8, 16, 32, 64)
"""Rows of a block."""
WARPS: Final = (4, 8)
WARPS_IN_FLIGHT: Final = 16
"""Warps per multiprocessor that keep its share of the memory busy: 32 KiB in flight, where latency needs some 8 KiB."""


def enough(n: int, warps_: int, target: Target) -> bool:
    """Return whether blocks of ``warps_`` warps and one tile each fill a device."""
    return ceil_div(n, CHANNELS) * warps_ >= WARPS_IN_FLIGHT * target.multiprocessors


def warps(n: int, k: int, target: Target) -> int:
    """Return the number of warps that divide ``k`` in a block: independent of m, so the bits of a row are, too."""
    wanted = next((count for count in WARPS if enough(n, count, target)), WARPS[-1])
    return min(wanted, power_of_two(ceil_div(k, BLOCK_K)))


def tiles(n: int, side: int, target: Target) -> int:
    """Return the tiles of a block: two, to read many rows of a half as often, if enough blocks are left."""
    return 2 if side > CHANNELS and enough(n, WARPS[0], target) else 1


def plan_decode(p: ScaledMm) -> Matmul:
    """Return one launch of ``round(scale_a * (scale_b * acc) + bias)``; it reads the weight once for every 64 rows."""
    side = next((side for side in SIDES if side >= p.m), SIDES[-1])
    count, tile_count = warps(p.n, p.k, p.target), tiles(p.n, side, p.target)
    row_tiles = ceil_div(p.m, side)
    launcher = jit.prepare(
        p.target,
        "gemm/mma/decode",
        "sm89_decode",
        {
            "FP8_A": FORMAT[p.a],
            "FP8_B": FORMAT[p.b],
            "FP8_OUT": TYPE[p.out],
            "FP8_BIAS": TYPE[p.bias] if p.bias else -1,
            **ending(p),
            "FP8_BLOCKED": int(p.scale_a == "group"),
            "FP8_B_BLOCK": int(p.scale_b == "block"),
            "FP8_SIDE": side,
            "FP8_TILES": tile_count,
            "FP8_WARPS": count,
        },
        MatmulBetaArgs,
        block=count * p.target.warp,
        shared_bytes=4 * count * side * (CHANNELS * tile_count + 4),
        programmatic=True,
    )
    args = MatmulBetaArgs(MatmulArgs.of(p, row_tiles), p.beta)
    launch = launcher.bind_args((row_tiles * ceil_div(p.n, CHANNELS * tile_count), 1, 1), args)
    return ready_kernel(launch)


SM89_DECODE: Final = Kernel(
    "sm89_decode",
    (
        CUDA,
        supports("fp8_mma"),
        OCP_FORMATS,
        ROW_OR_BLOCK_SCALES,
        FLOAT32_SCALES,
        WIDE_RESULT,
        aligned(16),
        STEPS_OF_16,
        SHORT_K,
        COUNTABLE,
        WHOLE_WORDS,
        block_count(SIDES[-1], CHANNELS),
    ),
    plan_decode,
    (few_rows(SIDES[-1], "estimated"),),
)
"""The row of `scaled_mm` for few rows on GPUs with FP8 mma.sync."""
