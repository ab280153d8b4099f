"""The layout and the time of `sm90_decode_unaligned` for 65 to 256 rows: the config of least cost.

A block has one warpgroup, as two would lack registers, with 64 channels of one residue or two. In a row of the result
those of a residue are up to 16 elements apart, so with a short k their stores take the most time. More than 128 rows
are in two panels, each with blocks of its own.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.sm90.decode_channels_config import (
    LIMITED_RINGS,
    POWERS,
    WEIGHT_BYTES_A_US,
    WEIGHT_RING_BYTES,
)
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, DecodeConfig, clusters_at_once, limit_prefetch, width
from fp8core.kernels.gemm.sm90.residues import CHANNELS
from fp8core.target import Target

SIDE: Final = 128
"""Most rows of a panel."""
MOST_ROWS: Final = 2 * SIDE
A_STAGES: Final = 6
MOST_PHASES: Final = 16


class Costs(NamedTuple):
    """Microseconds, set by sweeps on an H200 (experiments/2026-11-no-cliff, 2026-11-two-panels)."""

    start_us: float
    k_block_us: dict[tuple[int, bool], float]
    """Time of a block per k-block, by the N side of wgmma and by whether scales change along k."""
    panel: float
    """Fraction by which that is longer for each further panel of rows, whose blocks load the weight, too."""
    tile_us: float
    """Time of a block per tile, beside its k-blocks."""
    reduce_us: float
    """Time of a product per block of a tile beyond the first."""
    result_us: float
    """Time per stored result at a spread of 16; proportionally less at a smaller one."""
    overlap: float
    """Exponent of the norm that combines the times of products and of stores, which overlap (`overlapped_us`)."""


COSTS: Final = Costs(
    *(2.75, {(96, False): 0.302, (128, False): 0.396, (96, True): 0.406, (128, True): 0.497}, 0.04),
    *(1.28, 0.205, 1.1e-5, 1.29),
)


class Wide(NamedTuple):
    """A product of 65 to 256 rows."""

    m: int
    n: int
    """Channels, rounded up to whole tiles."""
    k: int
    phases: int
    residues: int
    spread: int
    """Of the results that are stored together (`residues.result_spread`)."""
    blockwise: bool

    @property
    def panels(self) -> int:
        """Return how many panels the rows are in."""
        return ceil_div(self.m, SIDE)

    @property
    def side(self) -> int:
        """Return the N side of wgmma."""
        return width(ceil_div(self.m, self.panels))


def us(product: Wide, config: DecodeConfig) -> float:
    """Return the microseconds of a product in a layout."""
    k_block = COSTS.k_block_us[product.side, product.blockwise] * (1 + COSTS.panel * (product.panels - 1))
    busiest = config.busiest_us(product.n, product.k, k_block, COSTS.tile_us)
    memory = product.n * product.k / WEIGHT_BYTES_A_US
    stores = product.m * product.n * product.spread / MOST_PHASES * COSTS.result_us
    joined = overlapped_us(COSTS.overlap, max(memory, busiest), stores)
    return COSTS.start_us + joined + COSTS.reduce_us * (config.split_k - 1)


def candidates(product: Wide, target: Target) -> Iterator[DecodeConfig]:
    """Yield the layouts of a product, with smaller splits of k first."""
    limited = product.n * product.k <= LIMITED_RINGS * target.multiprocessors * WEIGHT_RING_BYTES
    for split_k, most in clusters_at_once(target).items():
        clusters = min(ceil_div(product.n, CHANNELS), max(1, most // product.panels))
        if split_k in POWERS and split_k <= ceil_div(product.k, BLOCK_K) and most:
            config = DecodeConfig(
                *(split_k, clusters, 1, 1, 1, A_STAGES),
                phases=product.phases,
                residues=product.residues,
                panels=product.panels,
            )
            yield limit_prefetch(config) if limited else config


@lru_cache(maxsize=256)
def cheapest(product: Wide, target: Target) -> DecodeConfig:
    """Return the config of least cost; of equal ones, that with the smallest split of k."""
    return min(candidates(product, target), key=lambda config: us(product, config))
