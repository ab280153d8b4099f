"""Products of few rows on AMD's FP8 matrix cores: the weight streamed past the cache (``hip_src/skinny.hip``).

Compiled and emulated, never run on an AMD GPU: the constants that only speed depends on are estimates.
"""

from typing import Final

from fp8core.kernels.requirements import AMD_FORMATS, AMD_TENSOR_CORES, NOT_BOTH_E5M2, aligned, platform
from fp8core.kernels.words import FORMAT, RESULT, TYPE, ceil_div, power_of_two
from fp8core.problem import WIDE, ScaledMm, Target
from fp8core.runtime import jit
from fp8core.table import Kernel, Requirement

SIDE: Final = 16
"""Tokens, and channels, of a block."""
UNROLL: Final = 4
"""Loads of 16 bytes of the weight that a lane has in flight."""
WAVES: Final = (4, 8, 16)
WAVES_IN_FLIGHT: Final = 16
"""Waves of a multiprocessor that keep its share of the memory busy: 64 KiB on gfx9, where latency asks for about 17."""

SIGNATURE: Final = "PqPqPqPqPPqiiii"
"""a, lda, b, ldb, scale_a and its stride, scale_b and its stride, bias, out, ldo, m, n, k, row_tiles."""


def waves(n: int, k: int, target: Target) -> int:
    """Return among how many waves a block divides ``k``: not a question of m, so that neither are a row's bits."""
    chunks = ceil_div(k, UNROLL * target.warp)
    wanted = WAVES_IN_FLIGHT * target.multiprocessors
    enough = next((count for count in WAVES if ceil_div(n, SIDE) * count >= wanted), WAVES[-1])
    return min(enough, power_of_two(chunks))


class SkinnyMm:
    """``round(scale_a * (scale_b * acc) + bias)``, the weight read once for every 16 rows, in one launch."""

    scratch_bytes = 0

    def __init__(self, problem: ScaledMm) -> None:
        count = waves(problem.n, problem.k, problem.target)
        self._row_tiles = ceil_div(problem.m, SIDE)
        self._grid = (self._row_tiles * ceil_div(problem.n, SIDE), 1, 1)
        self._shape = (problem.ldo, problem.m, problem.n, problem.k, self._row_tiles)
        self._leading = (problem.lda, problem.ldb)
        self._scale_strides = (problem.scale_a_strides[0], problem.scale_b_strides[0])
        self._launcher = jit.prepare(
            problem.target,
            "skinny",
            "skinny",
            {
                "FP8_A": FORMAT[problem.a],
                "FP8_B": FORMAT[problem.b],
                "FP8_OUT": RESULT[problem.out],
                "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
                "FP8_WAVES": count,
                "FP8_UNROLL": UNROLL,
            },
            SIGNATURE,
            block=count * problem.target.warp,
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
        self._launcher(stream, self._grid, a, lda, b, ldb, scale_a, across, scale_b, along, bias, out, *self._shape)


def plan_skinny(problem: ScaledMm) -> SkinnyMm:
    """Return the launch of the row "skinny"."""
    return SkinnyMm(problem)


FEW_ROWS: Final = Requirement(
    lambda p: p.m <= SIDE or p.batch_invariant,
    f"estimated slower for more rows, as it reads the weight once for every {SIDE}: preferred for m <= {SIDE}"
    " or batch_invariant; got m={p.m}",
)
SCALES_BEHIND: Final = Requirement(
    lambda p: p.scale_a in ("tensor", "row") and p.scale_b in ("tensor", "row"),
    "takes scales per tensor or row in any mix, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
WIDE_RESULT: Final = Requirement(
    lambda p: p.out in WIDE and not p.out_scale and not p.amax,
    "gives float32, float16 or bfloat16 without out_scale and amax, got {p.out}",
)
STEPS_OF_16: Final = Requirement(
    lambda p: 0 < p.k < 1 << 30 and p.k % 16 == 0 and p.lda % 16 == 0 and p.ldb % 16 == 0,
    "needs k (from 16 to 2**30), lda and ldb that are multiples of 16, got k={p.k} lda={p.lda} ldb={p.ldb}",
)
A_GRID: Final = Requirement(
    lambda p: ceil_div(p.m, SIDE) * ceil_div(p.n, SIDE) < 1 << 31,
    "has a block for 16 x 16 results and a grid of less than 2**31 of them, got m={p.m} and n={p.n}",
)

SKINNY_ROWS: Final[tuple[Kernel, ...]] = (
    Kernel(
        "skinny",
        (
            platform("hip"),
            AMD_TENSOR_CORES,
            AMD_FORMATS,
            NOT_BOTH_E5M2,
            SCALES_BEHIND,
            WIDE_RESULT,
            aligned(16),
            STEPS_OF_16,
            A_GRID,
        ),
        plan_skinny,
        (FEW_ROWS,),
    ),
)
"""The rows of `scaled_mm` that are AMD's own."""
