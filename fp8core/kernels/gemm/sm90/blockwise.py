"""Block-scaled products of many rows: ``cuda_src/gemm/sm90/blockwise.cu`` (experiments/2026-11-block-scaled)."""

from functools import cache
from itertools import product
from typing import Final, NamedTuple

from fp8core.kernels.encodings import FORMAT, TYPE, ceil_div
from fp8core.kernels.gemm.args import Matmul, ready_kernel
from fp8core.kernels.gemm.requirements import (
    BLOCK_SCALES,
    FLOAT32_SCALES,
    OCP_FORMATS,
    STRIDES_OF_16,
    WHOLE_WORDS,
    WIDE_RESULT,
)
from fp8core.kernels.gemm.sm90.decode import SCALE_ROWS, CommonArgs, Sm90Args
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K
from fp8core.kernels.gemm.sm90.tensor_maps import tensor_maps
from fp8core.kernels.requirements import CUDA, aligned, supports
from fp8core.problem import BLOCK, ScaledMm, Target
from fp8core.runtime import jit
from fp8core.table import Kernel, Requirement


class BlockTile(NamedTuple):
    """A tile of the result, which a multiprocessor has at a time."""

    m_slices: int
    """Of 64 rows, for each of the two consumer warpgroups."""
    columns: int
    """Channels."""

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 2 * 64 * self.m_slices

    @property
    def stage_bytes(self) -> int:
        """Bytes of a k-block of both operands."""
        return (self.rows + self.columns) * BLOCK_K

    def tiles(self, m: int, n: int) -> int:
        """Return the tiles of a result."""
        return ceil_div(m, self.rows) * ceil_div(n, self.columns)

    def waves(self, m: int, n: int, target: Target) -> int:
        """Return how many tiles the busiest multiprocessor has."""
        return ceil_div(self.tiles(m, n), target.multiprocessors)

    def occupancy(self, m: int, n: int, target: Target) -> float:
        """Return the part of the waves' tiles that the result fills."""
        return m * n / (self.waves(m, n, target) * target.multiprocessors * self.rows * self.columns)

    def us(self, m: int, n: int, k: int, target: Target) -> float:
        """Return the time of a product that the memory does not hold up."""
        channel = CHANNEL_US if BLOCK % self.columns == 0 else CHANNEL_US + SEAM_US
        k_block = self.m_slices * (SLICE_US + channel * self.columns)
        return self.waves(m, n, target) * (ceil_div(k, BLOCK_K) * k_block + TILE_US)


SLICE_US: Final = 0.0775
CHANNEL_US: Final = 0.00269
SEAM_US: Final = 0.00022
TILE_US: Final = 3.5
"""Of a slice of a k-block, each channel in it, each where a tile may have two scales of the weight, and of a tile:
fitted to a sweep over 18 products on an H200 (experiments/2026-11-block-scaled)."""

TILES: Final = tuple(BlockTile(*sizes) for sizes in product((1, 2), (128, 96, 64, 48, 32)))
"""What kernels are compiled for; of equals the first is taken."""


@cache
def fastest(m: int, n: int, k: int, target: Target) -> BlockTile:
    """Return the tile that takes the least time."""
    return min(TILES, key=lambda tile: tile.us(m, n, k, target))


def stages(tile: BlockTile, scale_rows: int, target: Target) -> int:
    """Return how many k-blocks fit into a block; ``scale_rows`` channels share a scale of the weight."""
    scales = tile.rows + (tile.columns if scale_rows == 1 else 2)
    return (target.shared_bytes - 1024 - 128) // (tile.stage_bytes + 4 * scales + 16)


def blockwise(problem: ScaledMm, tile: BlockTile | None = None) -> Matmul:
    """Return one launch for any number of rows: ``round(sum of scale_a * scale_b * acc over k-blocks + bias)``."""
    tile = tile or fastest(problem.m, problem.n, problem.k, problem.target)
    scale_rows = SCALE_ROWS[problem.scale_b]
    depth = stages(tile, scale_rows, problem.target)
    launcher = jit.prepare(
        problem.target,
        "gemm/sm90/blockwise",
        "sm90_blockwise",
        {
            "FP8_M_SLICES": tile.m_slices,
            "FP8_COLUMNS": tile.columns,
            "FP8_STAGES": depth,
            "FP8_A_TYPE": FORMAT[problem.a],
            "FP8_B_TYPE": FORMAT[problem.b],
            "FP8_SCALE_ROWS": scale_rows,
            "FP8_OUT": TYPE[problem.out],
            "FP8_BIAS": TYPE[problem.bias] if problem.bias else -1,
        },
        Sm90Args,
        block=384,
        shared_bytes=depth * tile.stage_bytes + 1024,
        programmatic=True,
    )
    grid = (min(tile.tiles(problem.m, problem.n), problem.target.multiprocessors), 1, 1)
    launch = launcher.bind_args(grid, Sm90Args(b"", b"", CommonArgs.of(problem)))
    weight_maps = tensor_maps(problem.n, problem.k, problem.ldb, tile.columns)
    a_maps = tensor_maps(problem.m, problem.k, problem.lda, tile.rows)
    return ready_kernel(launch, a_maps=a_maps, b_maps=weight_maps)


def plan_blockwise(problem: ScaledMm) -> Matmul:
    """Return the launch of the row "sm90_blockwise"."""
    return blockwise(problem)


MANY_ROWS: Final = 512
ONE_WAVE_ROWS: Final = 128
DEEPEST_K: Final = 8192
ONE_WAVE_K: Final = 4096
FILLED: Final = 0.9


def _pays(p: ScaledMm) -> bool:
    """Return whether the library was measured at most a few per cent faster (experiments/2026-11-block-scaled)."""
    tile = fastest(p.m, p.n, p.k, p.target)
    if p.m >= MANY_ROWS:
        return p.k <= DEEPEST_K and tile.occupancy(p.m, p.n, p.target) >= FILLED
    return tile.waves(p.m, p.n, p.target) == 1 and p.k <= (DEEPEST_K if p.m <= ONE_WAVE_ROWS else ONE_WAVE_K)


PAYS: Final = Requirement(
    _pays,
    f"measured slower than cuBLASLt here (preferred for one wave of tiles, k <= {DEEPEST_K} at m <= {ONE_WAVE_ROWS},"
    f" k <= {ONE_WAVE_K} above; or m >= {MANY_ROWS}, k <= {DEEPEST_K} and >= {FILLED:.0%} wave occupancy);"
    " got m={p.m} n={p.n} k={p.k}",
)
ANY_ORDER: Final = Requirement(
    lambda p: not p.batch_invariant,
    "not batch-invariant: accumulates k in a different order from sm90_decode, which serves m <= 64",
)

SM90_BLOCKWISE: Final = Kernel(
    "sm90_blockwise",
    (
        CUDA,
        supports("wgmma"),
        BLOCK_SCALES,
        ANY_ORDER,
        OCP_FORMATS,
        FLOAT32_SCALES,
        WIDE_RESULT,
        aligned(16),
        STRIDES_OF_16,
        WHOLE_WORDS,
    ),
    plan_blockwise,
    (PAYS,),
)
"""The row of `scaled_mm` for blocked scales on Hopper."""
