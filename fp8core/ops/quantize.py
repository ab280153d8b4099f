"""Quantization: FP8 data and scales such that ``data * scale`` is nearest to the values."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core.core import checks, specs
from fp8core.core.calls import Described, Planned
from fp8core.core.operation import Operation
from fp8core.core.scaling import (
    EPS,
    SCALES,
    ScaleOptions,
    Scaling,
    codes_alignment,
    default_eps,
    number_or_operand,
    results_of,
    scaling,
    split,
)
from fp8core.core.specs import Matrix, TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import ShapeError
from fp8core.interop import Operand, ScaleOperand, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops.quantized import Quantized, quantized
from fp8core.problem import PER_TENSOR, PER_TOKEN, Quantize, ScaleFormat, ScaleLayout
from fp8core.runtime.plans import QuantizeNumbers
from fp8core.types import ArrayT, CupyT, NumpyArray, QuantizeKeywords, Untyped

DATA, SCALE = 1, 2
"""Indices among the operands of a quantization."""


@overload
def quantize(x: Untyped, **keywords: Unpack[QuantizeKeywords]) -> Any: ...
@overload
def quantize(x: CupyT, **keywords: Unpack[QuantizeKeywords]) -> Quantized[Float8Array, CupyT]: ...
@overload
def quantize(x: NumpyArray, **keywords: Unpack[QuantizeKeywords]) -> Quantized[NumpyArray, NumpyArray]: ...
@overload
def quantize(x: ArrayT, **keywords: Unpack[QuantizeKeywords]) -> Quantized[ArrayT, ArrayT]: ...
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
) -> Any:
    """Return FP8 data and scales such that ``data * scale`` is nearest to ``x``.

    For each group, in float32:

    - ``scale = amax / MAX``, where amax is the largest magnitude of the group, NaN aside (0 if there is nothing else),
      and MAX is 448 for float8_e4m3fn, 224 for float8_e4m3fnuz and 57344 for both e5m2 formats;
    - lower bounds: the scale is at least 2**-126 per tensor, and at least ``1 / (MAX * 512)`` per token; for any other
      group shape amax is at least ``eps``;
    - ``data = round(clamp(x / scale, -MAX, MAX))``, rounded to nearest even. Per tensor and with a given scale, x is
      multiplied by the rounded reciprocal of the scale instead of divided.

    These are the formulas of the kernels in vLLM (``csrc/quantization``: ``scaled_fp8_quant``,
    ``per_token_group_quant_fp8``); the results are equal bit for bit, except for NaN, infinities, tensors of zeros, and
    the least scales that are powers of two (concepts/numerics.md). The formats are those of Micikevicius et al. 2022
    (arXiv:2209.05433), the fnuz formats those of Noune et al. 2022 (arXiv:2206.02915). Groups of 1x128 and blocks of
    128x128 are those of DeepSeek-V3 (arXiv:2412.19437).

    Args:
        x: float32, float16 or bfloat16 ``[..., cols]`` on any device, last axis contiguous.
        dtype: the FP8 format, as a name or as a dtype of any framework.
        group_shape: ``(rows, cols)`` of the elements that share a scale; -1 spans the axis.
        scale: a given scale (static quantization): a number, or a float32 or float8_e8m0fnu array of one number or of
            one per group. One number holds for all of x, whatever group_shape is.
        scale_ub: an upper bound of amax, per token only: a number or a float32 array of one.
        scale_format: "ue8m0" rounds computed scales up to powers of two; "ue8m0_bytes" does the same and returns them
            as float8_e8m0fnu (OCP Microscaling Formats 1.0). A given scale keeps its format: both are refused beside
            it, except "ue8m0_bytes" beside such bytes.
        scale_layout: "mn" stores the scales of ``[m, k]`` as ``[k / g][m]``, the layout that block-scaled products
            read. It is refused beside a given scale, and beside an array for the scale that is laid out otherwise.
        eps: the lower bound of the amax of groups and blocks, 1e-10 by default and at least ``MAX * 2**-126``. Per
            token, per tensor and with a given scale, any other value than 1e-10 is refused.
        rows_padded: the least number of rows of the result, at most 2**31 - 1; added rows hold zeros and scale 1. An x
            that gets rows has two axes.
        out: an FP8 array for the data, or a tuple of two arrays, for data and scale.
        stream: the stream to launch on; by default the current stream of the framework of x. It waits for pending work
            of x's framework, and x may be dropped as soon as the call returns.

    Returns:
        Quantized: ``data, scale`` in the framework of x. The data has the shape of x, or more rows with rows_padded.
            The scale has shape ``[1]`` per tensor, otherwise it keeps x's leading axes: ``[..., 1]`` per token,
            ``[..., ceil(cols / g)]`` for groups of 1xg.

    Raises:
        DTypeError: the call does not take the dtype of x or of another array, or eps is no number.
        ShapeError: a shape, group_shape or rows_padded does not fit x.
        LayoutError: x cannot be read by rows without a copy, ``out`` overlaps another array, or scale_layout is
            neither of the two, or does not fit ``out`` or a given scale.
        ScaleError: scale, scale_ub, scale_format or eps do not go together, or one has a value that is not allowed.
        DeviceError: the arrays are on several devices, or stream is not a stream. All errors are raised before
            anything is launched or written.

    Examples:
        >>> import numpy as np, fp8core
        >>> data, scale = fp8core.quantize(np.array([[1.0, -448.0]], np.float32))
        >>> data.dtype, scale
        (dtype(float8_e4m3fn), array([[1.]], dtype=float32))
        >>> q = fp8core.quantize(np.ones((4, 256), np.float32), group_shape=fp8core.GROUP_128)
        >>> q.scale.shape
        (4, 2)
    """
    data, kept = (None, scale) if out is None else split(out, scale)
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    if type(eps) is not float:
        eps = checks.number(eps, "eps")
    options = (dtype, group_shape, scale is not None, bound, scale_format, scale_layout, eps, rows_padded)
    arrays, group = QUANTIZE_CALLS((x, data, kept, upper), options, stream)
    return quantized(arrays[DATA], arrays[SCALE], group)


def _describe_quantize(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, data, scale, upper = operands
    x = specs.required(x, "x")
    specs.check_high_precision(x)
    at = specs.matrix(x)
    shape, rows = _padded(x, at, options[-1])
    how = scaling(ScaleOptions(*options[:-1]), x, shape, scale, upper)
    stride = specs.result_stride(data, x, shape, how.dtype)
    problem = quantize_problem(x, at, how, rows, data, stride)

    def plan() -> Planned:
        if not rows * at.cols and not how.computed():
            return Planned(None)
        numbers = QuantizeNumbers(at.stride, stride, *how.strides, at.rows, rows, how.upper, how.eps)
        return Planned(QUANTIZE.plan(problem).bind(numbers))

    return Described(results_of(how, shape, DATA), plan, lambda: QUANTIZE.explain(problem), how.group_shape)


def _padded(x: TensorSpec, at: Matrix, rows_padded: Any) -> tuple[tuple[int, ...], int]:
    """Return the shape of the codes of ``x``, and the number of their rows."""
    if rows_padded is None:
        return x.shape, at.rows
    wanted = checks.least_rows(rows_padded, "rows_padded")
    if wanted <= at.rows:
        return x.shape, at.rows
    if len(x.shape) != 2:
        raise ShapeError(f"{x.name} needs two axes to be padded to {wanted} rows, got shape {x.shape}")
    return (wanted, at.cols), wanted


def quantize_problem(
    x: TensorSpec, at: Matrix, how: Scaling, rows: int, data: TensorSpec | None, data_stride: int
) -> Quantize:
    """Return the problem of quantizing ``x`` to ``rows`` rows of codes with stride ``data_stride``.

    A contiguous tensor with one computed scale counts as one long row: only the alignment of its start matters.
    """
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
        alignment=codes_alignment(x, strides[0], specs.alignment_of(data), strides[1]),
    )


def quantize_operation(x: str = "x", out: str = "out", scale: str = "scale", scale_ub: str = "scale_ub") -> Operation:
    """Return a quantization operation whose error messages use these names of operands."""
    names = (
        Operand(x, *HIGH_PRECISION),
        Operand(out, *FORMATS),
        ScaleOperand(scale, *SCALES),
        ScaleOperand(scale_ub, "float32"),
    )
    return Operation(names, _describe_quantize, numbers=(SCALE,), returned=(SCALE,))


QUANTIZE_CALLS: Final = quantize_operation()


@eager_only
def quantize_by(
    operation: Operation,
    x: object,
    dtype: object,
    group_shape: object,
    *,
    scale: object = None,
    scale_ub: object = None,
    rows_padded: int | None = None,
    out: object = None,
) -> Quantized[Any, Any]:
    """Call `quantize` through an operation whose error messages use the operand names of another function."""
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    options = dtype, group_shape, scale is not None, bound, "float32", "k", default_eps(), rows_padded
    arrays, group = operation((x, out, scale, upper), options)
    return quantized(arrays[DATA], arrays[SCALE], group)
