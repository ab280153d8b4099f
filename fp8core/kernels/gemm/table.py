"""The kernels of the scaled product, most preferred first."""

from typing import Final

from fp8core.features import features
from fp8core.kernels.gemm import fallback_cost
from fp8core.kernels.gemm.amd.decode import GFX9_DECODE
from fp8core.kernels.gemm.blaslt.rows import CUBLASLT_ROWS, HIPBLASLT_ROWS
from fp8core.kernels.gemm.generic import GENERIC_DECODE, GENERIC_MMA, HOST
from fp8core.kernels.gemm.mma.decode import SM89_DECODE
from fp8core.kernels.gemm.realigned import CHANNELS, copies_codes, copies_out, realigned
from fp8core.kernels.gemm.sm90 import decode_cost
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE, config_for
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS
from fp8core.kernels.gemm.sm90.decode_unaligned import SM90_DECODE_UNALIGNED
from fp8core.kernels.gemm.sm90.tiled import SM90_TILED
from fp8core.kernels.gemm.sm90.tiled_cost import least_us, us
from fp8core.problem import ScaledMm
from fp8core.table import Refusal, Requirement, Table, Unknown

MANY: Final = 33
"""From so many rows on sm90_decode is compared with the library, too: with fewer, no product was found that goes to the
library, and to ask it takes longer than to choose."""


SURELY_LESS: Final = 0.7
"""How many times the estimate of sm90_tiled that of sm90_decode may be without corrections, which take longer."""


def _alone(p: ScaledMm) -> bool:
    """Return whether there is nothing to compare: no other kernel with an estimate, or no time."""
    nothing = not (p.m and p.n and p.k)
    return nothing or p.m > MOST_ROWS or p.batch_invariant or SM90_TILED.refusal(p) is not None


def _decode_pays(p: ScaledMm) -> bool:
    if _alone(p) or decode_cost.us(p, config_for) <= SURELY_LESS * us(p):
        return True
    return decode_cost.corrected_us(p, config_for) <= least_us(p)


def _decode_us(p: ScaledMm) -> float | None:
    return None if p.m < MANY or _alone(p) else decode_cost.corrected_us(p, config_for)


DECODE_PAYS: Final = Requirement(
    _decode_pays, "estimated to take longer than sm90_tiled, with m={p.m} n={p.n} k={p.k} and scale_a per {p.scale_a}"
)
SURELY: Final = 0.85
"""How many times the estimate of copies that of panels of 64 rows may be: both are off by 15 % (one deviation)."""


def _few_rows(p: ScaledMm) -> Refusal | Unknown | None:
    """Return why sm90_decode reads the weight too often: not where n alone keeps others from a few panels of rows."""
    if p.m > MOST_ROWS and copies_out(p) and not copies_codes(p) and p.k and p.n >= CHANNELS:
        panels, copies = fallback_cost.decode_us(p), fallback_cost.realigned_us(p)
        return None if panels <= SURELY * copies else SM90_DECODE.reservation(p)
    return SM90_DECODE.reservation(p)


DECODE: Final = SM90_DECODE._replace(
    prefers=(Requirement.of(_few_rows), DECODE_PAYS),
    us=_decode_us,
    rough=fallback_cost.on_hopper(fallback_cost.decode_us),
)
ALIGNED: Final = (DECODE, SM90_TILED, SM89_DECODE, *CUBLASLT_ROWS, GFX9_DECODE, *HIPBLASLT_ROWS)
"""Rows that need operands in aligned rows."""
COPIES: Final = realigned(ALIGNED)


def _copies_pay(p: ScaledMm) -> Refusal | Unknown | None:
    """Return why generic_decode is preferred to copies: on Hopper by their estimates."""
    if "wgmma" not in features(p.target) or p.m > MOST_ROWS:
        return COPIES.reservation(p)
    if fallback_cost.realigned_us(p) <= fallback_cost.generic_decode_us(p):
        return None
    return Refusal(f"estimated to take longer than generic_decode, with m={p.m} n={p.n} k={p.k}")


UNALIGNED: Final = tuple(
    kernel._replace(rough=fallback_cost.on_hopper(us))
    for kernel, us in (
        (SM90_DECODE_UNALIGNED, fallback_cost.unaligned_us),
        (COPIES._replace(prefers=(Requirement.of(_copies_pay),)), fallback_cost.realigned_us),
        (GENERIC_DECODE, fallback_cost.generic_decode_us),
        (GENERIC_MMA, fallback_cost.generic_mma_us),
    )
)
"""Rows that do not."""
SCALED_MM: Final = Table("scaled_mm", ScaledMm, *ALIGNED, *UNALIGNED, HOST)
"""The rows of `scaled_mm`; a plan is a `fp8core.kernels.gemm.args.Matmul`."""
