"""How long sm90_decode takes for 33 to 64 rows: constants fitted to an H200 (experiments/2026-11-choice).

Layouts are chosen by estimates of their own (`decode_config`, `decode_rows_config`), which need not be comparable with
other kernels; these are.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS, DecodeConfig, width
from fp8core.problem import ITEMSIZE, ScaledMm

BYTES_A_US: Final = 4.32e6
"""From memory."""
OVERLAP: Final = 4.3
"""The exponent of the norm that joins the times of the memory and of the multiprocessors: the greater hides most."""


class Fitted(NamedTuple):
    """Microseconds of the parts of a product."""

    k_block: float
    """Of a block, for 64 channels of a k-block."""
    blockwise: float
    """More of that with scales that change along k."""
    zeros: float
    """More of that for every row that the side of a has beyond those of a, which TMA fills with zeros."""
    tile: float
    """Of a block, for the end of a tile."""
    reduce: float
    """Of a product, for every other block and warpgroup that has a part of k."""
    rest: float
    """What each product takes before and behind the weight's stream."""


CHANNELS_FIRST: Final = Fitted(0.126, 0.006, 0.002, 0.266, 0.352, 1.747)
"""Of tiles with channels on the M side of `wgmma`."""
ROWS: Final = Fitted(0.117, 0.008, 0.0, 1.235, 0.245, 1.743)
"""Of tiles with rows on the M side."""


FITTED: Final = ("BYTES_A_US", "OVERLAP")
"""Beside the numbers of `CHANNELS_FIRST` and `ROWS`, the names of those that `python -m bench.fit_estimates` finds."""


def launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimate of one launch."""
    rows_first = config.warpgroup_channels > 64
    side = MOST_ROWS if rows_first else width(p.m)
    fitted = ROWS if rows_first else CHANNELS_FIRST
    k_block = fitted.k_block + fitted.zeros * (side - p.m) / config.multicast_tiles
    if p.scale_a == "group":
        k_block += fitted.blockwise
    blocks = ceil_div(config.cluster * config.clusters, p.target.multiprocessors)
    part = ceil_div(ceil_div(p.k, BLOCK_K), config.split_k)
    rounds = ceil_div(ceil_div(p.n, config.tile * config.multicast_tiles), config.clusters)
    busy = rounds * (part * k_block * blocks * config.tile / 64 + fitted.tile)
    memory = (p.n * p.k + p.m * p.k + ITEMSIZE[p.out] * p.m * p.n) / BYTES_A_US
    streamed: float = (memory**OVERLAP + busy**OVERLAP) ** (1 / OVERLAP)
    return fitted.rest + streamed + fitted.reduce * (config.split_k + config.k_warpgroups - 2)


@lru_cache(8192)
def us(problem: ScaledMm, layout: Callable[[ScaledMm], DecodeConfig]) -> float:
    """Return the estimated microseconds of a launch for ``problem``, which ``layout`` lays out."""
    return launch_us(problem, layout(problem))
