"""Upper bounds of a call's scratch, for calls that cannot be planned yet: an extent is symbolic, or there is no device.

XLA gives a call its scratch as one more result, whose extent is written into the program before symbols have values and
before a kernel is chosen for the device. So the bound holds for every kernel of the tables.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from fp8core.dtypes import FORMATS
from fp8core.kernels.gemm.blaslt.dialects import CUBLASLT, HIPBLASLT
from fp8core.kernels.moe import most_counts_bytes
from fp8core.problem import BLOCK
from fp8core.runtime.limits import SCRATCH_ALIGNMENT

WORKSPACE: Final = {"cpu": 0, "cuda": CUBLASLT.workspace_bytes, "rocm": HIPBLASLT.workspace_bytes}
"""By platform: the bytes of workspace that the BLAS library gets."""
PARTS: Final = 16 * SCRATCH_ALIGNMENT
"""An upper bound of the bytes that rounding up each part of a scratch adds."""
WIDEST: Final = 4
"""Bytes of an accumulator, of a scale, and of an element of the widest result dtype."""
ALIGNED: Final = 16
"""Kernels pad the rows of codes that they copy to a multiple of this number of elements."""


def most_scratch(name: str, operands: Mapping[int, tuple[str, tuple[Any, ...]]], options: Any, platform: str) -> Any:
    """Return an upper bound of a call's scratch in bytes, as a number or an expression of symbols.

    Args:
        name: the operation's name in programs: `moe_permute`, a product or a linear layer.
        operands: by position: dtype and shape; extents may be symbols.
        options: those of the call.
        platform: JAX's name of the platform.
    """
    if name == "moe_permute":
        experts, _ = options
        return most_counts_bytes(experts)
    (dtype, x), (_, weight) = operands[0], operands[1]
    rows, k = prod(x[:-1]), x[-1]
    channels = weight[1] if name == "scaled_mm" else weight[0]
    product = 0 if platform == "cpu" else _product(rows, channels, k, WORKSPACE[platform])
    return product if dtype in FORMATS else product + _codes(rows, k)


def _codes(rows: Any, k: Any) -> Any:
    """Return the bytes of quantized rows and their scales."""
    return rows * (k + ALIGNED) + WIDEST * (rows + ALIGNED) * (k // BLOCK + 1) + PARTS


def _product(m: Any, n: Any, k: Any, workspace: int) -> Any:
    """Return an upper bound of the scratch of a product's kernels, in bytes.

    It covers the library's workspace; an accumulator, or a copy of some rows of a and of the result; copies of the
    scales and the bias; and, if rows do not consist of whole vectors, copies of a, of b and of the result.
    """
    m, blocks = m + ALIGNED, k // BLOCK + ALIGNED
    scales = WIDEST * (m + n + ALIGNED) * blocks
    bytes_ = workspace + PARTS + WIDEST * m * n + m * (k + ALIGNED) + scales + WIDEST * n
    whole = isinstance(k, int) and isinstance(n, int) and k % ALIGNED == 0 and n % ALIGNED == 0
    return bytes_ if whole else bytes_ + (m + n) * (k + ALIGNED) + WIDEST * m * (n + ALIGNED)
