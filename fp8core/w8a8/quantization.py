"""vLLM's ``scaled_fp8_quant``."""

from typing import Any

from fp8core import interop
from fp8core.core import checks
from fp8core.errors import ScaleError
from fp8core.ops.quantize import quantize_by
from fp8core.problem import PER_TENSOR, PER_TOKEN
from fp8core.target import native_e4m3
from fp8core.types import Array, Scale
from fp8core.w8a8.operations import INPUT, OUTPUT, PER_TOKEN_IF_DYNAMIC, QUANTIZE, UPPER, fp8_of, upper_bound


@interop.eager_only
def scaled_fp8_quant(
    input: Array,
    scale: Scale | None = None,
    num_token_padding: int | None = None,
    scale_ub: Scale | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Array | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """Return ``(data, scale)`` of a matrix ``[m, k]``: `fp8core.quantize` with vLLM's name and arguments.

    Args:
        input: float32, float16 or bfloat16 ``[m, k]``.
        scale: a given scale, a number or a float32 array; without it the scale is dynamic.
        num_token_padding: the least number of rows of the result, at most 2**31 - 1.
        scale_ub: an upper bound of amax, per token only; ignored per tensor and with a given scale, as by vLLM.
        use_per_token_if_dynamic: with a dynamic scale, use one per token instead of one for the tensor.
        output: an FP8 array for the data; without it the data has the native E4M3 format of the device.
        group_shape: the groups of a scale, given or dynamic; per token with use_per_token_if_dynamic.

    Returns:
        tuple: FP8 data in the framework of ``input``, and its scale, ``[1]`` per tensor, ``[m, 1]`` per token,
            otherwise one number for each group.

    Raises:
        DTypeError, ShapeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.

    Examples:
        >>> import numpy as np
        >>> from fp8core import w8a8
        >>> data, scale = w8a8.scaled_fp8_quant(np.array([[1.0, -448.0]], np.float32), num_token_padding=4)
        >>> data.shape, scale.tolist()
        ((4, 2), [1.0])
    """
    rows = None if num_token_padding is None else checks.least_rows(num_token_padding, "num_token_padding")
    per_token = checks.flag(use_per_token_if_dynamic, PER_TOKEN_IF_DYNAMIC)
    dynamic = PER_TOKEN if per_token else PER_TENSOR
    shape = checks.group_shape(group_shape) if group_shape is not None else dynamic if scale is None else PER_TOKEN
    if scale is None and per_token and shape != PER_TOKEN:
        wanted = f"{tuple(PER_TOKEN)} where {PER_TOKEN_IF_DYNAMIC} is set"
        raise ScaleError(f"group_shape needs {wanted}, got {tuple(shape)}")
    return quantize_by(
        QUANTIZE,
        input,
        native_e4m3(interop.declared(input, INPUT)[1]) if output is None else fp8_of(output, OUTPUT),
        shape,
        scale=scale,
        scale_ub=upper_bound(scale_ub, UPPER, used=scale is None and shape != PER_TENSOR),
        rows_padded=rows,
        out=output,
    )
