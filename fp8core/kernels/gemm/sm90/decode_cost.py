"""The estimated time of sm90_decode: constants fitted to an H200 by `python -m bench.fit_estimates`.

These estimates are comparable with those of other kernels. Those that choose a layout (`decode_channels_config`,
`decode_rows_config`) need not be.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import corrections
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, DecodeConfig, width
from fp8core.kernels.gemm.sm90.decode_rows_config import SMALL_BYTES
from fp8core.problem import ScaledMm

KERNEL: Final = "sm90_decode"
"""The name of this kernel's corrections."""
BYTES_A_US: Final = 4.625e6
"""Memory bandwidth, in bytes per microsecond."""
LINE_BYTES: Final = 128
"""Bytes of a cache line."""
UNALIGNED: Final = 0.09712
"""Fraction by which the memory takes longer if rows do not begin at multiples of `SECTOR` bytes."""
BUSY_UNALIGNED: Final = 0.3811
"""Fraction by which the multiprocessors take longer then."""
SECTORS: Final = 0.03907
"""Fraction by which both take longer if rows begin at multiples of `SECTOR`, but not of `LINE_BYTES`."""
SECTOR: Final = 32
"""Bytes that L2 reads together."""
ODD_RESULT_US: Final = 2.481e-6
"""Time of a product per result, if rows of the result do not begin at multiples of `PIECE` bytes."""
PIECE: Final = 16
"""Bytes that are stored together."""
OVERLAP: Final = 2.805
"""Exponent of the norm that combines the overlapping times (`overlapped_us`) of the memory and the multiprocessors."""


class Fitted(NamedTuple):
    """Microseconds of the parts of a product."""

    k_block: float
    """Time of a block per 64 channels of a k-block."""
    blockwise: float
    """Addition to `k_block` if scales change along k."""
    tile: float
    """Time of a block for the epilogue of a tile."""
    reduce: float
    """Time of a product per block and per warpgroup, beyond the first of each, that k is split over."""
    rest: float
    """Time of every product before and after it streams the weight."""


CHANNELS_FIRST: Final = {
    8: Fitted(0.0009222, 0.04781, 0.3295, 0.04442, 1.04),
    16: Fitted(0.06026, 0.02237, 0.2785, 0.0458, 1.19),
    32: Fitted(0.09627, 0.01694, 0.00167, 0.147, 1.4),
    64: Fitted(0.1334, 0.03381, 0.7591, 0.4885, 0.7552),
}
"""For tiles with channels on the M side of `wgmma`, by its N side."""
ROWS: Final = Fitted(0.1083, 0.004608, 0.01672, 0.1258, 2.145)
"""For tiles with rows on the M side."""
SMALL_ROWS: Final = Fitted(0.1536, 0.007364, 0.001028, 0.2024, 1.546)
"""The same for weights of fewer than `SMALL_BYTES`."""
FITTED: Final = ("BYTES_A_US", "UNALIGNED", "BUSY_UNALIGNED", "SECTORS", "ODD_RESULT_US", "OVERLAP")
"""The constants that `python -m bench.fit_estimates` fits beside `CHANNELS_FIRST`, `ROWS` and `SMALL_ROWS`."""


def launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimated microseconds of one launch."""
    odd = ODD_RESULT_US * p.m * p.n if p.ldo * ITEMSIZE[p.out] % PIECE else 0.0
    by_rows = SMALL_ROWS if p.n * p.k < SMALL_BYTES else ROWS
    fitted = by_rows if config.rows_first else CHANNELS_FIRST[width(p.m)]
    k_block = fitted.k_block + (fitted.blockwise if is_along_k(p) else 0.0)
    blocks = ceil_div(config.cluster * config.clusters, p.target.multiprocessors)
    busy = config.busiest_us(p.n, p.k, k_block * blocks * config.tile / 64, fitted.tile)
    memory = (p.n * p.k + p.m * p.k + ITEMSIZE[p.out] * p.m * p.n) / BYTES_A_US
    if p.ldb % SECTOR:
        memory, busy = memory * (1 + UNALIGNED), busy * (1 + BUSY_UNALIGNED)
    elif p.ldb % LINE_BYTES:
        memory, busy = memory * (1 + SECTORS), busy * (1 + SECTORS)
    others = config.split_k + config.k_warpgroups - 2
    return fitted.rest + odd + overlapped_us(OVERLAP, memory, busy) + fitted.reduce * others


class Features(NamedTuple):
    """The features of a product and its layout by which the estimate is corrected; large sizes as logarithms."""

    m: float
    n: float
    k: float
    scales: float
    side: float
    fill: float
    rows_first: float
    tile: float
    clusters: float
    split_k: float
    k_warpgroups: float
    blocks_a_multiprocessor: float
    multicast_tiles: float
    turns: float
    part: float
    share: float
    idle: float
    full: float
    uneven: float
    busiest: float
    channel_padding: float
    k_padding: float
    k_rest: float
    k_alignment: float
    result_alignment: float
    moved: float
    estimate: float
    memory_rate: float
    stream_rate: float
    product_rate: float
    result_rate: float
    weight_rate: float
    results: float
    odd_rate: float


def features(p: ScaledMm, config: DecodeConfig, estimate: float) -> Features:
    """Return the features of a product; rates are divided by the estimated time."""
    log, side, turns, part = math.log, width(p.m), config.turns(p.n), config.part(p.k)
    share = config.cluster * config.clusters / p.target.multiprocessors
    moved = p.m * p.k + p.n * p.k + 2 * p.m * p.n
    busiest = math.ceil(share) * turns * part * config.tile  # channels times k-blocks of the weight
    k_blocks, result_alignment = ceil_div(p.k, BLOCK_K), math.gcd(p.ldo * ITEMSIZE[p.out], PIECE)
    return Features(
        m=log(p.m),
        n=log(p.n),
        k=log(p.k),
        scales=2 if is_along_k(p) else "row" in (p.scale_a, p.scale_b),
        side=side,
        fill=p.m / side,
        rows_first=config.rows_first,
        tile=config.tile,
        clusters=config.clusters,
        split_k=config.split_k,
        k_warpgroups=config.k_warpgroups,
        blocks_a_multiprocessor=config.ctas_per_sm,
        multicast_tiles=config.multicast_tiles,
        turns=turns,
        part=part,
        share=share,
        idle=math.ceil(share) - share,
        full=ceil_div(p.n, config.tile * config.multicast_tiles) / (turns * config.clusters),
        uneven=busiest * p.target.multiprocessors / (p.n * k_blocks),
        busiest=log(busiest),
        channel_padding=ceil_div(p.n, config.tile) * config.tile / p.n,
        k_padding=part * config.split_k / k_blocks,
        k_rest=p.k % BLOCK_K,
        k_alignment=math.gcd(p.k, LINE_BYTES).bit_length(),
        result_alignment=result_alignment.bit_length(),
        moved=log(moved),
        estimate=log(estimate),
        memory_rate=log(moved / estimate),
        stream_rate=log(busiest / estimate),
        product_rate=log(p.m * p.n * p.k / estimate),
        result_rate=log(p.m * p.n / estimate),
        weight_rate=log(p.n * p.k / estimate),
        results=log(p.m * p.n),
        odd_rate=log(p.m * p.n / estimate) if result_alignment < PIECE else 0,
    )


@lru_cache(8192)
def us(problem: ScaledMm, layout: Callable[[ScaledMm], DecodeConfig]) -> float:
    """Return the estimated microseconds of a launch for ``problem``, which ``layout`` lays out."""
    return launch_us(problem, layout(problem))


@lru_cache(8192)
def corrected_us(problem: ScaledMm, layout: Callable[[ScaledMm], DecodeConfig]) -> float:
    """Return the same estimate, corrected by the trees of this GPU if it has been measured.

    The estimate is always that of a weight that may be prefetched, so a layer keeps its kernel and its bits whether it
    prefetches or not.
    """
    problem = problem._replace(prefetch_weight=True)
    estimate, gpu = us(problem, layout), corrections.gpu_of(problem.target)
    if gpu is None or not (problem.m and problem.n and problem.k):
        return estimate
    asked = features(problem, layout(problem), estimate)
    return estimate * corrections.factor(KERNEL, asked, Features._fields, gpu)
