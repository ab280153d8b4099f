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

BYTES_A_US: Final = 4.565e6
"""From memory."""
LINE_BYTES: Final = 128
"""Of the cache: estimates of small weights are fitted to rows that begin at multiples of it."""
UNALIGNED: Final = 0.3985
"""The part by which the weight's stream takes longer where rows do not begin at multiples of `SECTOR` bytes."""
SECTORS: Final = 0.07932
"""The same where they do, but not at multiples of `LINE_BYTES`."""
SECTOR: Final = 32
"""Bytes that L2 reads together."""
OVERLAP: Final = 3.363
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
    8: Fitted(0.005114, 0.02961, 0.3849, 0.008894, 0.8648),
    16: Fitted(0.00108, 0.04051, 1.26, 0.05631, 0.8273),
    32: Fitted(0.09035, 0.03049, 0.005367, 0.1031, 1.319),
    64: Fitted(0.1463, 0.03717, 0.8976, 0.5198, 0.6794),
}
"""Of tiles with channels on the M side of `wgmma`, by its N side."""
ROWS: Final = Fitted(0.002461, 0.014, 0.2166, 0.09091, 2.415)
"""Of tiles with rows on the M side."""
FITTED: Final = ("BYTES_A_US", "UNALIGNED", "SECTORS", "OVERLAP")
"""Beside the numbers of `CHANNELS_FIRST` and `ROWS`, the names of those that `python -m bench.fit_estimates` finds."""


def is_small(p: ScaledMm, config: DecodeConfig) -> bool:
    """Return whether a product has the estimate of small weights by rows."""
    small = p.n * p.k < SMALL_BYTES and p.ldb % LINE_BYTES == 0
    return config.rows_first and p.m >= FEWEST_ROWS and small


def launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimate of one launch."""
    if is_small(p, config):
        return estimate(p.n, p.k, config, p.target, p.scale_a == "group")
    fitted = ROWS if config.rows_first else CHANNELS_FIRST[width(p.m)]
    k_block = fitted.k_block + (fitted.blockwise if p.scale_a == "group" else 0.0)
    blocks = ceil_div(config.cluster * config.clusters, p.target.multiprocessors)
    part = ceil_div(ceil_div(p.k, BLOCK_K), config.split_k)
    rounds = ceil_div(ceil_div(p.n, config.tile * config.multicast_tiles), config.clusters)
    busy = rounds * (part * k_block * blocks * config.tile / 64 + fitted.tile)
    memory = (p.n * p.k + p.m * p.k + ITEMSIZE[p.out] * p.m * p.n) / BYTES_A_US
    streamed: float = (memory**OVERLAP + busy**OVERLAP) ** (1 / OVERLAP)
    if p.ldb % LINE_BYTES:
        streamed *= 1 + (UNALIGNED if p.ldb % SECTOR else SECTORS)
    return fitted.rest + streamed + fitted.reduce * (config.split_k + config.k_warpgroups - 2)


@lru_cache(8192)
def us(problem: ScaledMm, layout: Callable[[ScaledMm], DecodeConfig]) -> float:
    """Return the estimated microseconds of a launch for ``problem``, which ``layout`` lays out."""
    return launch_us(problem, layout(problem))
