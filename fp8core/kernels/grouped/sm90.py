"""Grouped products on sm_90a, by the tiles of sm90_tiled: ``cuda_src/gemm/sm90/grouped.cu``."""

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div, round_up
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.requirements import (
    CODES_AT_16,
    COUNTABLE,
    FLOAT32_SCALES,
    MIXED_SCALES,
    OCP_FORMATS,
    STRIDES_OF_16,
    WHOLE_ELEMENTS,
    WHOLE_WORDS,
    of_product,
)
from fp8core.kernels.gemm.scales import in_groups
from fp8core.kernels.gemm.sm90 import tiled_cost
from fp8core.kernels.gemm.sm90.decode import CommonArgs
from fp8core.kernels.gemm.sm90.tiled import Layout, constants, loads_scale_tiles, maps_of
from fp8core.kernels.gemm.sm90.tiled_cost import Tile
from fp8core.kernels.grouped.args import GroupArgs, GroupedLaunch, capacity, most_row_tiles, table_bytes
from fp8core.kernels.grouped.requirements import FEW_GROUPS, WEIGHTS_FOLLOW
from fp8core.kernels.requirements import CUDA, supports
from fp8core.problem import GroupedMm, ScaledMm
from fp8core.runtime import jit
from fp8core.runtime.args import TensorMap
from fp8core.table import Kernel, Requirement


class GroupedArgs(NamedTuple):
    """The arguments of sm90_grouped."""

    weight_map: TensorMap
    a_map: TensorMap
    out_map: TensorMap
    scale_map: TensorMap
    common: CommonArgs
    group: GroupArgs


STEPS: Final = 16
"""Numbers of rows for which the tiles of a group are counted."""
WARPGROUPS: Final = {1: 1.3, 2: 1.0, 3: 0.94}
"""Factors on the time of tiles by their consumer warpgroups, of which a single one multiplies and stores by turns:
those by which the chosen tiles were the fastest on an H200 (experiments/2026-11-grouped-192-rows)."""

LAST: Final = 0.25
"""Part of a tile's time for which a multiprocessor has nothing more to load, on average, while others have their last
tile: fitted to 76 products and judged by 92 others (experiments/2026-11-grouped-choice)."""


def tiles_of_group(average: float, rows: int) -> float:
    """Return how many tiles of ``rows`` rows a group has on average, if rows fall into groups at random.

    Their numbers then have a variance as large as their average; numbers at equal distances stand for them.
    """
    reach = math.sqrt(3 * average)
    numbers = (average + reach * ((2 * step + 1) / STEPS - 1) for step in range(STEPS))
    return sum(max(1, math.ceil(number / rows)) for number in numbers) / STEPS


def us(p: GroupedMm, tile: Tile) -> float:
    """Return the estimated microseconds of a tile if rows fall into groups at random, all equally likely.

    The multiprocessors take as long as for a product with as many whole tiles; the memory reads every weight that is
    used, and takes the longer, the fewer tiles a multiprocessor has.
    """
    one, average = p.product, p.product.m / max(1, p.groups)
    used = p.groups * (1 - math.exp(-average))
    tiles = max(1.0, used * tiles_of_group(one.m / max(used, 1.0), tile.rows))
    busy = tiled_cost.us(one._replace(m=round(tiles * tile.rows)), tile) - tiled_cost.START_US
    memory = (used * one.n * one.k + one.m * (one.k + ITEMSIZE[one.out] * one.n)) / tiled_cost.BYTES_A_US
    memory *= 1 + LAST * one.target.multiprocessors / max(1, tiles * ceil_div(one.n, tile.columns))
    busy *= WARPGROUPS[tile.groups]
    return tiled_cost.START_US + overlapped_us(tiled_cost.OVERLAP, memory, busy)


def leaves_registers(one: ScaledMm, tile: Tile) -> bool:
    """Return whether a tile that a product without groups can have leaves registers for the groups, too."""
    scales, full = tiled_cost.scales_of(one), one.out == "float32"
    if (tile.rows, tile.columns) == (192, 128):
        return scales == "chain" or (loads_scale_tiles(one) if scales == "block" else not full)
    two_sets = tile.rows == 128 and tile.columns in (96, 128)
    return not (two_sets and scales == "block" and full and one.bias)


FOR_EVEN_WAVES: Final = 80, 112
"""Channels of tiles that gain where they divide evenly among the multiprocessors (experiments/2026-11-even-waves). How
many tiles groups have is only known on the device, so these are no candidates."""


def candidates(p: GroupedMm) -> tuple[Tile, ...]:
    """Return the tiles that a block makes alone and whole, with one slice for a warpgroup, which it can skip."""
    return tuple(
        tile
        for tile in tiled_cost.tiles(p.product)
        if tile.cluster == tile.m_slices == 1
        and not tile.pingpong
        and tile.columns not in FOR_EVEN_WAVES
        and leaves_registers(p.product, tile)
    )


@lru_cache(8192)
def by_cost(p: GroupedMm) -> tuple[Tile, ...]:
    """Return the candidates, the fastest by estimate first."""
    return tuple(sorted(candidates(p), key=lambda tile: us(p, tile)))


LONG_K: Final = 8192
"""From so many columns of k on, blocks that share a gain more than they lose by waiting for each other: 8 to 14 % at
14336, at 4096 from 5 % of gain to 8 % of loss, as the ends of groups fall (experiments/2026-11-grouped)."""


def shares_a(p: GroupedMm, tile: Tile) -> bool:
    """Return whether pairs of blocks multicast the rows of a to each other, for tiles side by side.

    Tiles at the edges of groups take less time than others, so that blocks do not read the same rows at the same time;
    the longer k is, the farther apart they are, and the more L2 has to read for them. Sharing
    gains where most groups fill a tile of 128 rows.
    """
    one = p.product
    filled = one.m > p.groups * 128
    return tile.groups > 1 and one.k >= LONG_K and filled and ceil_div(one.n, tile.columns) % 2 == 0


def plan_grouped(p: GroupedMm, tile: Tile | None = None) -> GroupedLaunch:
    """Return one launch for groups of any sizes: ``round(scale_a * (scale_b[i] * acc) + bias[i])``."""
    p = p._replace(product=in_groups(p.product))
    one, tile = p.product, tile or by_cost(p)[0]
    if shares_a(p, tile):
        tile = tile._replace(cluster=2)
    layout, scale_tiles = Layout.of(one, tile, table_bytes(p)), loads_scale_tiles(one)
    tiles, multiprocessors = most_row_tiles(p, tile.rows) * ceil_div(one.n, tile.columns), one.target.multiprocessors
    cluster = 2 if tiles > multiprocessors else tile.cluster  # neighbours, as in `tiled.launch_cluster`
    launcher = jit.prepare(
        one.target,
        "gemm/sm90/grouped",
        "sm90_grouped",
        constants(one, tile, layout, scale_tiles=scale_tiles, group_table=capacity(p)),
        GroupedArgs,
        block=128 * (1 + tile.groups),
        shared_bytes=layout.dynamic_bytes,
        programmatic=True,
        cluster=cluster,
    )
    blocks = min(round_up(tiles, cluster), max(1, multiprocessors // cluster) * cluster)
    numbers = GroupedArgs(b"", b"", b"", b"", CommonArgs.of(one), GroupArgs.of(p))
    multiply = launcher.bind_args((blocks, 1, 1), numbers)
    maps = maps_of(one, tile, layout, weight_rows=p.groups * one.n, scale_tiles=scale_tiles, shares_a=True)
    weight_maps, a_maps, out_maps, scale_maps = maps

    def launch(stream: int, a: int, weight: int, scale_a: int, scale_b: int, bias: int, offs: int, out: int, /) -> None:
        scale_map = scale_maps[scale_a if scale_tiles else 0]
        multiply(stream, weight_maps[weight], a_maps[a], out_maps[out], scale_map, scale_a, scale_b, bias, out, offs)

    return launch


WEIGHT_ROWS: Final = Requirement(
    lambda p: p.groups * p.product.n < 1 << 31 and most_row_tiles(p, 64) * ceil_div(p.product.n, 32) < 1 << 31,
    "counts rows of all weights, and tiles, in 32 bits, got {p.groups} groups of n={p.product.n} with m={p.product.m}",
)
SM90_GROUPED: Final = Kernel(
    "sm90_grouped",
    (
        CUDA,
        supports("wgmma"),
        *map(
            of_product,
            (
                OCP_FORMATS,
                MIXED_SCALES,
                FLOAT32_SCALES,
                CODES_AT_16,
                STRIDES_OF_16,
                COUNTABLE,
                WHOLE_ELEMENTS,
                WHOLE_WORDS,
            ),
        ),
        FEW_GROUPS,
        WEIGHTS_FOLLOW,
        WEIGHT_ROWS,
    ),
    plan_grouped,
)
"""The row of `grouped_scaled_mm_nt` on Hopper."""
