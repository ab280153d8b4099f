"""Quantize and dequantize: FP8 data and scales such that ``data * scale`` is nearest to the values."""

from types import SimpleNamespace
from typing import Any

from fp8core import interop
from fp8core.core import operands, scales, signature
from fp8core.core.calls import Calls
from fp8core.core.scaling import EPS, Quantized, Ready, Scaling, alignment, destination, only_scale, scaling
from fp8core.errors import ShapeError
from fp8core.interop import TensorView
from fp8core.kernels.quantize import QUANTIZE, bind
from fp8core.kernels.weights import DEQUANTIZE
from fp8core.problem import ITEMSIZE, PER_TOKEN, Dequantize, Quantize, ScaleFormat, ScaleLayout

_CALLS: Calls[Ready] = Calls()
"""Their launches want the stream and the addresses of x, data, scale and scale_ub."""


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
    if out is None and scale is None:  # half of the looks
        (x_at,), looks = signature.looks(x)
        data, kept, data_at, scale_at = None, None, 0, 0
    else:
        data, out_scale = out if isinstance(out, tuple) else (out, None)
        kept = out_scale if scale is None else only_scale(scale, out_scale)
        (x_at, data_at, scale_at), looks = signature.looks(x, data, kept)
    key = None
    if looks is not None and (scale_ub is None or isinstance(scale_ub, float)):
        bits = (x_at | data_at) & 15
        given = scale is None
        key = (looks, given, bits, dtype, group_shape, scale_ub, scale_format, scale_layout, eps, rows_padded)
    call = _CALLS.get(key) if stream is None else None
    if call is not None:
        return call.to.filled(call.launch, call.stream(), None, x_at, data, data_at, kept, scale_at, 0)
    view, at, how, rows_out = _described(
        x, dtype, group_shape, scale, scale_ub, scale_format, scale_layout, eps, rows_padded
    )
    shape = view.shape if rows_out == at.rows else (rows_out, at.cols)
    to = destination(view, how, shape, rows_out, at.cols, data, kept)
    launch = None
    if rows_out * at.cols or how.computed(rows_out, at.cols):
        bits = alignment(view, at, how, rows_out, to.data_at, to.data_stride)
        launch = bind(
            QUANTIZE.plan(_key(view, how, at.cols, bits)),
            at.stride,
            to.data_stride,
            *to.scale_strides,
            at.rows,
            rows_out,
            how.upper_value,
            how.eps,
        )
    _CALLS.keep(key, Ready(view.framework.asking_stream(view.target), launch, to))
    work = interop.stream_of(view, stream, *how.others)
    pool = None if stream is None else work
    return to.filled(launch, work, pool, view.pointer, data, to.data_at, kept, to.scale_at, how.upper_pointer)


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
    view = interop.view(x, "x")
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
    view, at, how, rows_out = _described(
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
    there = interop.view(data, "out") if data is not None else None
    stride = operands.matrix(there, "out").stride if there is not None else at.cols
    bits = alignment(view, at, how, rows_out, there.pointer if there is not None else 0, stride)
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
    view = interop.view(q, "q")
    problem, at, given, strides = _dequantize_problem(view, scale, group_shape, dtype)
    if out is not None:
        there = interop.view(out, "out", written=True)
        operands.same_device(view, "q", out=there)
        pointer, stride, result = there.pointer, operands.written(there, "out", view.shape, problem.out).stride, None
        work = interop.stream_of(view, stream, given)
    else:
        work = interop.stream_of(view, stream, given)
        result = view.framework.empty(view.shape, problem.out, view.target, None, None if stream is None else work)
        pointer, stride = result.pointer, at.cols
    if at.rows * at.cols:
        size = ITEMSIZE[problem.out]
        bits = operands.alignment(pointer, stride * size, view.pointer * size, at.stride * size)
        plan = DEQUANTIZE.plan(problem._replace(alignment=bits))
        plan(work, view.pointer, at.stride, given.pointer, *strides, pointer, stride, at.rows)
    return out if result is None else view.framework.give(result.array, work)


def _dequantize_problem(
    view: TensorView, scale: object, group_shape: tuple[int, int] | None, dtype: object
) -> tuple[Dequantize, operands.Matrix, TensorView, tuple[int, int]]:
    operands.is_fp8(view, "q")
    at = operands.matrix(view, "q")
    given = interop.view(scale, "scale")
    scales.is_scale(given, "scale", bytes_allowed=True)
    operands.same_device(view, "q", scale=given)
    if group_shape is None:
        shape = scales.implied_group(given, at.rows, at.cols, "scale")
    else:
        shape = operands.group(group_shape)
    shape, strides = scales.of_groups(given, shape, at.rows, at.cols, "scale")
    wide = operands.wide_name(interop.dtype_name(dtype), "dtype")
    scale_format: ScaleFormat = "ue8m0_bytes" if given.dtype == "float8_e8m0fnu" else "float32"
    size = ITEMSIZE[wide]
    bits = operands.alignment(at.cols * size, view.pointer * size, at.stride * size)
    return Dequantize(view.target, view.dtype, wide, shape, scale_format, at.cols, bits), at, given, strides


def problem_of_dequantize(call: SimpleNamespace) -> Dequantize:
    """Return the problem that `dequantize` with the arguments ``call`` poses."""
    return _dequantize_problem(interop.view(call.q, "q"), call.scale, call.group_shape, call.dtype)[0]
