"""The choice of a tile of sm90_tiled: by the formula of `tiled_cost`, corrected by trees on GPUs that were measured."""

import math
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K
from fp8core.kernels.gemm.sm90.tiled_cost import LOADED_ROWS, PIECE, Tile, candidates, split_us, unsplit, us
from fp8core.problem import ScaledMm

KERNEL: Final = "sm90_tiled"
"""The name of the trees of this kernel."""


class Features(NamedTuple):
    """The features of a product and a tile by which the estimate is corrected; large sizes as logarithms.

    "busiest" features are those of the multiprocessor with the most tiles; "crossing" counts rows that cross cache
    lines, as 128 does not divide k; "odd" counts results that TMA does not store.
    """

    m: float
    n: float
    k: float
    scales: float
    rows: float
    columns: float
    cluster: float
    pingpong: float
    share: float
    idle: float
    fullness: float
    tiles_along_m: float
    tiles_along_n: float
    row_padding: float
    channel_padding: float
    k_padding: float
    moved: float
    operands: float
    k_rest: float
    k_alignment: float
    result_alignment: float
    estimate: float
    memory_rate: float
    product_rate: float
    load_rate: float
    result_rate: float
    weight_rate: float
    results: float
    busiest: float
    busiest_rate: float
    busiest_load_rate: float
    crossing_rate: float
    odd_rate: float


def features(p: ScaledMm, tile: Tile, estimate: float) -> Features:
    """Return the features of a product and a tile; rates are divided by the estimated time."""
    along_m, along_n = ceil_div(p.m, tile.rows * tile.cluster) * tile.cluster, ceil_div(p.n, tile.columns)
    share = along_m * along_n / p.target.multiprocessors
    log, k_blocks = math.log, ceil_div(p.k, BLOCK_K)
    moved = p.m * p.k + p.n * p.k + 2 * p.m * p.n
    loaded = along_m * along_n * k_blocks * (tile.columns / tile.cluster + min(tile.rows, p.m))
    rows = tile.columns / tile.cluster + min(tile.rows, ceil_div(p.m, LOADED_ROWS) * LOADED_ROWS)
    waves, results = math.ceil(share), tile.rows * tile.columns
    result_alignment = math.gcd(p.ldo * ITEMSIZE[p.out], PIECE)
    return Features(
        m=log(p.m),
        n=log(p.n),
        k=log(p.k),
        scales=2 if is_along_k(p) else "row" in (p.scale_a, p.scale_b),
        rows=tile.rows,
        columns=tile.columns,
        cluster=tile.cluster,
        pingpong=tile.pingpong,
        share=share,
        idle=waves - share,
        fullness=share / waves,
        tiles_along_m=along_m,
        tiles_along_n=along_n,
        row_padding=along_m * tile.rows / p.m,
        channel_padding=along_n * tile.columns / p.n,
        k_padding=k_blocks * BLOCK_K / p.k,
        moved=log(moved),
        operands=log((p.m + p.n) * p.k),
        k_rest=p.k % BLOCK_K,
        k_alignment=math.gcd(p.k, BLOCK_K).bit_length(),
        result_alignment=result_alignment.bit_length(),
        estimate=log(estimate),
        memory_rate=log(moved / estimate),
        product_rate=log(p.m * p.n * p.k / estimate),
        load_rate=log(loaded / estimate),
        result_rate=log(p.m * p.n / estimate),
        weight_rate=log(p.n * p.k / estimate),
        results=results,
        busiest=log(waves * k_blocks),
        busiest_rate=log(waves * k_blocks * results / estimate),
        busiest_load_rate=log(waves * k_blocks * rows / estimate),
        crossing_rate=log(along_m * along_n * k_blocks * rows / estimate) if p.k % BLOCK_K else 0,
        odd_rate=log(waves * results / estimate) if result_alignment < PIECE else 0,
    )


def corrected_us(problem: ScaledMm, tile: Tile, gpu: str) -> float:
    """Return the estimate of a tile, corrected by the measurements on a model of GPU: with a split k, of `unsplit`."""
    if tile.split_k > 1:
        return split_us(problem, tile, corrected_us(unsplit(problem, tile), tile._replace(split_k=1), gpu))
    estimate = us(problem, tile)
    return estimate * corrections.factor(KERNEL, features(problem, tile, estimate), Features._fields, gpu)


NEAR: Final = 1.2
"""Only estimates up to this factor of the least one are corrected: beyond it no tile was found to be the fastest."""


@lru_cache(8192)
def by_formula(problem: ScaledMm) -> tuple[tuple[float, Tile], ...]:
    """Return the tiles that a product can have, with their estimates by the formula alone, the fastest first."""
    return tuple(sorted(((us(problem, tile), tile) for tile in candidates(problem)), key=lambda one: one[0]))


@lru_cache(8192)
def ranking(problem: ScaledMm) -> tuple[tuple[float, Tile], ...]:
    """Return the same with corrected estimates, for those that are `NEAR` the least."""
    found = by_formula(problem)
    gpu = corrections.gpu_of(problem.target)
    if gpu is not None and problem.m and problem.n and problem.k:
        most = NEAR * found[0][0]
        near = [(corrected_us(problem, tile, gpu), tile) for estimate, tile in found if estimate <= most]
        found = (*sorted(near, key=lambda one: one[0]), *found[len(near) :])
    return found


def by_cost(problem: ScaledMm) -> tuple[Tile, ...]:
    """Return the tiles that a product can have, the fastest first."""
    return tuple(tile for _, tile in ranking(problem))


def formula_us(problem: ScaledMm) -> float:
    """Return the estimate of the fastest tile by the formula alone."""
    return by_formula(problem)[0][0]


def least_us(problem: ScaledMm) -> float:
    """Return the corrected estimate of the fastest tile."""
    return ranking(problem)[0][0]


def fastest(problem: ScaledMm) -> Tile:
    """Return the tile of the least corrected estimate."""
    return ranking(problem)[0][1]
