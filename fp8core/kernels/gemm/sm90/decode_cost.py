"""How long sm90_decode takes: constants fitted to an H200 by `python -m bench.fit_estimates`.

Layouts are chosen by estimates of their own (`decode_config`, `decode_rows_config`), which need not be comparable with
other kernels; these are, and those of small weights by rows.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, DecodeConfig, width
from fp8core.kernels.gemm.sm90.decode_rows_config import FEWEST_ROWS, SMALL_BYTES, estimate
from fp8core.problem import ITEMSIZE, ScaledMm

BYTES_A_US: Final = 4.326e6
"""From memory."""
LINE_BYTES: Final = 128
"""Of the cache: estimates of small weights are fitted to rows that begin at multiples of it."""
OVERLAP: Final = 1.842
"""The exponent of the norm that joins the times of the memory and of the multiprocessors: the greater hides most."""


class Fitted(NamedTuple):
    """Microseconds of the parts of a product."""

    k_block: float
    """Of a block, for 64 channels of a k-block."""
    blockwise: float
    """More of that with scales that change along k."""
    tile: float
    """Of a block, for the end of a tile."""
    reduce: float
    """Of a product, for every other block and warpgroup that has a part of k."""
    rest: float
    """What each product takes before and behind the weight's stream."""


CHANNELS_FIRST: Final = {
    8: Fitted(0.007336, 0.06108, 1.102, 0.04136, 0.842),
    16: Fitted(0.001239, 0.06945, 1.365, 0.0934, 0.876),
    32: Fitted(0.1289, 0.02937, 0.006235, 0.204, 1.243),
    64: Fitted(0.03676, 0.03894, 1.418, 0.3083, 1.36),
}
"""Of tiles with channels on the M side of `wgmma`, by its N side."""
ROWS: Final = Fitted(0.003741, 0.04348, 1.068, 0.007786, 2.524)
"""Of tiles with rows on the M side."""
FITTED: Final = ("BYTES_A_US", "OVERLAP")
"""Beside the numbers of `CHANNELS_FIRST` and `ROWS`, the names of those that `python -m bench.fit_estimates` finds."""


def launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimate of one launch."""
    small = p.n * p.k < SMALL_BYTES and p.ldb % LINE_BYTES == 0
    if config.rows_first and p.m >= FEWEST_ROWS and small:
        return estimate(p.n, p.k, config, p.target, p.scale_a == "group")
    fitted = ROWS if config.rows_first else CHANNELS_FIRST[width(p.m)]
    k_block = fitted.k_block + (fitted.blockwise if p.scale_a == "group" else 0.0)
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
