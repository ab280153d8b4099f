"""How long sm90_decode takes: constants fitted to an H200 by `python -m bench.fit_estimates`.

Layouts are chosen by estimates of their own (`decode_channels_config`, `decode_rows_config`), which need not be
comparable with other kernels; these are.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, NamedTuple

from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.gemm.sm90.decode_config import DecodeConfig, width
from fp8core.kernels.gemm.sm90.decode_rows_config import SMALL_BYTES
from fp8core.problem import ITEMSIZE, ScaledMm

BYTES_A_US: Final = 4.587e6
"""From memory."""
LINE_BYTES: Final = 128
"""Of the cache."""
UNALIGNED: Final = 0.2908
"""The part by which the memory takes longer where rows do not begin at multiples of `SECTOR` bytes."""
BUSY_UNALIGNED: Final = 0.6232
"""The part by which multiprocessors take longer there."""
SECTORS: Final = 0.08872
"""The part by which both do where rows begin at multiples of `SECTOR`, but not of `LINE_BYTES`."""
SECTOR: Final = 32
"""Bytes that L2 reads together."""
ODD_RESULT_US: Final = 1.655e-6
"""Of a product, for each result where rows of them do not begin at multiples of `PIECE` bytes."""
PIECE: Final = 16
"""Bytes that are stored together."""
OVERLAP: Final = 3.03
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
    8: Fitted(0.004122, 0.0412, 0.2668, 0.005688, 0.8919),
    16: Fitted(0.001009, 0.04057, 1.149, 0.05703, 0.8455),
    32: Fitted(0.08413, 0.02635, 0.005285, 0.102, 1.331),
    64: Fitted(0.1398, 0.02842, 0.7382, 0.4528, 0.7416),
}
"""Of tiles with channels on the M side of `wgmma`, by its N side."""
ROWS: Final = Fitted(0.002397, 0.01225, 0.2108, 0.03595, 2.661)
"""Of tiles with rows on the M side."""
SMALL_ROWS: Final = Fitted(0.1174, 0.005343, 0.1559, 0.3319, 1.676)
"""The same of weights of fewer than `SMALL_BYTES`."""
FITTED: Final = ("BYTES_A_US", "UNALIGNED", "BUSY_UNALIGNED", "SECTORS", "ODD_RESULT_US", "OVERLAP")
"""Beside the numbers of `CHANNELS_FIRST`, `ROWS` and `SMALL_ROWS`, those that `python -m bench.fit_estimates` finds."""


def launch_us(p: ScaledMm, config: DecodeConfig) -> float:
    """Return the estimate of one launch."""
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


@lru_cache(8192)
def us(problem: ScaledMm, layout: Callable[[ScaledMm], DecodeConfig]) -> float:
    """Return the estimated microseconds of a launch for ``problem``, which ``layout`` lays out."""
    return launch_us(problem, layout(problem))
