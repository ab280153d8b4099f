"""Linear layers of few rows on sm_90a in two launches that overlap: the product prefetches its weight meanwhile."""

from typing import Final

from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.sm90.decode import SM90_DECODE, a_side, config_for, decode
from fp8core.kernels.gemm.sm90.decode_config import MOST_ROWS, DecodeConfig, for_linear
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.problem import ITEMSIZE, Linear, ScaledMm
from fp8core.table import Choice, Refusal, Requirement, Unknown

PRODUCER_BYTES: Final = 4096
"""Of shared memory for the blocks of a norm or SiLU: 1,024 of each that the system keeps, and its own."""
MOST_ROWS_AHEAD: Final = 32
"""Of a product behind a norm or SiLU, for it to ask for as much beyond its ring as others: with more rows the small
kernels move more, and what is asked for stands before them (experiments/2026-11-ahead-of-the-ring)."""
FEW_AHEAD: Final = 32 << 10
MOST_BYTES_AHEAD: Final = 200e6
"""With more rows: what is asked for then, of weights up to so many bytes, and of larger ones nothing."""
KEPT_FROM: Final = 3e6
"""Bytes of such a product's result, from which it stays in L2 for the kernel that reads it: some layers with smaller
ones are slower so (experiments/2026-11-results-in-l2)."""
FEWEST_A_STAGES: Final = 6
"""k-blocks of a in flight, of 64 rows, that are enough where the weight is ahead of them."""


def plan_overlapped(problem: Linear) -> Matmul:
    """Return the product, laid out for the quantization that goes before it."""
    return decode(problem.product, behind_quantization(problem.product))


def behind_quantization(problem: ScaledMm) -> DecodeConfig:
    """Return the layout of a product that a quantization goes before.

    That of 64 rows has room for all blocks of a quantization or a norm, taken from what is in flight of a, which is
    nearer than the weight: blocks without room start when the product has ended, and the next product's only after
    them (experiments/2026-11-between-launches).
    """
    config = for_linear(config_for(problem), problem.n * problem.k)
    if a_side(problem, config) < MOST_ROWS:
        return config
    a_stages = max(config.a_stages - 2, min(config.a_stages, FEWEST_A_STAGES))
    return config._replace(spare_bytes=PRODUCER_BYTES, a_stages=a_stages)


def behind_producer(problem: ScaledMm) -> DecodeConfig:
    """Return the layout of a product that a norm or SiLU goes before."""
    kept = problem.m * problem.n * ITEMSIZE[problem.out] >= KEPT_FROM
    config = for_linear(config_for(problem))._replace(spare_bytes=PRODUCER_BYTES, keeps_result=kept)
    if problem.m <= MOST_ROWS_AHEAD:
        return config
    return config._replace(ahead_bytes=FEW_AHEAD if problem.n * problem.k <= MOST_BYTES_AHEAD else 0)


def plan_behind_producer(problem: ScaledMm) -> Matmul:
    """Return the product of codes that are made right before it by a norm, say, laid out for that kernel and the next.

    As in layers that quantize: the small kernel between two products finds room beside the first of them. The bits are
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
