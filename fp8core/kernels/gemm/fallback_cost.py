"""How long kernels take on Hopper that are for what no other takes, roughly: what `explain` says of them.

Their places in the table decide between them. The constants are fitted to an H200 by `python -m bench.fit_estimates`.
"""

from collections.abc import Callable
from typing import Final

from fp8core.features import features
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import generic, realigned
from fp8core.kernels.gemm.blaslt.mapping import FOUR
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.realigned import ALIGNMENT
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.gemm.sm90 import decode_cost, decode_unaligned, decode_wide_config, tiled_cost
from fp8core.kernels.gemm.sm90.decode import config_for
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS, width
from fp8core.problem import ITEMSIZE, ScaledMm

PASS_START_US: Final = 2.985
"""Of generic_decode, beside its passes over the weight."""
PASS_BYTES_A_US: Final = 2.357e7
"""Of a weight, as generic_decode reads it for every panel of rows."""
PASS_ROW: Final = 0.2886
"""More of that, for every row of a panel."""
CODE_US: Final = 0.003465
"""Of a warp of generic_decode, for 1 of its part of k: a pass takes no less, however small the weight."""
CODE_ROW_US: Final = 0.0001459
"""More of that, for every row of a panel."""
PASS_OVERLAP: Final = 10.53
"""The exponent of the norm that joins the two."""
PASS_UNALIGNED: Final = 2.46
"""Times as long where rows of codes are not aligned."""
PASS_BLOCKWISE: Final = 1.268
"""Times as long with scales that change along k."""
TILE_START_US: Final = 18.55
"""Of generic_mma, beside its tiles."""
TILE_K_BLOCK_US: Final = 0.4409
"""Of a tile of generic_mma, for 128 of k."""
PRODUCT_US: Final = 0.000121
"""More of that, for each of its results."""
TILE_UNALIGNED: Final = 1.325
"""Times as long where rows of codes are not aligned."""
TILE_BLOCKWISE: Final = 1.151
"""Times as long with scales that change along k."""
COPY_US: Final = 0.08032
"""Of the launches of realigned beside the product."""
COPIED_BYTES_A_US: Final = 3.432e6
"""Of what they read and write."""
SHIFTED_US: Final = 0.003852
"""Of what sm90_decode_unaligned does before the product."""
SHIFTED_ROW_US: Final = 1.003e-5
"""More of it, for a code of a."""
SHIFTED: Final = 1.186
"""Times as long as sm90_decode it takes for the product."""
PAD_US: Final = 3.465
"""Of the launches of cublaslt_pad_m beside the product."""
SPLIT_M_US: Final = 3.527
"""Of the launch of cublaslt_split_m before its products."""
EPILOGUE_US: Final = 3.807
"""Of the launch of cublaslt_epilogue after the product."""
FITTED: Final = (
    *("PASS_START_US", "PASS_BYTES_A_US", "PASS_ROW", "CODE_US", "CODE_ROW_US", "PASS_OVERLAP", "PASS_UNALIGNED"),
    *("PASS_BLOCKWISE", "TILE_START_US"),
    *("TILE_K_BLOCK_US", "PRODUCT_US", "TILE_UNALIGNED", "TILE_BLOCKWISE", "COPY_US", "COPIED_BYTES_A_US"),
    *("SHIFTED_US", "SHIFTED_ROW_US", "SHIFTED", "PAD_US", "SPLIT_M_US", "EPILOGUE_US"),
)
"""The names of the numbers above that `python -m bench.fit_estimates` finds."""

Estimate = Callable[[ScaledMm], float | None]


def on_hopper(us: Callable[[ScaledMm], float]) -> Estimate:
    """Return an estimate that is None on GPUs that nothing was fitted to."""
    return lambda p: us(p) if "wgmma" in features(p.target) and p.k and p.n else None


def decode_us(p: ScaledMm) -> float:
    """Return the estimate of sm90_decode: of as many launches as there are panels of 64 rows."""
    panels, last = divmod(p.m, MOST_ROWS)
    sizes = [MOST_ROWS] * panels + [last] * (last > 0)
    return sum(decode_cost.us(p._replace(m=rows), config_for) for rows in sizes[:1]) * len(sizes)


def generic_decode_us(p: ScaledMm) -> float:
    """Return the estimate of generic_decode: every panel of rows reads the weight."""
    shape = generic.layout(p)
    passes = ceil_div(p.m, shape.side) * (1 + PASS_ROW * shape.side) * p.n * p.k / PASS_BYTES_A_US
    codes = ceil_div(p.k, shape.warps) * (CODE_US + CODE_ROW_US * shape.side)
    slower = (1.0 if generic.is_aligned(p) else PASS_UNALIGNED) * (PASS_BLOCKWISE if is_along_k(p) else 1.0)
    return PASS_START_US + slower * overlapped_us(PASS_OVERLAP, passes, codes)


def generic_mma_us(p: ScaledMm) -> float:
    """Return the estimate of generic_mma: tiles in rounds over the device."""
    tile = generic.tile(p)
    rounds = ceil_div(tile.blocks(p.m, p.n), p.target.multiprocessors)
    products = rounds * ceil_div(p.k, BLOCK_K) * (TILE_K_BLOCK_US + tile.rows * tile.cols * PRODUCT_US)
    slower = (1.0 if generic.is_aligned(p) else TILE_UNALIGNED) * (TILE_BLOCKWISE if is_along_k(p) else 1.0)
    return TILE_START_US + products * slower


def realigned_us(p: ScaledMm) -> float:
    """Return the estimate of realigned: of its copies, of a kernel of this library between them, and of the rest."""
    most, last = realigned.inner(p), realigned.rest(p)
    moved = 2 * (p.m + p.n) * most.k if realigned.copies_codes(p) else 0
    moved += 2 * p.m * p.n * ITEMSIZE[p.out] if realigned.copies_out(p) else 0
    product = decode_us(most) if p.m <= MOST_ROWS else tiled_cost.us(most)
    return COPY_US + moved / COPIED_BYTES_A_US + product + (generic_decode_us(last) if last.n else 0.0)


def unaligned_us(p: ScaledMm) -> float:
    """Return the estimate of sm90_decode_unaligned: of sm90_decode and what precedes it; more rows have their own."""
    if p.m > MOST_ROWS and not p.batch_invariant:
        return decode_wide_config.us(decode_unaligned.wide(p), decode_unaligned.layout(p))
    most = p._replace(k=ceil_div(p.k, ALIGNMENT) * ALIGNMENT)
    panel, panels = min(p.m, MOST_ROWS), ceil_div(p.m, MOST_ROWS)
    return panels * (SHIFTED_US + SHIFTED_ROW_US * width(panel) * p.k) + SHIFTED * decode_us(most)


def pad_m_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_pad_m, whose product takes the library ``library_us``."""
    return PAD_US + 2 * p.m * (p.k + p.n * ITEMSIZE[p.out]) / COPIED_BYTES_A_US + library_us


def split_m_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_split_m, whose first rows take the library ``library_us``."""
    return SPLIT_M_US + library_us + decode_us(p._replace(m=p.m % FOUR))


def epilogue_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_epilogue, whose product in fp32 takes the library ``library_us``."""
    return EPILOGUE_US + p.m * p.n * (4 + ITEMSIZE[p.out]) / COPIED_BYTES_A_US + library_us
