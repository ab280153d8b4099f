"""The checks of choices of experts that `moe_permute` and `moe_unpermute` share."""

from typing import Final

from fp8core.core import specs
from fp8core.core.specs import TensorSpec
from fp8core.errors import ShapeError, UnsupportedProblemError

MOST_ROWS: Final = 1 << 30
"""Rows are counted in 32 bits, with room for those that a kernel rounds up to."""


def check_choices(x: TensorSpec, tokens: int) -> int:
    """Return how many choices each token has in an array ``[tokens, k]``; refuse any other array."""
    if len(x.shape) != 2 or x.shape[0] != tokens:
        raise ShapeError(f"{x.name} needs shape ({tokens}, k), a row for each token, got {x.shape}")
    specs.contiguous_count(x)
    return x.shape[1]


def check_countable(x: TensorSpec, count: int, what: str) -> None:
    """Refuse more than kernels count. JAX describes calls with huge numbers for symbols, so only plans may ask."""
    if count >= MOST_ROWS:
        raise UnsupportedProblemError(f"{x.name} needs less than 2**30 {what}, got shape {x.shape}")
