"""The ways to run a linear layer, most preferred first."""

from typing import Final, NamedTuple

from fp8core.kernels.hopper import DecodeMm, laid_out
from fp8core.kernels.hopper_layout import in_a_chain
from fp8core.kernels.hopper_linear import (
    BOUND_BY_VALUE,
    FEW_ELEMENTS,
    ONE_PANEL,
    ROW_SCALES,
    SIXTEEN_BITS,
    LinearMm,
)
from fp8core.kernels.quantize import QUANTIZE
from fp8core.kernels.scaled_mm import SCALED_MM
from fp8core.problem import Linear
from fp8core.table import Explanation, Kernel, Launch, Requirement, Table


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


def _by_decode(problem: Linear) -> bool:
    choice = SCALED_MM.choice(problem.product)
    return choice is not None and choice.kernel == "hopper_decode"


BY_DECODE: Final = Requirement(_by_decode, "needs a product that hopper_decode gets")

LINEAR: Final = Table(
    "linear",
    Linear,
    Kernel("hopper_linear", (BY_DECODE, ONE_PANEL, FEW_ELEMENTS, ROW_SCALES, SIXTEEN_BITS, BOUND_BY_VALUE), plan_one),
    Kernel("hopper_chained", (BY_DECODE, ONE_PANEL), plan_chained),
    Kernel("two_launches", (), plan_two),
)
"""Plans are `Steps`; by preference x quantized by its product, two launches laid out for each other, and any two."""


def explain_linear(problem: Linear) -> Explanation:
    """Return which kernels a linear layer gets: one for all of it, or one to quantize x and one to multiply."""
    asked = LINEAR.explain(problem)
    if asked.chosen == LINEAR.kernels[0].name:
        return asked
    return SCALED_MM.explain(problem.product)._replace(before=(QUANTIZE.explain(problem.quantize), asked))
