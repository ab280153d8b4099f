"""Products with vLLM's names: all are one operation, whose table chooses the kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from fp8core import interop
from fp8core.core import checks
from fp8core.errors import ShapeError
from fp8core.ops.scaled_mm import product_by
from fp8core.types import Array, DType, Scale
from fp8core.w8a8.operations import PRODUCT, QINPUT, WEIGHT


def _product(
    qinput: Any, weight: Any, out_dtype: Any, scale_a: Any, scale_b: Any, bias: Any, output_shape: Sequence[int]
) -> Any:
    most, n = (_extent(x, at, name) for x, at, name in ((qinput, 0, QINPUT), (weight, -1, WEIGHT)))
    shape = _extents(output_shape)
    rows: Any = math.prod(shape[:-1])
    known = isinstance(rows, int) and isinstance(most, int)  # comparing symbols of torch.export would constrain them
    if (known and rows > most) or shape[-1:] != (n,):
        raise ShapeError(f"output_shape needs at most {most} rows of {n} columns, got {shape}")
    result = product_by(PRODUCT, qinput[:rows], weight, _rows_of(scale_a, rows), scale_b, bias, out_dtype)
    return result.reshape(shape)


def _extent(x: Any, axis: int, name: interop.Operand) -> Any:
    """Return an extent of a matrix, which may be a symbol."""
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 2:
        interop.declared(x, name)  # refuses anything but an array
        raise ShapeError(f"{name} needs two axes, got shape {tuple(shape or ())}")
    return shape[axis]


def _extents(output_shape: Any) -> tuple[Any, ...]:
    """Return a shape whose extents are ints, or symbols of a tracer."""
    try:
        shape = tuple([n if type(n) is int or _symbol(n) else checks.as_int(n) for n in checks.ordered(output_shape)])
    except TypeError as error:
        raise ShapeError(f"output_shape needs whole numbers, got {output_shape!r}") from error
    if any(isinstance(n, int) and n < 0 for n in shape):
        raise ShapeError(f"output_shape needs extents of at least 0, got {shape}")
    return shape


def _symbol(extent: Any) -> bool:
    """Return whether an extent is a symbol of torch.export or jax.export."""
    return type(extent).__module__.partition(".")[0] in ("torch", "jax") and not hasattr(extent, "dtype")


def _rows_of(scale: Any, rows: int) -> Any:
    """Return the scales of the first ``rows`` tokens, without those of padding rows; one scale is for any rows."""
    shape = tuple(getattr(scale, "shape", ()))  # a number has none
    return scale[:rows] if len(shape) > 0 and shape[0] > rows and shape not in ((1,), (1, 1)) else scale


@interop.eager_only
def cutlass_w8a8_scaled_mm(
    *,
    qinput: Array,
    weight: Array,
    out_dtype: DType,
    scale_a: Scale,
    scale_b: Scale,
    bias: Array | None,
    output_shape: Sequence[int],
    input_2d: Array | None = None,
) -> Any:
    """Return `fp8core.scaled_mm` in the shape ``output_shape``, for any mix of scales per tensor and per row.

    Args:
        qinput: FP8 ``[rows, k]``; rows beyond those of output_shape are padding and are ignored.
        weight: FP8 ``[k, n]``, columns contiguous.
        out_dtype: the result's dtype: bfloat16, float16 or float32.
        scale_a: the input's scale: a number, or float32 of one or of ``[rows, 1]``.
        scale_b: the weight's scale: a number, or float32 of one or of ``[n, 1]``.
        bias: ``[n]`` in out_dtype or float32, or None.
        output_shape: the result's shape, ``[..., n]``.
        input_2d: the unquantized input; not needed.

    Returns:
        An array of shape output_shape and dtype out_dtype, in the framework of qinput.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for
            `fp8core.scaled_mm`.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> a, weight = (fp8core.quantize(np.ones((rows, 32), np.float32)) for rows in (2, 3))
        >>> w8a8.cutlass_w8a8_scaled_mm(
        ...     qinput=a.data, weight=weight.data.T, out_dtype="float32", scale_a=a.scale, scale_b=weight.scale,
        ...     bias=None, output_shape=(1, 2, 3),
        ... ).round(3).tolist()
        [[[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]]
    """
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


@interop.eager_only
def rocm_per_tensor_w8a8_scaled_mm(
    *,
    qinput: Array,
    weight: Array,
    out_dtype: DType,
    scale_a: Scale,
    scale_b: Scale,
    bias: Array | None,
    input_2d: Array | None = None,
    output_shape: Sequence[int],
) -> Any:
    """Return the same as `cutlass_w8a8_scaled_mm` for the same arguments: the table chooses the kernel.

    ``torch_per_tensor_...``, ``torch_per_token_...`` and ``torch_channelwise_w8a8_scaled_mm`` are this function, too.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32), group_shape=fp8core.PER_TENSOR)
        >>> w8a8.rocm_per_tensor_w8a8_scaled_mm(
        ...     qinput=a.data, weight=a.data.T, out_dtype="float32", scale_a=a.scale, scale_b=a.scale, bias=None,
        ...     input_2d=None, output_shape=(2, 2),
        ... ).round(3).tolist()
        [[32.0, 32.0], [32.0, 32.0]]
    """
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


torch_per_tensor_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
"""The same function as `rocm_per_tensor_w8a8_scaled_mm`."""
torch_per_token_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
"""The same function as `rocm_per_tensor_w8a8_scaled_mm`."""
torch_channelwise_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
"""The same function as `rocm_per_tensor_w8a8_scaled_mm`."""


def dispatch_w8a8_scaled_mm(
    cutlass_fp8_supported: bool,
    per_tensor_weights: bool,
    per_tensor_activations: bool,
    use_per_token_if_dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return vLLM's product function for a kind of scales; all use the same table and give the same numbers.

    Args:
        cutlass_fp8_supported: the result of the function `cutlass_fp8_supported`.
        per_tensor_weights: whether the weight has one scale.
        per_tensor_activations: whether the input has one scale.
        use_per_token_if_dynamic: whether a dynamic scale is per token.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.dispatch_w8a8_scaled_mm(True, True, True).__name__
        'cutlass_w8a8_scaled_mm'
    """
    if cutlass_fp8_supported:
        return cutlass_w8a8_scaled_mm
    if per_tensor_weights and per_tensor_activations:
        return torch_per_tensor_w8a8_scaled_mm
    if not per_tensor_weights and not per_tensor_activations and use_per_token_if_dynamic:
        return torch_per_token_w8a8_scaled_mm
    return torch_channelwise_w8a8_scaled_mm
