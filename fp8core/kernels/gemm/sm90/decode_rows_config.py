"""The kernel and the layout for 33 to 64 rows on a Hopper GPU: those of the least estimate.

All constants are fitted to sweeps on an H200 (experiments/2026-11-tile-widths); small weights have tiles and constants
of their own (experiments/2026-11-small-weights).
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.sm90.decode_channels_config import POWERS, cheapest, cost_model
from fp8core.kernels.gemm.sm90.decode_config import (
    BLOCK_K,
    MOST_ROWS,
    DecodeConfig,
    clusters_at_once,
    limit_prefetch,
)
from fp8core.problem import BLOCK
from fp8core.target import Target

FEWEST_ROWS: Final = 33
"""Rows of a from which sm90_decode_rows is a candidate: for fewer it costs the same, and sm90_decode less."""
LEAST: Final = 512
"""Least n and k for which layouts were measured; below it, `cheapest` gives one of sm90_decode."""
LEAST_CHANNELS: Final = 1280
LEAST_K: Final = 3584
"""Below either, unless the weight is small, the layout of sm90_decode that `cheapest` gives was at least as fast."""
CHANNELS: Final = range(64, 129, 8)
"""Channels of a tile of sm90_decode_rows, chosen so that the tiles divide evenly among the blocks."""
SMALLEST_TILE: Final = 64
"""Only for small weights: its channels have one scale of the weight, and its products are the shortest."""
A_STAGES: Final = 8
SMALL_BYTES: Final = 16e6
"""Weights of fewer bytes are small, and have constants of their own."""
LIMITED_BYTES: Final = 64e6
"""Bytes of a weight up to which a limited prefetch was faster."""
OCCUPIED_US: Final = 1.5
"""Time of a product up to there, small ones aside, that has a block on every multiprocessor: the next product's blocks
start later. With fewer blocks, in proportion."""
SPLIT_US: Final = 0.3
"""Time of a product with scales per row or tensor, per tile of a block beyond the first and per block of a tile beyond
the first: for weights of at least `SPLIT_FROM` bytes with up to `SPLIT_K` columns. With 16,384 columns, or with blocked
scales, whole k was slower (experiments/2026-11-results-in-l2)."""
SPLIT_FROM: Final = 200e6
SPLIT_K: Final = 8192
SHARPNESS: Final = 6.0
"""Exponent of the norm that combines two overlapping times: a time that is nearly as long as the other still counts."""


class Fitted(NamedTuple):
    """Microseconds of the parts of a product, and fractions of the memory's time."""

    channels: float
    """Time of a block per 64 channels of a k-block."""
    tile: float
    """Time of a block for the epilogue of a tile."""
    reduce: float
    """Time of a product per block of a tile beyond the first."""
    rest: float
    """Time of every product before and after it streams the weight."""
    bytes_a_us: float
    """Memory bandwidth, in bytes per microsecond."""
    uneven: float
    """Fraction of the memory's time that is lost if the busiest block streams twice its share."""
    exchange: float = 0.0
    """Addition to `tile` per block of a tile beyond the first."""
    k_block: float = 0.0
    """Time of a block per k-block, whatever its channels."""
    across: float = 0.0
    """Addition to `k_block` if a tile's channels have two scales of the weight."""
    traffic: float = 0.0
    """Fraction of the memory's time that loads of a add with tiles of 64 channels; with wider tiles, it is less."""
    borders: float = 0.0
    """Time of a product whose tiles have two scales of the weight, beside that of its k-blocks."""
    occupied: float = 0.0
    """Time of a product that has a block on every multiprocessor, as the next product's blocks start later. With fewer
    blocks, in proportion."""
    crowded: float = 0.0
    """The same for the multiprocessors beyond half of them: with half of them, two products find room side by side."""

    def us(self, n: int, k: int, config: DecodeConfig, target: Target) -> float:
        """Return the estimate of a product of 64 rows."""
        others = config.split_k - 1
        across = config.tile % BLOCK > 0 and BLOCK % config.tile > 0
        k_block = config.tile / 64 * self.channels + self.k_block + across * self.across
        busiest = config.busiest_us(n, k, k_block, self.tile + self.exchange * others)
        share = config.turns(n) * config.tile * config.part(k) * BLOCK_K * target.multiprocessors / (n * k)
        memory = n * k / self.bytes_a_us * (1 + self.uneven * max(0.0, share - 1))
        memory *= 1 + self.traffic * 64 / config.tile
        blocks = config.cluster * config.clusters / target.multiprocessors
        overheads = self.occupied * blocks + self.crowded * max(0.0, blocks - 0.5) + across * self.borders
        return overlapped_us(SHARPNESS, memory, busiest) + self.reduce * others + self.rest + overheads


ROWS: Final = Fitted(0.1136, 0.0011, 0.1913, 1.927, 4.4e6, 0.156, k_block=0.029, traffic=0.0332)
"""sm90_decode_rows with scales per row or tensor."""
ROWS_BLOCKWISE: Final = Fitted(0.1289, 0.1482, 0.1662, 2.248, 4.417e6, 0.12, 0.019, 0.0424, 0.0437, 0.0308)
"""The same with scales of 1x128 x 128x128."""
CHANNELS_FIRST: Final = {
    (1, 1): Fitted(0.1744, 0.0, 0.1835, 1.821, 4.369e6, 0.173, 0.1523),
    (1, 2): Fitted(0.1699, 0.1342, 0.767, 1.282, 4.172e6, 0.1018, 0.0962),
    (2, 1): Fitted(0.1717, 0.0, 0.2449, 1.263, 4.47e6, 0.3061, 0.008),
}
"""sm90_decode with scales per row or tensor, by its warpgroups of different channels and of the same channels."""
SMALL_ROWS: Final = Fitted(
    0.1121, 0.0001, 0.1593, 1.4626, 4.307e6, 0.1995, 0.092, traffic=0.0149, occupied=0.4688, crowded=0.4231
)
SMALL_ROWS_BLOCKWISE: Final = Fitted(
    *(0.1254, 0.745, 0.172, 1.0343, 4.23e6, 0.1988, 0.0007, 0.0201, 0.0606, 0.0034, 0.1587, 0.1012, 2.154)
)
SMALL_CHANNELS_FIRST: Final = {
    (1, 1): Fitted(
        *(0.1374, 0.0022, 0.2047, 1.5768, 4.433e6, 0.1844, 0.0574, 0.02), traffic=0.03, occupied=0.4135, crowded=0.3618
    ),
    (1, 2): Fitted(
        *(0.0174, 0.0037, 0.6918, 1.6366, 4.244e6, 0.2243, 0.0009, 0.02), traffic=0.03, occupied=0.0293, crowded=0.0688
    ),
    (2, 1): Fitted(
        *(0.1136, 0.0003, 0.1625, 1.5612, 4.234e6, 0.1758, 0.0638, 0.02), traffic=0.03, occupied=0.1387, crowded=0.3995
    ),
}
"""The same for small weights (experiments/2026-11-small-weights)."""


def estimate(n: int, k: int, config: DecodeConfig, target: Target, blockwise: bool) -> float:
    """Return the estimated microseconds of a product of 64 rows in a layout."""
    small = n * k < SMALL_BYTES
    if not config.rows_first:
        fitted = (SMALL_CHANNELS_FIRST if small else CHANNELS_FIRST)[config.m_warpgroups, config.k_warpgroups]
    elif blockwise:
        fitted = SMALL_ROWS_BLOCKWISE if small else ROWS_BLOCKWISE
    else:
        fitted = SMALL_ROWS if small else ROWS
    us = fitted.us(n, k, config, target)
    if n * k >= SPLIT_FROM and k <= SPLIT_K and not blockwise:
        us += SPLIT_US * (config.turns(n) - 1) * (config.split_k - 1)
    occupied = 0.0 if small or n * k >= LIMITED_BYTES else OCCUPIED_US
    return us + occupied * config.cluster * config.clusters / target.multiprocessors


def layouts(n: int, k: int, target: Target, blockwise: bool) -> Iterator[DecodeConfig]:
    """Yield the candidate layouts: with blocked scales only those of sm90_decode_rows.

    There a thread promotes a k-block with the scales of two rows, in sm90_decode with those of all rows.
    """
    small = n * k < SMALL_BYTES
    kinds = [(True, channels, (1, 1), A_STAGES) for channels in CHANNELS if small or channels > SMALLEST_TILE]
    if not blockwise:
        kinds += [(False, 64, warpgroups, A_STAGES if warpgroups[0] == 2 else 12) for warpgroups in CHANNELS_FIRST]
    for (rows_first, channels, warpgroups, a_stages), (split_k, most) in product(
        kinds, clusters_at_once(target).items()
    ):
        if split_k > ceil_div(k, BLOCK_K) or not most or not (rows_first or split_k in POWERS):
            continue
        clusters = min(ceil_div(n, channels * warpgroups[0]), most)
        config = DecodeConfig(
            split_k, clusters, *warpgroups, 1, a_stages, warpgroup_channels=channels, rows_first=rows_first
        )
        yield limit_prefetch(config) if n * k < LIMITED_BYTES else config


@cache
def full_config(n: int, k: int, target: Target, blockwise: bool) -> DecodeConfig:
    """Return the layout of 33 to 64 rows with the least estimate; of equal ones, that with the fewest blocks.

    ``blockwise``: scales of 1x128 x 128x128.
    """
    if min(n, k) < LEAST or (n * k >= SMALL_BYTES and (k < LEAST_K or n < LEAST_CHANNELS)):
        return cheapest(n, k, cost_model(MOST_ROWS, blockwise), target)

    def price(config: DecodeConfig) -> tuple[float, int]:
        return round(estimate(n, k, config, target, blockwise), 2), config.cluster * config.clusters

    return min(layouts(n, k, target, blockwise), key=price)
