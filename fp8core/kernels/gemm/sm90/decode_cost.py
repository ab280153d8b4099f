"""How long sm90_decode takes for a product: constants fitted to an H200 (experiments/2026-11-choice).

Layouts are chosen by estimates of their own (`decode_config`, `decode_rows_config`), which need not be comparable with
other kernels; these are.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS, DecodeConfig, width
from fp8core.problem import ITEMSIZE, ScaledMm

BYTES_A_US: Final = 4.37e6
"""From memory."""
OVERLAP: Final = 5.4
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


FITTED: Final[dict[int, Fitted]] = {
    16: Fitted(0.020, 0.090, 0.010, 0.0, 0.034, 0.819),
    32: Fitted(0.127, 0.013, 0.008, 0.344, 0.050, 1.195),
    64: Fitted(0.144, 0.080, 0.002, 0.303, 0.281, 1.934),
}
"""Of tiles with channels on the M side of `wgmma`, by the most rows."""
ROWS: Final = Fitted(0.147, 0.008, 0.0, 1.035, 0.267, 1.462)
"""Of tiles with rows on the M side."""


def _launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimate of one launch."""
    rows_first = config.warpgroup_channels > 64
    side = MOST_ROWS if rows_first else width(p.m)
    fitted = ROWS if rows_first else next(fitted for most, fitted in FITTED.items() if p.m <= most)
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
    """Return the estimated microseconds of ``problem``, whose launches of up to 64 rows ``layout`` lays out."""
    panels, rest = divmod(problem.m, MOST_ROWS)
    found = 0.0
    for rows, number in ((MOST_ROWS, panels), (rest, 1)):
        if rows and number:
            part = problem._replace(m=rows)
            found += number * _launch_us(part, layout(part))
    return found
