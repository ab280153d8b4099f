"""Memory for the codes of a layer's weight."""

from typing import Any

from fp8core import interop
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.interop import Operand, dtype_name
from fp8core.ops.linear_scratch import ROW_ALIGNMENT, aligned_strides


def aligned_rows(weight: Any, dtype: Any) -> Any:
    """Return an uninitialized FP8 array ``[n, k]`` for the codes of ``weight``, with rows aligned to 16 bytes.

    None if contiguous rows are aligned already, on the host, and for frameworks whose arrays cannot have gaps.
    """
    at = interop.view(weight, Operand("weight", *HIGH_PRECISION))
    if at.shape[-1] % ROW_ALIGNMENT == 0 or at.target.platform == "host" or not at.framework.allows_gaps:
        return None
    name, stream = dtype_name(dtype, "dtype", FORMATS), at.framework.stream(at.target)
    made = at.framework.empty(at.shape, name, at.target, aligned_strides(at.shape))
    return at.framework.wrap(made.array, stream, weight)
