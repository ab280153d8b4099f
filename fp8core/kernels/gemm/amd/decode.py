"""Products of few rows on AMD's FP8 matrix cores: the weight is streamed past the cache (``hip_src/gemm/decode.hip``).

The kernel is compiled and emulated, but has never run on an AMD GPU: constants that affect only speed are estimates.
"""

from typing import Final

from fp8core.kernels.encodings import FORMAT, RESULT, TYPE, ceil_div, power_of_two
from fp8core.kernels.gemm.args import Matmul, MatmulArgs, MatmulBetaArgs, ending, ready_kernel
from fp8core.kernels.gemm.requirements import (
    AMD_FORMATS,
    COUNTABLE,
    FLOAT32_SCALES,
    NOT_BOTH_E5M2,
    ROW_SCALES,
    SHORT_K,
    STEPS_OF_16,
    WIDE_RESULT,
    block_count,
    few_rows,
    grid_fits,
)
from fp8core.kernels.requirements import HIP, aligned, supports
from fp8core.problem import ScaledMm
from fp8core.runtime import jit
from fp8core.table import Kernel
from fp8core.target import Target

SIDE: Final = 16
"""Tokens, and channels, of a block."""
UNROLL: Final = 4
"""Loads of 16 bytes of the weight that a lane has in flight."""
WAVEFRONTS: Final = (4, 8, 16)
WAVEFRONTS_IN_FLIGHT: Final = 16
"""Wavefronts per compute unit that keep its share of the memory busy: 64 KiB on gfx9, where latency needs about 17."""


def wavefronts(n: int, k: int, target: Target) -> int:
    """Return the number of wavefronts that divide ``k`` in a block: independent of m, so the bits of a row are, too."""
    k_blocks = ceil_div(k, UNROLL * target.warp)
    wanted = WAVEFRONTS_IN_FLIGHT * target.multiprocessors
    enough = next((count for count in WAVEFRONTS if ceil_div(n, SIDE) * count >= wanted), WAVEFRONTS[-1])
    return min(enough, power_of_two(k_blocks))


def grid(p: ScaledMm) -> tuple[int, int]:
    """Return the blocks of a launch, each for 16 tokens x 16 channels, and their threads."""
    return ceil_div(p.m, SIDE) * ceil_div(p.n, SIDE), wavefronts(p.n, p.k, p.target) * p.target.warp


def plan_decode(p: ScaledMm) -> Matmul:
    """Return one launch of ``round(scale_a * (scale_b * acc) + bias)``; it reads the weight once for every 16 rows."""
    blocks, threads = grid(p)
    launcher = jit.prepare(
        p.target,
        "gemm/decode",
        "gfx9_decode",
        {
            "FP8_A": FORMAT[p.a],
            "FP8_B": FORMAT[p.b],
            "FP8_OUT": RESULT[p.out],
            "FP8_BIAS": TYPE[p.bias] if p.bias else -1,
            **ending(p),
            "FP8_WAVEFRONTS": threads // p.target.warp,
            "FP8_UNROLL": UNROLL,
        },
        MatmulBetaArgs,
        block=threads,
    )
    launch = launcher.bind_args((blocks, 1, 1), MatmulBetaArgs(MatmulArgs.of(p, ceil_div(p.m, SIDE)), p.beta))
    return ready_kernel(launch)


GFX9_DECODE: Final = Kernel(
    "gfx9_decode",
    (
        HIP,
        supports("fp8_mma"),
        AMD_FORMATS,
        NOT_BOTH_E5M2,
        ROW_SCALES,
        FLOAT32_SCALES,
        WIDE_RESULT,
        aligned(16),
        STEPS_OF_16,
        SHORT_K,
        COUNTABLE,
        block_count(SIDE, SIDE),
        grid_fits(grid),
    ),
    plan_decode,
    (few_rows(SIDE, "estimated"),),
)
"""The row of `scaled_mm` for few rows on AMD GPUs."""
