"""Products of few rows by FP8 ``mma.sync``: the weight streamed past the caches (``cuda_src/mma_decode.cu``).

For the GPUs that have the instruction in hardware and no better one: sm_89 and sm_12x. Compiled and emulated for these,
and run on an H200, which takes it apart into others; the constants that only speed depends on are estimates.
"""

from typing import Final

from fp8core.kernels.hopper import DECODE_SCALES, FEW_ROWS, OCP_FORMATS, WHOLE_WORDS, WIDE_RESULT
from fp8core.kernels.hopper_layout import MOST_ROWS, width
from fp8core.kernels.requirements import aligned, platform
from fp8core.kernels.skinny import STEPS_OF_16
from fp8core.kernels.words import FORMAT, TYPE, ceil_div, power_of_two
from fp8core.problem import ScaledMm, Target
from fp8core.runtime import jit
from fp8core.table import Kernel, Requirement

CHANNELS: Final = 16
"""Channels of a tile."""
CHUNK: Final = 128
"""Of k that a warp takes at a time."""
WARPS: Final = (4, 8)
WARPS_IN_FLIGHT: Final = 16
"""Warps of a multiprocessor that keep its share of the memory busy: 32 KiB, where latency asks for some 8."""

SIGNATURE: Final = "PqPqPqqPqqPPqiiii"
"""a, lda, b, ldb, scale_a and its strides, scale_b and its strides, bias, out, ldo, m, n, k, row_tiles."""


def enough(n: int, warps_: int, target: Target) -> bool:
    """Return whether blocks of ``warps_`` warps and one tile each fill a device."""
    return ceil_div(n, CHANNELS) * warps_ >= WARPS_IN_FLIGHT * target.multiprocessors


def warps(n: int, k: int, target: Target) -> int:
    """Return among how many warps a block divides ``k``: not a question of m, so that neither are a row's bits."""
    wanted = next((count for count in WARPS if enough(n, count, target)), WARPS[-1])
    return min(wanted, power_of_two(ceil_div(k, CHUNK)))


def tiles(n: int, side: int, target: Target) -> int:
    """Return how many tiles a block has: two read many rows of a half as often, where enough blocks are left."""
    return 2 if side > CHANNELS and enough(n, WARPS[0], target) else 1


class MmaDecode:
    """``round(scale_a * (scale_b * acc) + bias)``, the weight read once for every 64 rows, in one launch."""

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        side = width(min(problem.m, MOST_ROWS))
        count = warps(problem.n, problem.k, problem.target)
        wide = tiles(problem.n, side, problem.target)
        row_tiles = ceil_div(problem.m, side)
        self._grid = (row_tiles * ceil_div(problem.n, CHANNELS * wide), 1, 1)
        self._shape = (problem.ldo, problem.m, problem.n, problem.k, row_tiles)
        self._leading = (problem.lda, problem.ldb)
        self._scale_strides = (problem.scale_a_strides, problem.scale_b_strides)
        self._launcher = jit.prepare(
            problem.target,
            "mma_decode",
            "mma_decode",
            {
                "FP8_A": FORMAT[problem.a],
                "FP8_B": FORMAT[problem.b],
                "FP8_OUT": TYPE[problem.out],
                "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
                "FP8_BLOCKED": int(problem.scale_a == "group"),
                "FP8_B_BLOCK": int(problem.scale_b == "block"),
                "FP8_SIDE": side,
                "FP8_TILES": wide,
                "FP8_WARPS": count,
            },
            SIGNATURE,
            block=count * problem.target.warp,
            shared_bytes=4 * count * side * (CHANNELS * wide + 4),
            programmatic=True,
        )

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        _out_scale: int,
        _amax: int,
        _scratch: int,
    ) -> None:
        """Launch; `SCALED_MM`'s parameters."""
        lda, ldb = self._leading
        across, along = self._scale_strides
        self._launcher(stream, self._grid, a, lda, b, ldb, scale_a, *across, scale_b, *along, bias, out, *self._shape)


def plan_mma_decode(problem: ScaledMm) -> MmaDecode:
    """Return the launch of the row "mma_decode"."""
    return MmaDecode(problem)


FP8_MMA: Final = Requirement(
    lambda p: p.target.arch == 89 or p.target.arch >= 120,
    "needs FP8 mma.sync in hardware (sm_89, sm_120 and later), got {p.target}",
)
A_GRID: Final = Requirement(
    lambda p: p.n < 1 << 30 and ceil_div(p.m, MOST_ROWS) * ceil_div(p.n, CHANNELS) < 1 << 31,
    "has a block for 64 x 16 results and a grid of less than 2**31 of them, got m={p.m} and n={p.n}",
)

MMA_ROWS: Final[tuple[Kernel, ...]] = (
    Kernel(
        "mma_decode",
        (
            platform("cuda"),
            FP8_MMA,
            OCP_FORMATS,
            DECODE_SCALES,
            WIDE_RESULT,
            aligned(16),
            STEPS_OF_16,
            WHOLE_WORDS,
            A_GRID,
        ),
        plan_mma_decode,
        (FEW_ROWS,),
    ),
)
"""The rows of `scaled_mm` for GPUs with FP8 mma.sync."""
