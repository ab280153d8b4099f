"""Quantize and dequantize: FP8 data and scales such that ``data * scale`` is nearest to the values."""

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from fp8core import arrays
from fp8core.arrays import TensorView
from fp8core.errors import LayoutError, ScaleError, ShapeError
from fp8core.kernels.dequantize import DEQUANTIZE
from fp8core.kernels.quantize import QUANTIZE
from fp8core.ops import operands, scales
from fp8core.problem import (
    FORMATS,
    ITEMSIZE,
    PER_TENSOR,
    PER_TOKEN,
    Dequantize,
    GroupShape,
    Quantize,
    ScaleFormat,
    ScaleLayout,
)

EPS = 1e-10
"""The least amax of a group, as the kernels that vLLM ships have it."""
SCALE_DTYPE = {"float32": "float32", "ue8m0": "float32", "ue8m0_bytes": "float8_e8m0fnu"}


class Quantized(NamedTuple):
    """FP8 data and the scales to multiply them by."""

    data: Any
    scale: Any


class Scaling(NamedTuple):
    """How a result is scaled: what `quantize` and the fused producers share."""

    dtype: str
    group_shape: GroupShape
    given: TensorView | None
    strides: tuple[int, int]
    scale_format: ScaleFormat
    layout: ScaleLayout
    upper: TensorView | None
    upper_value: float
    eps: float

    @property
    def others(self) -> tuple[TensorView, ...]:
        """The operands beside x."""
        if self.given is not None:
            return (self.given,)
        return () if self.upper is None else (self.upper,)

    @property
    def upper_pointer(self) -> int:
        """The address of scale_ub, 0 where it is a number or absent."""
        return 0 if self.upper is None else self.upper.pointer

    def computed(self, rows: int, cols: int) -> int:
        """Return how many scales of a ``rows`` x ``cols`` result have to be computed."""
        return 0 if self.given is not None else math.prod(self.group_shape.scale_shape(rows, cols))


def scaling(
    dtype: object,
    group_shape: tuple[int, int],
    scale: object,
    scale_ub: object,
    scale_format: ScaleFormat,
    scale_layout: ScaleLayout,
    eps: float,
    x: TensorView,
    rows: int,
    cols: int,
) -> Scaling:
    """Check everything that says how to scale a ``rows`` x ``cols`` result next to ``x``."""
    name = operands.fp8_name(arrays.dtype_name(dtype), "dtype")
    shape = operands.group(group_shape)
    if scale_format not in SCALE_DTYPE:
        raise ScaleError(f"scale_format needs one of {', '.join(SCALE_DTYPE)}, got {scale_format!r}")
    if scale_layout not in ("k", "mn"):
        raise LayoutError(f"scale_layout needs 'k' or 'mn', got {scale_layout!r}")
    smallest = FORMATS[name].maximum * 2.0**-126
    if not smallest <= eps < math.inf:
        raise ScaleError(f"eps needs a number of at least {smallest:.3g}, so that no scale is subnormal, got {eps}")
    if scale is not None:
        given = arrays.view(scale, "scale")
        scales.is_scale(given, "scale", bytes_allowed=True)
        operands.same_device(x, "x", scale=given)
        if scale_ub is not None:
            raise ScaleError("scale_ub bounds a scale that is computed; got it together with a given scale")
        format_: ScaleFormat = "ue8m0_bytes" if given.dtype == "float8_e8m0fnu" else "float32"
        shape, strides = scales.of_groups(given, shape, rows, cols, "scale")
        return Scaling(name, shape, given, strides, format_, "k", None, math.inf, eps)
    upper, upper_value = _upper(scale_ub, shape, x)
    return Scaling(name, shape, None, (0, 0), scale_format, scale_layout, upper, upper_value, eps)


def _upper(scale_ub: object, shape: GroupShape, x: TensorView) -> tuple[TensorView | None, float]:
    if scale_ub is None:
        return None, math.inf
    if shape != PER_TOKEN:
        raise ScaleError(f"scale_ub bounds amax per token; got it with groups {tuple(shape)}")
    if isinstance(scale_ub, int | float):
        if not scale_ub > 0:
            raise ScaleError(f"scale_ub needs a positive number, got {scale_ub}")
        return None, float(scale_ub)
    view = arrays.view(scale_ub, "scale_ub")
    scales.is_scale(view, "scale_ub")
    scales.one_number(view, "scale_ub")
    operands.same_device(x, "x", scale_ub=view)
    return view, math.inf


class Destination(NamedTuple):
    """Where codes and scales go: the results (None where the caller gave arrays) and their addresses."""

    data: Any
    scale: Any
    data_pointer: int
    data_stride: int
    scale_pointer: int
    scale_strides: tuple[int, int]


def destination(
    x: TensorView, how: Scaling, shape: tuple[int, ...], rows: int, cols: int, out: object, stream: int | None
) -> Destination:
    """Return where the result goes: checked arrays of the caller (``out``), or new ones of x's framework.

    ``stream`` is the one that the caller gave, if any: new memory has to come from its pool.
    """
    out_data, out_scale = out if isinstance(out, tuple) else (out, None)
    framework = x.framework
    if out_data is not None:
        view = arrays.view(out_data, "out", written=True)
        operands.same_device(x, "x", out=view)
        data, pointer, stride = out_data, view.pointer, operands.written(view, "out", shape, how.dtype).stride
    else:
        result = framework.empty(shape, how.dtype, x.target, None, stream)
        data, pointer, stride = result, result.pointer, cols
    if how.given is not None:
        if out_scale is not None and out_scale is not how.given.owner:
            raise ScaleError("out needs no scale when the scale is given")
        return Destination(data, None, pointer, stride, how.given.pointer, how.strides)
    wanted: tuple[int, ...] = (1,) if how.group_shape == PER_TENSOR else how.group_shape.scale_shape(rows, cols)
    dtype = SCALE_DTYPE[how.scale_format]
    if out_scale is not None:
        view = arrays.view(out_scale, "out scale", written=True)
        operands.same_device(x, "x", out_scale=view)
        operands.check_written(view, "out scale", wanted, dtype)
        strides = view.strides if len(view.strides) == 2 else (0, 0)
        return Destination(data, out_scale, pointer, stride, view.pointer, (strides[0], strides[1]))
    if len(wanted) == 1:
        strides = (0, 0)
        result_scale = framework.empty(wanted, dtype, x.target, None, stream)
    elif how.layout == "mn":
        strides = (1, wanted[0])
        result_scale = framework.empty(wanted, dtype, x.target, strides, stream)
    else:
        strides = (wanted[1], 1)
        result_scale = framework.empty(wanted, dtype, x.target, None, stream)
    return Destination(data, result_scale, pointer, stride, result_scale.pointer, strides)


def delivered(x: TensorView, how: Scaling, where: Destination, out: object, scale: object, stream: int) -> Quantized:
    """Return what the caller gets: its own arrays where it gave some, else results of its framework."""
    out_data, out_scale = out if isinstance(out, tuple) else (out, None)
    data = out_data if out_data is not None else x.framework.give(where.data, stream)
    if how.given is not None:
        return Quantized(data, scale)
    return Quantized(data, out_scale if out_scale is not None else x.framework.give(where.scale, stream))


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
        scale: a given fp32 scale (static quantization): one number, or one a group.
        scale_ub: an upper bound of amax, per token only: a number or an fp32 array of one.
        scale_format: "ue8m0" raises scales to powers of two, "ue8m0_bytes" gives them as float8_e8m0fnu.
        scale_layout: "mn" stores the scales of ``[m, k]`` as ``[k / g][m]``, as block-scaled products want them.
        eps: the least amax of groups that are neither a token nor the tensor.
        rows_padded: give at least so many rows; the added ones hold zeros and scale 1.
        out: an FP8 array for the data, or a pair of arrays for data and scale.
        stream: the stream to launch on; by default the one that the framework of x works on.

    Returns:
        ``Quantized(data, scale)`` in the framework of x: data shaped like x, scale ``[1]`` per tensor, else
        ``[ceil(rows / group rows), ceil(cols / group cols)]`` of x folded to two axes.

    Raises:
        DTypeError, ShapeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.
    """
    view, at, how, rows_out = _described(
        x, dtype, group_shape, scale, scale_ub, scale_format, scale_layout, eps, rows_padded
    )
    shape = view.shape if rows_out == at.rows else (rows_out, at.cols)
    work = arrays.stream_of(view, stream, *how.others)
    where = destination(view, how, shape, rows_out, at.cols, out, None if stream is None else work)
    if rows_out * at.cols or how.computed(rows_out, at.cols):
        bits = operands.octets(view, at.stride, where.data_pointer, where.data_stride)
        plan = QUANTIZE.plan(_key(view, how, at.cols, bits))
        plan(
            work,
            view.pointer,
            at.stride,
            where.data_pointer,
            where.data_stride,
            where.scale_pointer,
            *where.scale_strides,
            at.rows,
            rows_out,
            how.upper_pointer,
            how.upper_value,
            how.eps,
        )
    return delivered(view, how, where, out, scale, work)


def _described(
    x: object,
    dtype: object,
    group_shape: tuple[int, int],
    scale: object,
    scale_ub: object,
    scale_format: ScaleFormat,
    scale_layout: ScaleLayout,
    eps: float,
    rows_padded: int | None,
) -> tuple[TensorView, operands.Matrix, Scaling, int]:
    view = arrays.view(x, "x")
    operands.is_wide(view, "x")
    at = operands.matrix(view, "x")
    rows_out = at.rows
    if rows_padded is not None and rows_padded > at.rows:
        if len(view.shape) != 2:
            raise ShapeError(f"rows_padded needs a matrix, got x of shape {view.shape}")
        rows_out = rows_padded
    how = scaling(dtype, group_shape, scale, scale_ub, scale_format, scale_layout, eps, view, rows_out, at.cols)
    return view, at, how, rows_out


def _key(view: TensorView, how: Scaling, cols: int, bits: int) -> tuple[Any, ...]:
    return (
        view.target,
        view.dtype,
        how.dtype,
        how.group_shape,
        how.given is not None,
        how.scale_format,
        how.layout,
        cols,
        bits,
    )


def problem_of_quantize(call: SimpleNamespace) -> Quantize:
    """Return the problem that `quantize` with the arguments ``call`` poses; new results count as aligned."""
    view, at, how, _ = _described(
        call.x,
        call.dtype,
        call.group_shape,
        call.scale,
        call.scale_ub,
        call.scale_format,
        call.scale_layout,
        call.eps,
        call.rows_padded,
    )
    data = call.out[0] if isinstance(call.out, tuple) else call.out
    there = arrays.view(data, "out") if data is not None else None
    stride = operands.matrix(there, "out").stride if there is not None else at.cols
    bits = operands.octets(view, at.stride, there.pointer if there is not None else 0, stride)
    return Quantize(*_key(view, how, at.cols, bits))


def dequantize(
    q: object,
    scale: object,
    *,
    group_shape: tuple[int, int] | None = None,
    dtype: object = "float32",
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``float(q) * scale``, formed in fp32 and rounded once to ``dtype``.

    Args:
        q: FP8 ``[..., cols]``.
        scale: fp32 or float8_e8m0fnu; a single number, or one a group of q folded to two axes.
        group_shape: the groups of a scale with one axis; a scale with two implies them.
        dtype: float32, float16 or bfloat16.
        out: an array of that dtype and of q's shape for the result.
        stream: the stream to launch on; by default the one that the framework of q works on.
    """
    view = arrays.view(q, "q")
    problem, at, given, strides = _dequantize_problem(view, scale, group_shape, dtype)
    if out is not None:
        there = arrays.view(out, "out", written=True)
        operands.same_device(view, "q", out=there)
        pointer, stride, result = there.pointer, operands.written(there, "out", view.shape, problem.out).stride, None
        work = arrays.stream_of(view, stream, given)
    else:
        work = arrays.stream_of(view, stream, given)
        result = view.framework.empty(view.shape, problem.out, view.target, None, None if stream is None else work)
        pointer, stride = result.pointer, at.cols
    if at.rows * at.cols:
        size = ITEMSIZE[problem.out]
        bits = operands.alignment(pointer, stride * size, view.pointer * size, at.stride * size)
        plan = DEQUANTIZE.plan(problem._replace(alignment=bits))
        plan(work, view.pointer, at.stride, given.pointer, *strides, pointer, stride, at.rows)
    return out if result is None else view.framework.give(result, work)


def _dequantize_problem(
    view: TensorView, scale: object, group_shape: tuple[int, int] | None, dtype: object
) -> tuple[Dequantize, operands.Matrix, TensorView, tuple[int, int]]:
    operands.is_fp8(view, "q")
    at = operands.matrix(view, "q")
    given = arrays.view(scale, "scale")
    scales.is_scale(given, "scale", bytes_allowed=True)
    operands.same_device(view, "q", scale=given)
    if group_shape is None:
        shape = scales.implied_group(given, at.rows, at.cols, "scale")
    else:
        shape = operands.group(group_shape)
    shape, strides = scales.of_groups(given, shape, at.rows, at.cols, "scale")
    wide = operands.wide_name(arrays.dtype_name(dtype), "dtype")
    scale_format: ScaleFormat = "ue8m0_bytes" if given.dtype == "float8_e8m0fnu" else "float32"
    size = ITEMSIZE[wide]
    bits = operands.alignment(at.cols * size, view.pointer * size, at.stride * size)
    return Dequantize(view.target, view.dtype, wide, shape, scale_format, at.cols, bits), at, given, strides


def problem_of_dequantize(call: SimpleNamespace) -> Dequantize:
    """Return the problem that `dequantize` with the arguments ``call`` poses."""
    return _dequantize_problem(arrays.view(call.q, "q"), call.scale, call.group_shape, call.dtype)[0]
