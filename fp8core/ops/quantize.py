"""Quantize and dequantize: FP8 data and scales such that ``data * scale`` is nearest to the values."""

from collections.abc import Sequence
from typing import Any, Final

from fp8core.core import scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.scaling import (
    EPS,
    SCALES,
    ScaleOptions,
    Scaling,
    codes_alignment,
    new_scale,
    number_or_operand,
    scaling,
    split,
)
from fp8core.core.specs import Matrix, TensorSpec
from fp8core.errors import ScaleError, ShapeError
from fp8core.interop import Operand, dtype_name, eager_only
from fp8core.kernels.quantize import QUANTIZE
from fp8core.kernels.weights import DEQUANTIZE
from fp8core.ops.quantized import Quantized, parts, quantized
from fp8core.problem import (
    FORMATS,
    ITEMSIZE,
    PER_TENSOR,
    PER_TOKEN,
    WIDE,
    Dequantize,
    GroupShape,
    Quantize,
    ScaleFormat,
    ScaleLayout,
)
from fp8core.runtime.plans import DequantizeNumbers, QuantizeNumbers

DATA, SCALE = 1, 2
"""Places among the operands of a quantization."""


@eager_only
def quantize(
    x: object,
    *,
    dtype: object = "float8_e4m3fn",
    group_shape: tuple[int, int] = PER_TOKEN,
    scale: object = None,
    scale_ub: object = None,
    scale_format: ScaleFormat = "float32",
    scale_layout: ScaleLayout = "k",
    eps: float = EPS,
    rows_padded: int | None = None,
    out: object = None,
    stream: object = None,
) -> Quantized:
    """Return FP8 data and fp32 scales such that ``data * scale`` is nearest to ``x``.

    The scale of a group is ``amax / MAX`` (MAX: 448, fnuz 224, e5m2 57344), bounded below per tensor by
    2**-126, per token by ``1 / (MAX * 512)``, else by ``eps / MAX``; values are divided by it (multiplied by its
    rounded reciprocal where it is given or per tensor), clamped to +-MAX and rounded to nearest even. These are
    the formulas of the kernels that vLLM ships, bit for bit on finite data that are not all zero.

    Args:
        x: float32, float16 or bfloat16 ``[..., cols]`` on any device, last axis contiguous.
        dtype: one of the four FP8 formats, as a name or as a dtype of any framework.
        group_shape: ``(rows, cols)`` of the elements that share a scale; -1 spans the axis.
        scale: a given scale (static quantization): a number, or an fp32 array of one number or one a group.
        scale_ub: an upper bound of amax, per token only: a number or an fp32 array of one.
        scale_format: "ue8m0" raises scales to powers of two, "ue8m0_bytes" gives them as float8_e8m0fnu.
        scale_layout: "mn" stores the scales of ``[m, k]`` as ``[k / g][m]``, as block-scaled products want them.
        eps: the least amax of groups that are neither a token nor the tensor.
        rows_padded: give at least so many rows; the added ones hold zeros and scale 1.
        out: an FP8 array for the data, or a pair of arrays for data and scale.
        stream: the stream to launch on; by default the one that the framework of x works on. It is made to wait
            for the work that x's framework has under way, and x may be dropped as soon as the call returns.

    Returns:
        ``Quantized(data, scale)`` in the framework of x: data shaped like x; scale ``[1]`` per tensor, else with x's
        leading axes, as in ``[..., 1]`` per token and ``[..., ceil(cols / g)]`` for groups of 1xg.

    Raises:
        DTypeError, ShapeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.

    Example:
        >>> import numpy as np, fp8core
        >>> data, scale = fp8core.quantize(np.array([[1.0, -448.0]], np.float32))
        >>> data.dtype, scale
        (dtype(float8_e4m3fn), array([[1.]], dtype=float32))
    """
    data, kept = (None, scale) if out is None else split(out, scale)
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    options = (dtype, group_shape, scale is not None, bound, scale_format, scale_layout, eps, rows_padded)
    arrays, group = _QUANTIZE((x, data, kept, upper), options, stream)
    return quantized(arrays[DATA], arrays[SCALE], group)


def _describe_quantize(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, data, scale, upper = operands
    assert x is not None
    specs.is_wide(x)
    at = specs.matrix(x)
    shape, rows = _padded(x, at, options[-1])
    how = scaling(ScaleOptions(*options[:-1]), x, shape, scale, upper)
    stride = at.cols
    if data is not None:
        specs.same_device(x, data)
        stride = specs.written(data, shape, how.dtype).stride
    problem = quantize_problem(x, at, how, rows, data, stride)
    results = {DATA: NewArray(shape, how.dtype)}
    if not how.given:
        results[SCALE] = new_scale(how)

    def plan() -> Planned:
        if not rows * at.cols and not how.computed():
            return Planned(None)
        numbers = QuantizeNumbers(at.stride, stride, *how.strides, at.rows, rows, how.upper, how.eps)
        return Planned(QUANTIZE.plan(problem).bind(numbers))

    return Described(results, plan, lambda: QUANTIZE.explain(problem), how.group_shape)


def _padded(x: TensorSpec, at: Matrix, rows_padded: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape of the codes of ``x``, and their rows."""
    if rows_padded is None:
        return x.shape, at.rows
    wanted = specs.whole_number(rows_padded)
    if wanted is None:
        raise ShapeError(f"rows_padded needs a whole number, got {rows_padded!r}")
    if wanted <= at.rows:
        return x.shape, at.rows
    if len(x.shape) != 2:
        raise ShapeError(f"rows_padded needs x with two axes, got shape {x.shape}")
    return (wanted, at.cols), wanted


def quantize_problem(
    x: TensorSpec, at: Matrix, how: Scaling, rows: int, data: TensorSpec | None, data_stride: int
) -> Quantize:
    """Return the quantization of ``x`` to ``rows`` rows of codes, ``data_stride`` apart, as a problem.

    Where one scale is found for a tensor without gaps, it is one long row: only its beginning counts.
    """
    data_at = specs.ALIGNMENT if data is None else data.alignment
    strides = at.stride, data_stride
    if at.stride == data_stride == at.cols and rows == at.rows and not how.given and how.group_shape == PER_TENSOR:
        strides = (0, 0)
    return Quantize(
        target=x.target,
        x=x.dtype,
        data=how.dtype,
        group_shape=how.group_shape,
        static=how.given,
        scale_format=how.scale_format,
        scale_layout=how.layout,
        cols=at.cols,
        alignment=codes_alignment(x, strides[0], data_at, strides[1]),
    )


def _operation(x: str) -> Operation:
    names = Operand(x, *WIDE), Operand("out", *FORMATS), Operand("scale", *SCALES), Operand("scale_ub", "float32")
    return Operation(names, _describe_quantize, numbers=(SCALE,), returned=(SCALE,))


_QUANTIZE: Final = _operation("x")
_QUANTIZE_WEIGHT: Final = _operation("weight")


def quantize_weight(weight: object, dtype: object, group_shape: GroupShape) -> Quantized:
    """Return `quantize` of what errors call ``weight``."""
    options = dtype, group_shape, False, None, "float32", "k", EPS, None
    arrays, group = _QUANTIZE_WEIGHT((weight, None, None, None), options)
    return quantized(arrays[DATA], arrays[SCALE], group)


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
    """Return ``float(q) * scale``, formed in fp32 and rounded once to ``dtype``.

    Args:
        q: FP8 ``[..., cols]``, or a `Quantized`, which brings its scale and group shape.
        scale: a number, or fp32 or float8_e8m0fnu of one number or one a group of q.
        group_shape: the groups of the scale. It may be left out where the scale's shape can mean one thing only: along
            each axis of q one scale, or one an element.
        dtype: float32, float16 or bfloat16.
        out: an array of that dtype and of q's shape for the result.
        stream: the stream to launch on; by default the one that the framework of q works on.

    Raises:
        ScaleError: several group shapes explain the scale's shape, and none was given.
        DTypeError, ShapeError, LayoutError, DeviceError: before anything is launched or written.

    Example:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[2.0, -3.0]], np.float32))
        >>> fp8core.dequantize(q).round(2).tolist()
        [[2.0, -3.0]]
    """
    known = None
    if scale is None or isinstance(q, Quantized):
        q, scale, known = parts(q, scale, "q", "scale")
    if known is not None and group_shape is not None and known != specs.group(group_shape):
        raise ScaleError(f"group_shape needs to be that of q, {tuple(known)}, or left out, got {group_shape}")
    return _DEQUANTIZE((q, scale, out), (known or group_shape, dtype), stream)[0][2]


def _describe_dequantize(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    q, scale, out = operands
    assert q is not None
    scale = specs.required(scale, "scale")
    specs.is_fp8(q)
    at = specs.matrix(q)
    scale_shapes.is_scale(scale, bytes_allowed=True)
    specs.same_device(q, scale)
    group = scale_shapes.implied_group(scale, q) if options[0] is None else specs.group(options[0])
    group, strides = scale_shapes.of_groups(scale, group, q)
    wide = dtype_name(options[1], "dtype", WIDE)
    stride, out_at = at.cols, specs.ALIGNMENT
    if out is not None:
        specs.same_device(q, out)
        stride, out_at = specs.written(out, q.shape, wide).stride, out.alignment
    problem = _dequantize_problem(q, at, scale, group, wide, out_at, stride)

    def plan() -> Planned:
        if not at.rows * at.cols:
            return Planned(None)
        numbers = DequantizeNumbers(at.stride, *strides, stride, at.rows)
        return Planned(DEQUANTIZE.plan(problem).bind(numbers))

    return Described({2: NewArray(q.shape, wide)}, plan, lambda: DEQUANTIZE.explain(problem))


def _dequantize_problem(
    q: TensorSpec, at: Matrix, scale: TensorSpec, group: GroupShape, wide: str, out_at: int, out_stride: int
) -> Dequantize:
    size = ITEMSIZE[wide]
    return Dequantize(
        target=q.target,
        q=q.dtype,
        out=wide,
        group_shape=group,
        scale_format="ue8m0_bytes" if scale.dtype == "float8_e8m0fnu" else "float32",
        cols=at.cols,
        alignment=specs.alignment(out_at, out_stride * size, q.alignment * size, at.stride * size),
    )


_DEQUANTIZE: Final = Operation(
    (Operand("q", *FORMATS), Operand("scale", *SCALES), Operand("out", *WIDE)), _describe_dequantize, numbers=(1,)
)
