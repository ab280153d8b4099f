"""The fallback: grouped products of any shape, address, stride, format and mix of scales, on any GPU."""

from typing import Final, NamedTuple

from fp8core import host
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.args import MatmulArgs
from fp8core.kernels.gemm.generic import Tile, tile_bytes, tile_constants, tiles_of
from fp8core.kernels.gemm.requirements import ANY_OPERANDS, COUNTABLE, grid_fits, of_product
from fp8core.kernels.grouped.args import GroupArgs, GroupedLaunch, capacity, most_row_tiles
from fp8core.kernels.grouped.requirements import FEW_GROUPS
from fp8core.kernels.requirements import ON_A_GPU, ON_THE_HOST
from fp8core.problem import GroupedMm
from fp8core.runtime import jit
from fp8core.table import Kernel


class GenericGroupedArgs(NamedTuple):
    """The arguments of generic_grouped."""

    matmul: MatmulArgs
    group: GroupArgs


def tile(p: GroupedMm) -> Tile:
    """Return the large tile if groups have as many rows on average, otherwise the small one."""
    large, *smaller = tiles_of(p.product)
    return large if not smaller or p.product.m >= p.groups * large.rows else smaller[-1]


def grid(p: GroupedMm) -> tuple[int, int]:
    """Return the blocks of a launch, one for each tile that there can be, and the threads of each."""
    shape = tile(p)
    return most_row_tiles(p, shape.rows) * ceil_div(p.product.n, shape.cols), shape.warps() * p.product.target.warp


def plan_generic(p: GroupedMm) -> GroupedLaunch:
    """Return ``round(scale_a * (scale_b[i] * acc) + bias[i])`` for each group, by tiles in shared memory."""
    shape, (blocks, threads) = tile(p), grid(p)
    launcher = jit.prepare(
        p.product.target,
        "gemm/generic/grouped",
        "generic_grouped",
        {**tile_constants(p.product, shape), "FP8_GROUP_TABLE": capacity(p)},
        GenericGroupedArgs,
        block=threads,
        shared_bytes=tile_bytes(p.product, shape),
        programmatic=True,
    )
    multiply = launcher.bind_args((blocks, 1, 1), GenericGroupedArgs(MatmulArgs.of(p.product, 0), GroupArgs.of(p)))

    def launch(stream: int, a: int, weight: int, scale_a: int, scale_b: int, bias: int, offs: int, out: int, /) -> None:
        multiply(stream, a, weight, scale_a, scale_b, bias, out, offs)

    return launch


GENERIC_GROUPED: Final = Kernel(
    "generic_grouped",
    (ON_A_GPU, *map(of_product, (*ANY_OPERANDS, COUNTABLE)), FEW_GROUPS, grid_fits(grid)),
    plan_generic,
)
"""The row of `grouped_scaled_mm_nt` that multiplies anything on any GPU."""
HOST: Final = Kernel("host", (ON_THE_HOST, *map(of_product, ANY_OPERANDS)), host.plan_grouped_mm)
"""The row of `grouped_scaled_mm_nt` for NumPy arrays."""
