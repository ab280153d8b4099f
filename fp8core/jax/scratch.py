"""How much scratch a call may need, where its plan is not known yet: an extent is a symbol, or the device is elsewhere.

XLA gives a call its scratch as one more result. Its extent is written into the program before symbols get numbers, and
before the device is asked which kernel runs. So it is the most that any kernel of the tables takes.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from fp8core.kernels.gemm.blaslt.dialects import CUBLASLT, HIPBLASLT
from fp8core.problem import BLOCK, FORMATS

WORKSPACE: Final = {"cpu": 0, "cuda": CUBLASLT.workspace_bytes, "rocm": HIPBLASLT.workspace_bytes}
"""By platform: what the library of products is offered."""
PARTS: Final = 16 * 256
"""What rounding each part of a scratch up to 256 bytes adds at most."""
WIDEST: Final = 4
"""Bytes of an accumulator, of a scale, and of an element of the widest result."""
ALIGNED: Final = 16
"""Rows of codes that a kernel copies are of a multiple of so many."""


def most_scratch(name: str, operands: Mapping[int, tuple[str, tuple[Any, ...]]], platform: str) -> Any:
    """Return how many bytes of scratch a call takes at most, as a number or an expression of symbols.

    Args:
        name: of the operation in programs: a product or a linear layer.
        operands: by their places: the dtype, and the shape, whose extents may be symbols.
        platform: the one that it runs on, as JAX calls it.
    """
    (dtype, x), (_, weight) = operands[0], operands[1]
    rows, k = prod(x[:-1]), x[-1]
    channels = weight[1] if name == "scaled_mm" else weight[0]
    product = 0 if platform == "cpu" else _product(rows, channels, k, WORKSPACE[platform])
    return product if dtype in FORMATS else product + _codes(rows, k)


def _codes(rows: Any, k: Any) -> Any:
    """Return the bytes of quantized rows, and of their scales."""
    return rows * (k + ALIGNED) + WIDEST * (rows + ALIGNED) * (k // BLOCK + 1) + PARTS


def _product(m: Any, n: Any, k: Any, workspace: int) -> Any:
    """Return what the kernels of a product take at most.

    Beside the library's workspace that is an accumulator, or a copy of some rows of a and of the result; copies of the
    scales and of the bias; and, where rows are not of whole vectors, copies of a, of b and of the result.
    """
    m, blocks = m + ALIGNED, k // BLOCK + ALIGNED
    scales = WIDEST * (m + n + ALIGNED) * blocks
    bytes_ = workspace + PARTS + WIDEST * m * n + m * (k + ALIGNED) + scales + WIDEST * n
    whole = isinstance(k, int) and isinstance(n, int) and k % ALIGNED == 0 and n % ALIGNED == 0
    return bytes_ if whole else bytes_ + (m + n) * (k + ALIGNED) + WIDEST * m * (n + ALIGNED)
