"""Linear layers of few rows on sm_90a in two overlapping launches: the product prefetches its weight early."""

from typing import Final

from fp8core.dtypes import ITEMSIZE
from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE, a_side, config_for, decode
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS, DecodeConfig, linear_config
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import Linear, ScaledMm
from fp8core.table import Choice, Refusal, Requirement, Unknown

PRODUCER_BYTES: Final = 4096
"""Shared memory for the blocks of a norm or SiLU: the 1,024 bytes that the system reserves for each, and their own."""
MOST_ROWS_AHEAD: Final = 32
"""Rows of a product after a norm or SiLU up to which it prefetches as much beyond its ring as other products. With more
rows the small kernels move more data, for which they wait behind the prefetch (experiments/2026-11-ahead-of-the-ring).
"""
FEW_AHEAD: Final = 32 << 10
MOST_BYTES_AHEAD: Final = 200e6
"""With more rows: the bytes prefetched beyond the ring, for weights of up to so many bytes; for larger ones, none."""
KEPT_FROM: Final = 3e6
"""Bytes of such a product's result from which it is kept in L2 for its reader: with smaller results, some layers are
slower that way (experiments/2026-11-results-in-l2)."""
FEWEST_A_STAGES: Final = 6
"""k-blocks of a in flight that are enough, with 64 rows, if the weight is ahead of them."""


def plan_overlapped(problem: Linear) -> Matmul:
    """Return the product, with the layout for a quantization before it."""
    return decode(problem.product, behind_quantization(problem.product))


def behind_quantization(problem: ScaledMm) -> DecodeConfig:
    """Return the layout of a product that follows a quantization.

    With 64 rows it leaves room for all blocks of a quantization or a norm, at the expense of the stages of a, which is
    nearer than the weight. Blocks that find no room start when the product has ended, and the next product's blocks
    only after them (experiments/2026-11-between-launches).
    """
    config = linear_config(config_for(problem), problem.n * problem.k)
    if a_side(problem, config) < MOST_ROWS:
        return config
    a_stages = max(config.a_stages - 2, min(config.a_stages, FEWEST_A_STAGES))
    return config._replace(spare_bytes=PRODUCER_BYTES, a_stages=a_stages)


def behind_producer(problem: ScaledMm) -> DecodeConfig:
    """Return the layout of a product that follows a norm or SiLU."""
    keeps_result = problem.m * problem.n * ITEMSIZE[problem.out] >= KEPT_FROM
    config = linear_config(config_for(problem))._replace(spare_bytes=PRODUCER_BYTES, keeps_result=keeps_result)
    if problem.m <= MOST_ROWS_AHEAD:
        return config
    return config._replace(ahead_bytes=FEW_AHEAD if problem.n * problem.k <= MOST_BYTES_AHEAD else 0)


def plan_behind_producer(problem: ScaledMm) -> Matmul:
    """Return the product of codes that a producer, such as a norm, makes right before it, with a layout for both.

    As in layers that quantize, the small kernel between two products finds room beside the first of them. The bits are
    those of the product alone.
    """
    if problem.m <= MOST_ROWS and SCALED_MM.choice(problem) == Choice(SM90_DECODE.name):
        return decode(problem, behind_producer(problem))
    plan: Matmul = SCALED_MM.plan(problem)
    return plan


def _decode_refusal(problem: Linear) -> Refusal | Unknown | None:
    refusal = SM90_DECODE.refusal(problem.product)
    return Refusal(f"needs a product that {SM90_DECODE.name} runs: {refusal}") if refusal is not None else None


DECODE_RUNS: Final = Requirement.of(_decode_refusal)
ONE_PANEL: Final = Requirement(lambda p: p.product.m <= MOST_ROWS, f"needs m <= {MOST_ROWS}, got m={{p.product.m}}")
DECODE_CHOSEN: Final = Requirement(
    lambda p: SCALED_MM.choice(p.product) == Choice(SM90_DECODE.name),
    f"preferred where {SM90_DECODE.name} is the choice for the product",
)
