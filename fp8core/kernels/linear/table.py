"""The ways to run a linear layer, most preferred first."""

from typing import Final, NamedTuple

from fp8core.kernels.gemm.args import Matmul
from fp8core.kernels.gemm.requirements import MIXED_SCALES, of_product
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.fused import (
    BLOCKS_QUANTIZE,
    BOUND_BY_VALUE,
    FEW_ELEMENTS,
    FITS,
    SIXTEEN_BITS,
    SOME_CHANNELS,
    TOKEN_SCALES,
    WHOLE_VECTORS,
    plan_fused,
)
from fp8core.kernels.linear.overlapped import DECODE_CHOSEN, DECODE_RUNS, ONE_PANEL, plan_overlapped
from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import Linear
from fp8core.runtime.plans import Plan, QuantizeNumbers
from fp8core.table import Explanation, Kernel, Table


class Steps(NamedTuple):
    """The launches of a linear layer."""

    quantize: Plan[QuantizeNumbers] | None
    """None if the product takes x as it is."""
    product: Matmul


def _fused(problem: Linear) -> Steps:
    return Steps(None, plan_fused(problem))


def _overlapped(problem: Linear) -> Steps:
    return Steps(QUANTIZE.plan(problem.quantize), plan_overlapped(problem))


def _sequential(problem: Linear) -> Steps:
    return Steps(QUANTIZE.plan(problem.quantize), SCALED_MM.plan(problem.product))


LINEAR: Final = Table(
    "linear",
    Linear,
    Kernel(
        "fused",
        (
            *(DECODE_RUNS, ONE_PANEL, SOME_CHANNELS, TOKEN_SCALES, SIXTEEN_BITS, WHOLE_VECTORS, BOUND_BY_VALUE),
            *(FITS, BLOCKS_QUANTIZE),
        ),
        _fused,
        (DECODE_CHOSEN, FEW_ELEMENTS),
    ),
    Kernel("overlapped", (DECODE_RUNS, ONE_PANEL), _overlapped, (DECODE_CHOSEN,)),
    Kernel("sequential", (of_product(MIXED_SCALES),), _sequential),
)
"""Plans are `Steps`: one launch, two that overlap, or any two."""


def explain_linear(problem: Linear) -> Explanation:
    """Return which kernels a linear layer gets: a single one, or one that quantizes x and one that multiplies."""
    asked = LINEAR.explain(problem)
    if asked.chosen == LINEAR.kernels[0].name:
        return asked
    return SCALED_MM.explain(problem.product)._replace(before=(QUANTIZE.explain(problem.quantize), asked))
