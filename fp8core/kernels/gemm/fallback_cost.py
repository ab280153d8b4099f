"""Rough estimates of the kernels for problems that no other kernel takes, on Hopper: what `explain` says of them.

Their order in the table decides between them. The constants are fitted to an H200 by `python -m bench.fit_estimates`.
"""

from collections.abc import Callable
from typing import Final

from fp8core.dtypes import ITEMSIZE
from fp8core.features import features
from fp8core.kernels.encodings import ceil_div
from fp8core.kernels.gemm import generic, realigned
from fp8core.kernels.gemm.blaslt.mapping import FOUR
from fp8core.kernels.gemm.overlap import overlapped_us
from fp8core.kernels.gemm.scales import is_along_k
from fp8core.kernels.gemm.sm90 import decode_cost, decode_unaligned, tiled_cost
from fp8core.kernels.gemm.sm90.decode import config_for
from fp8core.kernels.gemm.sm90.decode_config import BLOCK_K, MOST_ROWS
from fp8core.problem import ScaledMm

PASS_START_US: Final = 2.831
"""Time of generic_decode beside its passes over the weight."""
PASS_BYTES_A_US: Final = 2.163e7
"""Bytes of the weight per microsecond in a pass of generic_decode, one for every panel of rows."""
PASS_ROW: Final = 0.2705
"""Fraction by which a pass takes longer per row of a panel."""
CODE_US: Final = 0.003672
"""Time of a warp of generic_decode per column of its part of k: a pass takes no less, however small the weight is."""
CODE_ROW_US: Final = 0.0001496
"""Addition to `CODE_US` per row of a panel."""
PASS_OVERLAP: Final = 14.84
"""Exponent of the norm that combines the two times, which overlap (`overlapped_us`)."""
PASS_UNALIGNED: Final = 2.373
"""Factor on passes if rows of codes are not aligned."""
PASS_BLOCKWISE: Final = 1.233
"""Factor on passes with scales that change along k."""
TILE_START_US: Final = 20.69
"""Time of generic_mma beside its tiles."""
TILE_K_BLOCK_US: Final = 0.4133
"""Time of a tile of generic_mma per 128 of k."""
PRODUCT_US: Final = 0.0001209
"""Addition to `TILE_K_BLOCK_US` per result of the tile."""
TILE_UNALIGNED: Final = 1.353
"""Factor on tiles if rows of codes are not aligned."""
TILE_BLOCKWISE: Final = 1.135
"""Factor on tiles with scales that change along k."""
COPY_US: Final = 2.001
"""The least time of the launches of realigned beside the product, however little they copy."""
COPY_OVERLAP: Final = 1.456
"""Exponent of the norm that combines it with the time of the copied bytes (`overlapped_us`)."""
COPIED_BYTES_A_US: Final = 3.55e6
"""Bytes per microsecond that copies read and write."""
PAD_US: Final = 3.405
"""Time of the launches of cublaslt_pad_m beside the product."""
SPLIT_M_US: Final = 3.636
"""Time of the launch of cublaslt_split_m before its products."""
EPILOGUE_US: Final = 3.833
"""Time of the launch of cublaslt_epilogue after the product."""
FITTED: Final = (
    *("PASS_START_US", "PASS_BYTES_A_US", "PASS_ROW", "CODE_US", "CODE_ROW_US", "PASS_OVERLAP", "PASS_UNALIGNED"),
    *("PASS_BLOCKWISE", "TILE_START_US", "TILE_K_BLOCK_US", "PRODUCT_US", "TILE_UNALIGNED", "TILE_BLOCKWISE"),
    *("COPY_US", "COPY_OVERLAP", "COPIED_BYTES_A_US", "PAD_US", "SPLIT_M_US", "EPILOGUE_US"),
)
"""The constants above that `python -m bench.fit_estimates` fits."""

Estimate = Callable[[ScaledMm], float | None]


def on_hopper(us: Callable[[ScaledMm], float]) -> Estimate:
    """Return an estimate that is None on GPUs for which nothing was fitted."""
    return lambda p: us(p) if "wgmma" in features(p.target) and p.k and p.n else None


def decode_us(p: ScaledMm) -> float:
    """Return the estimate of sm90_decode: a launch for every panel of 64 rows."""
    panels = ceil_div(p.m, MOST_ROWS)
    return panels * decode_cost.us(p._replace(m=min(p.m, MOST_ROWS)), config_for) if panels else 0.0


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
    """Return the estimate of realigned: of its copies, of an fp8core kernel between them, and of the other channels."""
    most, last = realigned.inner(p), realigned.rest(p)
    moved = 2 * (p.m + p.n) * most.k if realigned.copies_codes(p) else 0
    moved += 2 * p.m * p.n * ITEMSIZE[p.out] if realigned.copies_out(p) else 0
    product = decode_us(most) if p.m <= MOST_ROWS else tiled_cost.us(most)
    copies = overlapped_us(COPY_OVERLAP, COPY_US, moved / COPIED_BYTES_A_US)
    return copies + product + (generic_decode_us(last) if last.n else 0.0)


def unaligned_us(p: ScaledMm) -> float:
    """Return the estimate of sm90_decode_unaligned: the cost of its layout, for each of its launches."""
    if p.batch_invariant and p.m > MOST_ROWS:
        return ceil_div(p.m, MOST_ROWS) * unaligned_us(p._replace(m=MOST_ROWS))
    return decode_unaligned.us(p, decode_unaligned.layout(p)) if p.m else 0.0


def pad_m_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_pad_m; ``library_us``: that of the library's product."""
    return PAD_US + 2 * p.m * (p.k + p.n * ITEMSIZE[p.out]) / COPIED_BYTES_A_US + library_us


def split_m_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_split_m; ``library_us``: that of the library's product, of the first rows."""
    return SPLIT_M_US + library_us + decode_us(p._replace(m=p.m % FOUR))


def epilogue_us(p: ScaledMm, library_us: float) -> float:
    """Return the estimate of cublaslt_epilogue; ``library_us``: that of the library's product, in fp32."""
    return EPILOGUE_US + p.m * p.n * (4 + ITEMSIZE[p.out]) / COPIED_BYTES_A_US + library_us
