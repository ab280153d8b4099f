"""Which kernel multiplies 33 to 64 rows on a Hopper GPU, and how `sm90_decode_rows` is laid out: fitted estimates.

All constants are fitted to one sweep on an H200 over 28 weights (experiments/2026-11-rows-on-the-m-side).
"""

from functools import cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    MOST_ROWS,
    DecodeConfig,
    cheapest,
    clusters_at_once,
    cost_model,
    limit_prefetch,
)
from fp8core.problem import Target

FEWEST_ROWS: Final = 33
"""Of a, for its side of 64 to be used: the kernel costs as much with fewer, and the other one less."""
LEAST_CHANNELS: Final = 1280
LEAST_K: Final = 4096
"""For less, sm90_decode was at least as fast."""
DEEP_K: Final = 8192
MARGIN_US: Final = 0.1
"""What is added to the estimate of sm90_decode from this k on, and taken from it for less."""
CHANNELS: Final = 128
"""Of a tile."""
A_STAGES: Final = 8
TILES_SHARED: Final = (1, 2, 4)
"""Tiles of a cluster, whose blocks share what they load of a."""
LIMITED_BYTES: Final = 64e6
"""Of the weight, up to which a limited prefetch was faster."""
BYTES_A_US: Final = 4.4e6
"""The memory's bandwidth in the sweep."""
SHARPNESS: Final = 6.0
"""Of the maximum of two times that overlap: what is nearly as long as the other still costs something."""


class Fitted(NamedTuple):
    """Microseconds of the parts of a product."""

    k_block: float
    """Of a block, for 64 channels of a k-block."""
    tile: float
    """Of a block, for the epilogue of a tile."""
    loads_of_a: float = 0.0
    """More of a block for a k-block whose a no other block shares; a part of it where some do."""
    exchange: float = 0.0
    """More of an epilogue for every other block that has a part of k."""
    conflict: float = 0.0014
    """The part of the memory's time that is lost where k is not split, as `CostModel.conflict`."""
    reduce: float = 0.29
    """Of a product, for every block that k is split over but the first."""
    shared: float = 0.0
    """Of a product, for every tile but the first that shares loads."""
    rest: float = 1.79
    """What each product takes before and behind the weight's stream."""

    def us(self, n: int, k: int, config: DecodeConfig) -> float:
        """Return the estimate of a product of 64 rows."""
        part, groups = ceil_div(ceil_div(k, BLOCK_K), config.split_k), ceil_div(n, config.tile * config.multicast_tiles)
        others = config.split_k - 1
        k_block = config.tile / 64 * self.k_block + self.loads_of_a / config.multicast_tiles
        busiest = ceil_div(groups, config.clusters) * (part * k_block + self.tile + self.exchange * others)
        memory = n * k / BYTES_A_US * (1 + self.conflict / config.split_k)
        longest: float = (memory**SHARPNESS + busiest**SHARPNESS) ** (1 / SHARPNESS)
        return longest + self.reduce * others + self.shared * (config.multicast_tiles - 1) + self.rest


ROWS: Final = Fitted(0.151, 0.485, 0.02, 0.051, 0.019, 0.141, 0.026, 1.637)
"""sm90_decode_rows, with scales of any granularity."""
CHANNELS_FIRST: Final = {
    (1, 1, 1): Fitted(0.1441, 0.1919),
    (1, 2, 1): Fitted(0.1635, 0.2886),
    (2, 1, 1): Fitted(0.1504, 0.2107),
    (2, 1, 2): Fitted(0.1629, 0.0258),
}
"""sm90_decode with a scale a row or tensor, by warpgroups of different channels, of the same, and tiles that share."""


@cache
def rows_config(n: int, k: int, target: Target) -> DecodeConfig:
    """Return the layout of sm90_decode_rows with the least estimate; of equals the one with the fewest blocks."""
    found = []
    for blocks, most in clusters_at_once(target).items():
        for together in TILES_SHARED:
            split_k, uneven = divmod(blocks, together)
            if uneven or not 1 <= split_k <= ceil_div(k, BLOCK_K) or not most:
                continue
            config = DecodeConfig(
                split_k,
                min(ceil_div(n, CHANNELS * together), most),
                m_warpgroups=1,
                k_warpgroups=1,
                ctas_per_sm=1,
                a_stages=A_STAGES,
                multicast_tiles=together,
                warpgroup_channels=CHANNELS,
            )
            found.append(((round(ROWS.us(n, k, config), 2), config.cluster * config.clusters), config))
    chosen = min(found, key=lambda pair: pair[0])[1]
    return limit_prefetch(chosen) if n * k < LIMITED_BYTES else chosen


@cache
def full_config(n: int, k: int, target: Target, blockwise: bool) -> DecodeConfig:
    """Return the layout of 33 to 64 rows, by either kernel; ``blockwise``: scales of 1x128 x 128x128."""
    other = cheapest(n, k, cost_model(MOST_ROWS, blockwise), target)
    if k < LEAST_K or n < LEAST_CHANNELS:
        return other
    rows = rows_config(n, k, target)
    if blockwise:
        return rows  # it promotes with two scales a thread and k-block, the other kernel with one a row
    fitted = CHANNELS_FIRST[other.m_warpgroups, other.k_warpgroups, other.multicast_tiles]
    margin = MARGIN_US if k >= DEEP_K else -MARGIN_US
    return rows if ROWS.us(n, k, rows) < fitted.us(n, k, other) + margin else other
