"""The layout and the time of `sm90_decode_unaligned` for 65 to 128 rows: the config of least cost.

A block has one warpgroup, as two would lack registers, with 64 channels of one residue or two. In a row of the result
those of a residue are up to 16 elements apart, so with a short k their stores take the most time.
"""

from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.sm90.decode_channels_config import (
    LIMITED_RINGS,
    POWERS,
    WEIGHT_BYTES_A_US,
    WEIGHT_RING_BYTES,
)
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, DecodeConfig, clusters_at_once, limit_prefetch
from fp8core.kernels.gemm.sm90.residues import CHANNELS
from fp8core.problem import Target

MOST_ROWS: Final = 128
A_STAGES: Final = 6
MOST_PHASES: Final = 16


class Costs(NamedTuple):
    """Microseconds, set by a sweep on an H200 (experiments/2026-11-no-cliff)."""

    start_us: float
    k_block_us: dict[tuple[int, bool], float]
    """Time of a block per k-block, by the N side of wgmma and by whether scales change along k."""
    tile_us: float
    """Time of a block per tile, beside its k-blocks."""
    reduce_us: float
    """Time of a product per block of a tile beyond the first."""
    result_us: float
    """Time per stored result at a spread of 16; proportionally less at a smaller one."""
    overlap: float
    """Exponent of the norm that combines the times of products and of stores, which overlap (`overlapped_us`)."""


COSTS: Final = Costs(
    2.75, {(96, False): 0.302, (128, False): 0.396, (96, True): 0.406, (128, True): 0.497}, 1.28, 0.205, 1.1e-5, 1.29
)


class Wide(NamedTuple):
    """A product of 65 to 128 rows."""

    m: int
    n: int
    """Channels, rounded up to whole tiles."""
    k: int
    side: int
    phases: int
    residues: int
    spread: int
    """Of the results that are stored together (`residues.result_spread`)."""
    blockwise: bool


def us(product: Wide, config: DecodeConfig) -> float:
    """Return the microseconds of a product in a layout."""
    k_block = COSTS.k_block_us[product.side, product.blockwise]
    busiest = config.busiest_us(product.n, product.k, k_block, COSTS.tile_us)
    memory = product.n * product.k / WEIGHT_BYTES_A_US
    stores = product.m * product.n * product.spread / MOST_PHASES * COSTS.result_us
    joined = overlapped_us(COSTS.overlap, max(memory, busiest), stores)
    return COSTS.start_us + joined + COSTS.reduce_us * (config.split_k - 1)


@cache
def cheapest(product: Wide, target: Target) -> DecodeConfig:
    """Return the config of least cost; of equal ones, that with the smallest split of k."""
    found = []
    for split_k, most in clusters_at_once(target).items():
        clusters = min(ceil_div(product.n, CHANNELS), most)
        if split_k in POWERS and split_k <= ceil_div(product.k, BLOCK_K) and clusters:
            config = DecodeConfig(split_k, clusters, 1, 1, 1, A_STAGES)
            found.append(config._replace(phases=product.phases, residues=product.residues))
    best = min(found, key=lambda one: us(product, one))
    limited = product.n * product.k <= LIMITED_RINGS * target.multiprocessors * WEIGHT_RING_BYTES
    return limit_prefetch(best) if limited else best
