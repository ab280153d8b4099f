"""The kernels of the scaled product, most preferred first."""

from typing import Final

from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.amd.decode import GFX9_DECODE
from fp8core.kernels.gemm.blaslt.rows import CUBLASLT_ROWS, HIPBLASLT_ROWS
from fp8core.kernels.gemm.generic import GENERIC_DECODE, GENERIC_MMA, HOST
from fp8core.kernels.gemm.mma.decode import SM89_DECODE
from fp8core.kernels.gemm.realigned import copies_out, realigned
from fp8core.kernels.gemm.sm90 import decode_cost
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE, config_for
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.sm90.tiled_cost import us as by_tiles
from fp8core.problem import ScaledMm
from fp8core.table import Requirement, Table

ALWAYS_FASTER: Final = 32
"""Up to so many rows no kernel was measured to be faster than sm90_decode: then nothing is compared."""
MARGIN: Final = 1.05
"""How many times the estimate of sm90_tiled that of sm90_decode may be: beside a quantization it overlaps more, and its
sums are more exact."""


def _decode_pays(p: ScaledMm) -> bool:
    few = p.m <= ALWAYS_FASTER or p.m > MOST_ROWS  # of more rows another requirement speaks
    if few or p.batch_invariant or SM90_TILED.refusal(p) is not None:
        return True
    return decode_cost.us(p, config_for) <= MARGIN * by_tiles(p)


DECODE_PAYS: Final = Requirement(
    _decode_pays, "estimated to take longer than sm90_tiled, with m={p.m} n={p.n} k={p.k} and scale_a per {p.scale_a}"
)


def _tiles_pay(p: ScaledMm) -> bool:
    if p.m > MOST_ROWS:
        return not copies_out(p)
    if SM90_DECODE_UNALIGNED.refusal(p) is not None:
        return True
    return p.m > ALWAYS_FASTER and by_tiles(p) <= fallback_cost.unaligned_us(p)


TILES_PAY: Final = Requirement(
    _tiles_pay,
    "slower than sm90_decode_unaligned for few rows, and than copies of many results in odd rows, with m={p.m} n={p.n}"
    " k={p.k}",
)

DECODE: Final = SM90_DECODE._replace(
    prefers=(*SM90_DECODE.prefers, DECODE_PAYS), rough=fallback_cost.on_hopper(fallback_cost.decode_us)
)
TILED: Final = SM90_TILED._replace(prefers=(TILES_PAY,))
ALIGNED: Final = (DECODE, TILED, SM89_DECODE, *CUBLASLT_ROWS, GFX9_DECODE, *HIPBLASLT_ROWS)
"""Rows that need operands in aligned rows."""
COPIES: Final = realigned(ALIGNED)

UNALIGNED: Final = tuple(
    kernel._replace(rough=fallback_cost.on_hopper(us))
    for kernel, us in (
        (SM90_DECODE_UNALIGNED, fallback_cost.unaligned_us),
        (COPIES, fallback_cost.realigned_us),
        (GENERIC_DECODE, fallback_cost.generic_decode_us),
        (GENERIC_MMA, fallback_cost.generic_mma_us),
    )
)
"""Rows that do not."""
SCALED_MM: Final = Table("scaled_mm", ScaledMm, *ALIGNED, *UNALIGNED, HOST)
"""The rows of `scaled_mm`; a plan is a `fp8core.kernels.gemm.args.Matmul`."""
