"""The ways to run a linear layer, most preferred first."""

from typing import Final, NamedTuple

from fp8core.kernels.hopper import DecodeMm, laid_out
from fp8core.kernels.hopper_layout import in_a_chain
from fp8core.kernels.hopper_linear import (
    BOUND_BY_VALUE,
    FEW_ELEMENTS,
    FITS,
    ONE_PANEL,
    ROW_SCALES,
    SIXTEEN_BITS,
    LinearMm,
)
from fp8core.kernels.quantize import QUANTIZE
from fp8core.kernels.scaled_mm import SCALED_MM
from fp8core.problem import Linear
from fp8core.table import Explanation, Kernel, Launch, Refusal, Requirement, Table, Unknown


class Steps(NamedTuple):
    """What a linear layer launches."""

    quantize: Launch | None
    """None where the product takes x as it is."""
    product: Launch


def plan_one(problem: Linear) -> Steps:
    """Return the launch of the row "hopper_linear"."""
    return Steps(None, LinearMm(problem))


def plan_chained(problem: Linear) -> Steps:
    """Return the launches of the row "hopper_chained"."""
    product = DecodeMm(problem.product, in_a_chain(laid_out(problem.product)))
    return Steps(QUANTIZE.plan(problem.quantize), product)


def plan_two(problem: Linear) -> Steps:
    """Return a quantization, if there is anything to quantize, and the product of its codes."""
    return Steps(QUANTIZE.plan(problem.quantize) if problem.product.k else None, SCALED_MM.plan(problem.product))


def _decode_refusal(problem: Linear) -> Refusal | Unknown | None:
    refusal = SCALED_MM.kernel(DECODE).refusal(problem.product)
    return Refusal(f"needs a product that {DECODE} runs, which {refusal}") if refusal is not None else None


DECODE: Final = "hopper_decode"
DECODE_RUNS: Final = Requirement.of(_decode_refusal)
DECODE_CHOSEN: Final = Requirement(
    lambda p: SCALED_MM.choice(p.product) == (DECODE, 0),
    f"preferred where {DECODE} is the choice for the product",
)

LINEAR: Final = Table(
    "linear",
    Linear,
    Kernel(
        "hopper_linear",
        (DECODE_RUNS, ONE_PANEL, ROW_SCALES, SIXTEEN_BITS, BOUND_BY_VALUE, FITS),
        plan_one,
        (DECODE_CHOSEN, FEW_ELEMENTS),
    ),
    Kernel("hopper_chained", (DECODE_RUNS, ONE_PANEL), plan_chained, (DECODE_CHOSEN,)),
    Kernel("two_launches", (), plan_two),
)
"""Plans are `Steps`; by preference x quantized by its product, two launches laid out for each other, and any two."""


def explain_linear(problem: Linear) -> Explanation:
    """Return which kernels a linear layer gets: one for all of it, or one to quantize x and one to multiply."""
    asked = LINEAR.explain(problem)
    if asked.chosen == LINEAR.kernels[0].name:
        return asked
    return SCALED_MM.explain(problem.product)._replace(before=(QUANTIZE.explain(problem.quantize), asked))
