"""The kernels of the scaled product, most preferred first."""

from typing import Final

from fp8core.kernels.gemm import corrections, fallback_cost
from fp8core.kernels.gemm.amd.decode import GFX9_DECODE
from fp8core.kernels.gemm.blaslt.rows import CUBLASLT_ROWS, HIPBLASLT_ROWS
from fp8core.kernels.gemm.generic import GENERIC_DECODE, GENERIC_MMA, HOST
from fp8core.kernels.gemm.mma.decode import SM89_DECODE
from fp8core.kernels.gemm.realigned import copies_codes, realigned
from fp8core.kernels.gemm.sm90 import decode_cost
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE, config_for
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.sm90.tiled_choice import formula_us, least_us
from fp8core.problem import ScaledMm
from fp8core.table import Requirement, Table

MANY: Final = 33
"""From so many rows on, sm90_decode is compared with the library, too: with fewer rows the library was the fastest for
no product, and querying it takes longer than the choice itself."""
UNCORRECTED_MARGIN: Final = 0.7
"""sm90_decode is chosen without corrections, which take time, up to this factor of the estimate of sm90_tiled."""
FEW: Final = 16
"""Up to so many rows, sm90_decode is chosen without a comparison: in layers it overlaps more with the preceding kernel,
and alone it is seldom slower."""
MARGIN: Final = 1.06
"""With more rows and without corrections, sm90_decode is chosen up to this factor of the estimate of sm90_tiled: the
formulas have errors of 5 %."""


def _takes_no_time(p: ScaledMm) -> bool:
    """Return whether there is nothing to multiply, so nothing to estimate."""
    return not (p.m and p.n and p.k)


def _alone(p: ScaledMm) -> bool:
    """Return whether there is nothing to compare: no other kernel with an estimate, or nothing to multiply."""
    return _takes_no_time(p) or p.m > MOST_ROWS or p.batch_invariant or SM90_TILED.refusal(p) is not None


def _pays(p: ScaledMm, margin: float) -> bool:
    """Return whether sm90_decode takes at most ``margin`` times as long as sm90_tiled."""
    if decode_cost.us(p, config_for) <= UNCORRECTED_MARGIN * formula_us(p):
        return True
    return decode_cost.corrected_us(p, config_for) <= margin * least_us(p)


def _decode_pays(p: ScaledMm) -> bool:
    return _alone(p) or p.m <= FEW or _pays(p, MARGIN if corrections.gpu_of(p.target) is None else 1.0)


def _decode_us(p: ScaledMm) -> float | None:
    """Return the estimate if the library is compared, too: only with corrections, else the library is seldom faster."""
    if p.m < MANY or _alone(p) or corrections.gpu_of(p.target) is None:
        return None
    return decode_cost.corrected_us(p, config_for)


DECODE_PAYS: Final = Requirement(
    _decode_pays, "estimated to take longer than sm90_tiled, with m={p.m} n={p.n} k={p.k} and scale_a per {p.scale_a}"
)


def _tiles_pay(p: ScaledMm) -> bool:
    if p.m > MOST_ROWS or _takes_no_time(p) or SM90_DECODE_UNALIGNED.refusal(p) is not None:
        return True
    return p.m > FEW and least_us(p) <= fallback_cost.unaligned_us(p)


TILES_PAY: Final = Requirement(
    _tiles_pay,
    f"takes longer than sm90_decode_unaligned, measured with up to {FEW} rows and estimated with more, with m={{p.m}}"
    " n={p.n} k={p.k}",
)

DECODE: Final = SM90_DECODE._replace(
    prefers=(*SM90_DECODE.prefers, DECODE_PAYS),
    us=_decode_us,
    rough=fallback_cost.on_hopper(fallback_cost.decode_us),
)
TILED: Final = SM90_TILED._replace(prefers=(TILES_PAY,))
LIBRARIES: Final = (*CUBLASLT_ROWS, GFX9_DECODE, *HIPBLASLT_ROWS)
COPIES: Final = realigned((DECODE, TILED, SM89_DECODE, *LIBRARIES))


def _one_pass_pays(p: ScaledMm) -> bool:
    if p.m <= MOST_ROWS or _takes_no_time(p) or COPIES.refusal(p) is not None:
        return True
    return copies_codes(p) and fallback_cost.unaligned_us(p) <= fallback_cost.realigned_us(p)


ONE_PASS_PAYS: Final = Requirement(
    _one_pass_pays, "estimated to take longer than copying unaligned arrays, with m={p.m} n={p.n} k={p.k}"
)
DECODE_UNALIGNED: Final = SM90_DECODE_UNALIGNED._replace(
    prefers=(ONE_PASS_PAYS,), rough=fallback_cost.on_hopper(fallback_cost.unaligned_us)
)
"""Before the libraries: of 110 products with FP8 results or amax of up to 64 rows they were the fastest for none."""
FALLBACKS: Final = tuple(
    kernel._replace(rough=fallback_cost.on_hopper(us))
    for kernel, us in (
        (COPIES, fallback_cost.realigned_us),
        (GENERIC_DECODE, fallback_cost.generic_decode_us),
        (GENERIC_MMA, fallback_cost.generic_mma_us),
    )
)
SCALED_MM: Final = Table(
    "scaled_mm", ScaledMm, DECODE, TILED, DECODE_UNALIGNED, SM89_DECODE, *LIBRARIES, *FALLBACKS, HOST
)
"""The rows of `scaled_mm`; a plan is a `fp8core.kernels.gemm.args.Matmul`."""
