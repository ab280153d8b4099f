"""Dequantization: the values that FP8 data and scales represent."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core.core import checks, scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.scaling import SCALES
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION, ITEMSIZE
from fp8core.errors import ScaleError
from fp8core.interop import Operand, ScaleOperand, dtype_name, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.weights import DEQUANTIZE
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import PER_TENSOR, Dequantize
from fp8core.runtime.plans import DequantizeNumbers
from fp8core.types import ArrayT, DequantizeKeywords, NumpyArray, Scale, StreamKeyword, Untyped

SCALE, OUT = 1, 2
"""Indices among the operands."""


@overload
def dequantize(
    q: Float8Array | Quantized[Float8Array, Untyped], scale: Scale | None = None, **keywords: Unpack[DequantizeKeywords]
) -> Any: ...
@overload
def dequantize(
    q: NumpyArray | Quantized[object, NumpyArray], scale: Scale | None = None, **keywords: Unpack[DequantizeKeywords]
) -> NumpyArray: ...
@overload
def dequantize(
    q: ArrayT | Quantized[object, ArrayT], scale: Scale | None = None, **keywords: Unpack[DequantizeKeywords]
) -> ArrayT: ...
@eager_only
def dequantize(
    q: object,
    scale: object = None,
    *,
    group_shape: tuple[int, int] | None = None,
    dtype: object = "float32",
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``float(q) * scale``, computed in float32 and rounded once to ``dtype``.

    Args:
        q: FP8 ``[..., cols]``, or a `Quantized`, which has its scale and group shape.
        scale: a number, or a float32 or float8_e8m0fnu array of one number or of one per group of q.
        group_shape: the groups of the scale. It may be left out if the scale has, along each axis of q, one number or
            one per element.
        dtype: float32, float16 or bfloat16.
        out: an array of that dtype and of q's shape for the result.
        stream: the stream to launch on; by default the current stream of the framework of q.

    Returns:
        An array of q's shape in the framework of q.

    Raises:
        ScaleError: there is no scale, or group_shape is needed and was not given, or is not that of a `Quantized`.
        ShapeError: the scale's shape does not fit the groups, or no groups fit it.
        DTypeError, LayoutError, DeviceError: as for `quantize`, before anything is launched or written.
        UnsupportedProblemError: there are 2**31 columns or more, on a GPU.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32))
        >>> fp8core.dequantize(q).tolist()
        [[448.0, -2.0]]
        >>> fp8core.dequantize(q.data, q.scale, group_shape=fp8core.PER_TOKEN, dtype="float16").dtype
        dtype('float16')
    """
    known = None
    if scale is None or isinstance(q, Quantized):
        q, scale, known = parts(q, scale, "q", "scale")
    if known is not None and group_shape is not None and known != checks.group_shape(group_shape):
        raise ScaleError(f"group_shape needs to be that of q, {tuple(known)}, or left out, got {group_shape}")
    return DEQUANTIZE_CALLS((q, scale, out), (known or group_shape, dtype), stream)[0][OUT]


def _describe_dequantize(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    q, scale, out = operands
    q = specs.required(q, "q")
    scale = specs.required(scale, "scale")
    specs.check_fp8(q)
    at = specs.matrix(q)
    scale_shapes.check_scale_dtype(scale, bytes_allowed=True)
    specs.check_same_device(q, scale)
    group = scale_shapes.implied_group(scale, q) if options[0] is None else checks.group_shape(options[0])
    group, strides = scale_shapes.of_groups(scale, group, q)
    wide = dtype_name(options[1], "dtype", HIGH_PRECISION)
    stride, size = specs.result_stride(out, q, q.shape, wide), ITEMSIZE[wide]
    out_at = specs.alignment_of(out)
    problem = Dequantize(
        target=q.target,
        q=q.dtype,
        out=wide,
        group_shape=group,
        scale_format="ue8m0_bytes" if scale.dtype == "float8_e8m0fnu" else "float32",
        cols=at.cols,
        alignment=specs.alignment(out_at, stride * size, q.alignment * size, at.stride * size),
    )

    def plan() -> Planned:
        if not at.rows * at.cols:
            return Planned(None)
        numbers = DequantizeNumbers(at.stride, *strides, stride, at.rows)
        return Planned(DEQUANTIZE.plan(problem).bind(numbers))

    return Described({OUT: NewArray(q.shape, wide)}, plan, lambda: DEQUANTIZE.explain(problem))


DEQUANTIZE_CALLS: Final = Operation(
    (Operand("q", *FORMATS), ScaleOperand("scale", *SCALES), Operand("out", *HIGH_PRECISION)),
    _describe_dequantize,
    numbers=(SCALE,),
)


@overload
def per_tensor_dequantize(q: Float8Array, scale: Scale, **keywords: Unpack[StreamKeyword]) -> Any: ...
@overload
def per_tensor_dequantize(q: NumpyArray, scale: Scale, **keywords: Unpack[StreamKeyword]) -> NumpyArray: ...
@overload
def per_tensor_dequantize(q: ArrayT, scale: Scale, **keywords: Unpack[StreamKeyword]) -> ArrayT: ...
@eager_only
def per_tensor_dequantize(q: object, scale: object, *, stream: object = None) -> Any:
    """Return ``float(q) * scale`` as float16, computed in float32 and rounded once; the name is vLLM's (w8a8_utils).

    Args:
        q: FP8 ``[..., cols]``.
        scale: a number, or a float32 array of one.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        float16 of q's shape.

    Raises:
        DTypeError, ShapeError, LayoutError, DeviceError, UnsupportedProblemError: as for `dequantize`.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32), group_shape=(-1, -1))
        >>> fp8core.per_tensor_dequantize(q.data, 0.5).tolist()
        [[224.0, -1.0]]
    """
    return DEQUANTIZE_CALLS((q, scale, None), (PER_TENSOR, "float16"), stream)[0][OUT]
