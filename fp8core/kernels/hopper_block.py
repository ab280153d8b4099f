"""Products with blocked scales of many rows on sm_90a (``cuda_src/hopper_block_mm.cu``, docs/block_scaled.md)."""

from functools import cache
from itertools import product
from typing import Final, NamedTuple

from fp8core.kernels.hopper import (
    OCP_FORMATS,
    SIGNATURE,
    STRIDES_OF_16,
    TENSOR_CORE_TYPES,
    WHOLE_WORDS,
    WIDE_RESULT,
    MappedMm,
    TensorMaps,
)
from fp8core.kernels.hopper_layout import CHUNK
from fp8core.kernels.requirements import aligned, arch, platform
from fp8core.kernels.words import TYPE, ceil_div
from fp8core.problem import ScaledMm, Target
from fp8core.runtime import jit
from fp8core.table import Kernel, Requirement


class BlockLayout(NamedTuple):
    """A tile of the result, which a multiprocessor has at a time."""

    waves: int
    """Of 64 rows, for each of the two groups of threads that multiply."""
    columns: int
    """Channels."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 2 * 64 * self.waves

    @property
    def stage_bytes(self) -> int:
        """Bytes of a chunk of both operands."""
        return (self.rows + self.columns) * CHUNK

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of a result."""
        return ceil_div(m, self.rows) * ceil_div(n, self.columns)

    def turns(self, m: int, n: int, target: Target) -> int:
        """Return how many tiles the busiest multiprocessor has."""
        return ceil_div(self.tiles(m, n), target.multiprocessors)

    def us(self, m: int, n: int, k: int, target: Target) -> float:
        """Return the time of a product that the memory does not hold up."""
        channel = CHANNEL_US if 128 % self.columns == 0 else CHANNEL_US + SEAM_US
        chunk = self.waves * (WAVE_US + channel * self.columns)
        return self.turns(m, n, target) * (ceil_div(k, CHUNK) * chunk + TILE_US)


WAVE_US: Final = 0.0775
CHANNEL_US: Final = 0.00269
SEAM_US: Final = 0.00022
TILE_US: Final = 3.5
"""Of a wave of a chunk, of each channel in it, of each where a tile may have two scales of the weight, and of a tile:
fitted to a sweep over 18 products on an H200 (docs/block_scaled.md)."""

LAYOUTS: Final = tuple(BlockLayout(*ways) for ways in product((1, 2), (128, 96, 64, 48, 32)))
"""What kernels are compiled for; of equals the first is taken."""


@cache
def layout(m: int, n: int, k: int, target: Target) -> BlockLayout:
    """Return the layout that takes the least time."""
    return min(LAYOUTS, key=lambda plan: plan.us(m, n, k, target))


def stages(plan: BlockLayout, scale_rows: int, target: Target) -> int:
    """Return how many chunks fit into a block; ``scale_rows`` channels share a scale of the weight."""
    scales = plan.rows + (plan.columns if scale_rows == 1 else 2)
    return (target.shared_bytes - 1024 - 128) // (plan.stage_bytes + 4 * scales + 16)


class BlockMm(MappedMm):
    """One launch for any number of rows: ``round(sum of scale_a * scale_b * acc over chunks of k + bias)``."""

    def __init__(self, problem: ScaledMm, plan: BlockLayout | None = None) -> None:
        plan = plan or layout(problem.m, problem.n, problem.k, problem.target)
        scale_rows = 128 if problem.scale_b == "block" else 1
        depth = stages(plan, scale_rows, problem.target)
        self._weight_maps = TensorMaps(problem.n, problem.k, problem.ldb, plan.columns)
        self._a_maps = TensorMaps(problem.m, problem.k, problem.lda, plan.rows)
        launcher = jit.prepare(
            problem.target,
            "hopper_block_mm",
            "hopper_block_mm",
            {
                "WAVES": plan.waves,
                "COLUMNS": plan.columns,
                "STAGES": depth,
                "A_TYPE": TENSOR_CORE_TYPES[problem.a],
                "B_TYPE": TENSOR_CORE_TYPES[problem.b],
                "SCALE_ROWS": scale_rows,
                "OUT": TYPE[problem.out],
                "BIAS": TYPE[problem.bias] if problem.bias else -1,
            },
            SIGNATURE,
            block=384,
            shared_bytes=depth * plan.stage_bytes + 1024,
            programmatic=True,
        )
        grid = (min(plan.tiles(problem.m, problem.n), problem.target.multiprocessors), 1, 1)
        strides = (*problem.scale_a_strides, *problem.scale_b_strides)
        shape = (problem.ldo, problem.m, problem.n, ceil_div(problem.k, CHUNK))
        self._launch = launcher.bind(grid, *strides, *shape, int(problem.prefetch_weight))


def plan_block(problem: ScaledMm) -> BlockMm:
    """Return the launch of the row "hopper_block_mm"."""
    return BlockMm(problem)


FEW_ROWS: Final = 128
MANY_ROWS: Final = 512
FILLED: Final = 0.9
"""The part of the tiles' places, in all turns, that the result has to need."""


def _pays(p: ScaledMm) -> bool:
    """Return whether the library was not measured to be more than a few per cent faster (docs/block_scaled.md)."""
    plan = layout(p.m, p.n, p.k, p.target)
    turns = plan.turns(p.m, p.n, p.target)
    filled = p.m * p.n / (turns * p.target.multiprocessors * plan.rows * plan.columns)
    if p.m >= MANY_ROWS:
        return p.k <= 8192 and filled >= FILLED
    return turns == 1 and p.k <= (8192 if p.m <= FEW_ROWS else 4096)


PAYS: Final = Requirement(
    _pays,
    f"measured slower than cuBLASLt here: preferred for one wave of tiles with k <= 8192 at m <= {FEW_ROWS}, k <= 4096"
    f" above, or m >= {MANY_ROWS}, k <= 8192 and {FILLED:.0%} of the waves' tiles; got m={{p.m}} n={{p.n}} k={{p.k}}",
)
BLOCKED: Final = Requirement(
    lambda p: p.scale_a == "group" and p.scale_b in ("group", "block"),
    "takes scales of 1x128 with 1x128 or 128x128, got scale_a per {p.scale_a} and scale_b per {p.scale_b}",
)
ANY_ORDER: Final = Requirement(
    lambda p: not p.batch_invariant,
    "not batch-invariant: accumulates k in a different order from hopper_decode, which serves m <= 64",
)

BLOCK_ROWS: Final[tuple[Kernel, ...]] = (
    Kernel(
        "hopper_block_mm",
        (
            platform("cuda"),
            arch(90),
            BLOCKED,
            ANY_ORDER,
            OCP_FORMATS,
            WIDE_RESULT,
            aligned(16),
            STRIDES_OF_16,
            WHOLE_WORDS,
        ),
        plan_block,
        (PAYS,),
    ),
)
"""The rows of `scaled_mm` that are Hopper's own for blocked scales."""
