"""Linear layers of few rows on sm_90a: hopper_decode behind a quantization, or quantizing its rows itself.

In one launch the weight streams as it does for codes that come ready. Every block finds the scales for itself, from all
of x, and keeps the codes of its part of k, so that several tiles cost no more than one. What limits it is that every
block reads all of x: for more of it, a quantization goes before.
"""

from typing import Final

from fp8core.kernels.hopper import DecodeMm, laid_out
from fp8core.kernels.hopper_layout import CHUNK, MOST_ROWS, Layout, in_a_chain
from fp8core.kernels.quantize import mode
from fp8core.kernels.quantize.configs import VEC8 as OCTET
from fp8core.kernels.words import FORMAT, TYPE, ceil_div, power_of_two
from fp8core.problem import ITEMSIZE, PER_TOKEN, Linear
from fp8core.table import Requirement

SIGNATURE: Final = "128sPqifPqqPqqPPqiiii"
"""weight's map, x, its stride in bytes and its octets a row, scale_ub; then as hopper_decode's, from scale_a on."""
MOST_ELEMENTS: Final = 8192
"""Of x, for one launch to be the faster way; of a single row twice as many (docs/decode.md)."""


def place(problem: Linear) -> Layout:
    """Return the layout in one launch: that of two, so that their bits are equal, with room for a block's codes."""
    plan = in_a_chain(laid_out(problem.product))
    return plan._replace(a_stages=ceil_div(ceil_div(problem.product.k, CHUNK), plan.blocks))


def teams(problem: Linear) -> int:
    """Return how many rows the threads of a block are divided among: a power of two."""
    return power_of_two(problem.product.m)


def vectors(problem: Linear) -> int:
    """Return how many octets of x a thread holds: of its block's part of k, or to find the largest of all of it."""
    plan = place(problem)
    chunks = plan.a_stages if problem.quantize.static else ceil_div(problem.product.k, CHUNK)
    return ceil_div(chunks * CHUNK // OCTET, 128 * plan.row_groups * plan.k_groups // teams(problem))


class LinearMm(DecodeMm):
    """One launch; `SCALED_MM`'s parameters, but a is x, and scale_a is read only where it is given."""

    def __init__(self, problem: Linear) -> None:
        quantize = problem.quantize
        super().__init__(
            problem.product,
            place(problem),
            SIGNATURE,
            (problem.x_stride * ITEMSIZE[quantize.x], quantize.cols // OCTET, problem.scale_ub),
            A_VECTORS=vectors(problem),
            A_ROWS=teams(problem),
            A_INPUT=TYPE[quantize.x],
            A_FORMAT=FORMAT[quantize.data],
            A_MODE=mode(quantize),
        )

    def __call__(
        self,
        stream: int,
        a: int,
        b: int,
        scale_a: int,
        scale_b: int,
        bias: int,
        out: int,
        _out_scale: int,
        _amax: int,
        _scratch: int,
    ) -> None:
        """Launch."""
        self._launch(stream, self._weight_maps[b], a, scale_a, scale_b, bias, out)


SIXTEEN_BITS: Final = Requirement(
    lambda p: p.quantize.x in ("float16", "bfloat16") and p.quantize.alignment >= 16,
    "quantizes float16 and bfloat16 in rows aligned to 16 bytes, got {p.quantize.x} aligned to {p.quantize.alignment}",
)
ROW_SCALES: Final = Requirement(
    lambda p: p.product.scale_a in ("tensor", "row") and (p.quantize.static or p.quantize.group_shape == PER_TOKEN),
    "finds scales per token or takes given ones per tensor or token, got {p.quantize.group_shape}",
)
BOUND_BY_VALUE: Final = Requirement(lambda p: p.scale_ub is not None, "takes scale_ub as a number, got an array")
FEW_ELEMENTS: Final = Requirement(
    lambda p: p.product.m * p.product.k <= MOST_ELEMENTS * (1 + (p.product.m == 1)),
    f"is faster up to {MOST_ELEMENTS} elements, or twice as many of one row, got {{p.product.m}} x {{p.product.k}}",
)
ONE_PANEL: Final = Requirement(lambda p: p.product.m <= MOST_ROWS, f"needs m <= {MOST_ROWS}, got m={{p.product.m}}")
