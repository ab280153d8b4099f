"""Weights: fused shards at one scale, scales a channel, and the way between the two E4M3 formats."""

from collections.abc import Sequence
from typing import Any

from fp8core import interop
from fp8core.core import operands, scales
from fp8core.errors import DTypeError, LayoutError, ScaleError, ShapeError
from fp8core.interop import TensorView
from fp8core.kernels.weights import ALL_CLOSE, EXPAND, NORMALIZE, REQUANTIZE
from fp8core.ops.quantize import dequantize
from fp8core.problem import PER_TENSOR, AllClose, Expand, Normalize, Requantize
from fp8core.runtime import device


def _shard_scales(weight_scale: object, logical_widths: Sequence[int], name: str) -> tuple[TensorView, int]:
    view = interop.view(weight_scale, name)
    scales.is_scale(view, name)
    if any(width < 0 for width in logical_widths):
        raise ShapeError(f"logical_widths needs widths of at least 0, got {list(logical_widths)}")
    count = _contiguous(view, name)
    if count not in (1, len(logical_widths)):
        raise ScaleError(f"{name} needs one scale, or one for each of {len(logical_widths)} shards, got {view.shape}")
    return view, count


def _contiguous(view: TensorView, name: str) -> int:
    """Return the number of elements of an array that lies in memory without gaps."""
    count = 1
    for size, step in zip(reversed(view.shape), reversed(view.strides), strict=True):
        if size > 1 and step != count and 0 not in view.shape:
            raise LayoutError(f"{name} needs contiguous memory, got shape {view.shape} with strides {view.strides}")
        count *= size
    return count


def requantize_with_max_scale(
    weight: object,
    weight_scale: object,
    logical_widths: Sequence[int],
    *,
    out: object = None,
    stream: object = None,
) -> tuple[Any, Any]:
    """Return ``(max_scale, weight)``: every shard of a fused weight re-expressed at the largest scale.

    A code becomes ``float(code) * scale * (1 / max_scale)``, in fp32, clamped and rounded once to nearest even;
    shards whose scale is the largest keep their bytes. When any scale beyond the first is the mark of a scale that
    was never loaded (the lowest float, or anything <= -448), the checkpoint was fused on disk and its first scale is
    the result: nothing is requantized. That is decided on the device: one launch, no synchronisation. A largest scale
    of 0, infinity or NaN leaves the codes as they are too, for no code could say it better.

    Args:
        weight: FP8 ``[sum(logical_widths), k]``, rows contiguous.
        weight_scale: fp32, one scale a shard, or a single one (0-d too), which leaves nothing to do.
        logical_widths: the rows of each shard; zeros are fine.
        out: where the weight goes; without it the weight is changed in place (arrays of JAX, which cannot
            be, give a new one).
        stream: the stream to launch on.

    Returns:
        The scale as a 0-d fp32 array, and the weight (``out`` when given).

    Raises:
        ShapeError: the widths do not add up to the rows.
        ScaleError: neither one scale nor one a shard.
    """
    view = interop.view(weight, "weight")
    operands.is_fp8(view, "weight")
    at = operands.matrix(view, "weight")
    given, count = _shard_scales(weight_scale, logical_widths, "weight_scale")
    operands.same_device(view, "weight", weight_scale=given)
    if sum(logical_widths) != at.rows:
        raise ShapeError(f"logical_widths {list(logical_widths)} need to add up to the {at.rows} rows of weight")
    framework, target, new = view.framework, view.target, None
    if out is not None:
        there = interop.view(out, "out", written=True)
        operands.same_device(view, "weight", out=there)
        pointer, stride = there.pointer, operands.written(there, "out", view.shape, view.dtype).stride
    work = interop.stream_of(view, stream, given)
    pool = None if stream is None else work
    if out is None and framework.immutable:
        new = framework.empty(view.shape, view.dtype, target, None, pool)
        pointer, stride = new.pointer, at.cols
    elif out is None:
        interop.view(weight, "weight", written=True)
        pointer, stride = view.pointer, operands.written(view, "weight", view.shape, view.dtype).stride
    max_scale = framework.empty((), "float32", target, None, pool)
    bits = operands.alignment(view.pointer, at.stride, pointer, stride)
    plan = REQUANTIZE.plan(Requantize(target, view.dtype, len(logical_widths), at.cols, bits))
    plan(
        work,
        view.pointer,
        at.stride,
        given.pointer,
        count,
        tuple(int(width) for width in logical_widths),
        pointer,
        stride,
        max_scale.pointer,
    )
    if new is not None:
        return framework.give(max_scale.array, work), framework.give(new.array, work)
    return framework.give(max_scale.array, work), weight if out is None else out


def convert_to_channelwise(weight_scale: object, logical_widths: Sequence[int], *, stream: object = None) -> Any:
    """Return one scale a row, ``[sum(logical_widths), 1]`` fp32, from one scale a shard: nothing is lost.

    Args:
        weight_scale: fp32, one scale a shard, or a single one for all.
        logical_widths: the rows of each shard.
        stream: the stream to launch on.
    """
    given, count = _shard_scales(weight_scale, logical_widths, "weight_scale")
    rows = sum(logical_widths)
    work = interop.stream_of(given, stream)
    result = given.framework.empty((rows, 1), "float32", given.target, None, None if stream is None else work)
    if rows:
        plan = EXPAND.plan(Expand(given.target, len(logical_widths)))
        plan(work, given.pointer, count, tuple(int(width) for width in logical_widths), result.pointer)
    return given.framework.give(result.array, work)


def per_tensor_dequantize(q: object, scale: object, *, stream: object = None) -> Any:
    """Return ``float(q) * scale`` as float16, formed in fp32 and rounded once.

    Args:
        q: FP8 ``[..., cols]``.
        scale: one fp32 number.
        stream: the stream to launch on.
    """
    return dequantize(q, scale, group_shape=PER_TENSOR, dtype="float16", stream=stream)


def normalize_e4m3fn_to_e4m3fnuz(
    weight: object, weight_scale: object, input_scale: object = None, *, out: object = None, stream: object = None
) -> tuple[Any, Any, Any]:
    """Return the same real values in AMD's e4m3fnuz: ``(weight, weight_scale, input_scale)``.

    A byte stands for half as much in fnuz, so scales double; 0x80 (-0) becomes 0x00, the NaN bytes 0x7f and
    0xff become 0x80, all other bytes stay.

    Args:
        weight: float8_e4m3fn, contiguous, of any shape.
        weight_scale: fp32, contiguous, of any shape.
        input_scale: like weight_scale, or None.
        out: memory for the new weight; ``out=weight`` converts in place and gives an array over that memory.
        stream: the stream to launch on.
    """
    return _normalized(weight, "float8_e4m3fn", "float8_e4m3fnuz", weight_scale, input_scale, out, stream)


def normalize_e4m3fnuz_to_e4m3fn(
    weight: object, weight_scale: object, input_scale: object = None, *, out: object = None, stream: object = None
) -> tuple[Any, Any, Any]:
    """Return the same real values in OCP's e4m3fn: the way back from `normalize_e4m3fn_to_e4m3fnuz`.

    Scales are halved and 0x80 (NaN) becomes 0x7f. The bytes 0x7f and 0xff (+-240, at the halved scale +-480) have
    no counterpart and become +-448, the nearest.
    """
    return _normalized(weight, "float8_e4m3fnuz", "float8_e4m3fn", weight_scale, input_scale, out, stream)


def _normalized(
    weight: object, old: str, new: str, weight_scale: object, input_scale: object, out: object, stream: object
) -> tuple[Any, Any, Any]:
    view = interop.view(weight, "weight")
    if view.dtype != old:
        raise DTypeError(f"weight needs {old}, got {view.dtype}")
    count = _contiguous(view, "weight")
    given = interop.view(weight_scale, "weight_scale")
    scales.is_scale(given, "weight_scale")
    scale_count = _contiguous(given, "weight_scale")
    of_input = interop.view(input_scale, "input_scale") if input_scale is not None else None
    operands.same_device(view, "weight", weight_scale=given, input_scale=of_input)
    framework, target = view.framework, view.target
    if of_input is not None:
        scales.is_scale(of_input, "input_scale")
    input_count = _contiguous(of_input, "input_scale") if of_input is not None else 0
    if out is not None:
        there = interop.view(out, "out", written=True)
        operands.same_device(view, "weight", out=there)
        if there.dtype not in (old, new):
            raise DTypeError(f"out needs {new}, or {old} as for weight itself, got {there.dtype}")
        operands.check_written(there, "out", view.shape, there.dtype)
        _contiguous(there, "out")
        pointer = there.pointer
    work = interop.stream_of(view, stream, given, *(() if of_input is None else (of_input,)))
    pool = None if stream is None else work
    if out is None:
        result = framework.empty(view.shape, new, target, None, pool)
        pointer = result.pointer
    new_scale = framework.empty(given.shape, "float32", target, None, pool)
    new_input = framework.empty(of_input.shape, "float32", target, None, pool) if of_input is not None else None
    plan = NORMALIZE.plan(Normalize(target, old, operands.alignment(view.pointer, pointer)))
    plan(
        work,
        view.pointer,
        pointer,
        count,
        given.pointer,
        new_scale.pointer,
        scale_count,
        of_input.pointer if of_input is not None else 0,
        new_input.pointer if new_input is not None else 0,
        input_count,
    )
    return (
        framework.give(result.array, work) if out is None else framework.reinterpret(out, new),
        framework.give(new_scale.array, work),
        framework.give(new_input.array, work) if new_input is not None else None,
    )


def all_close_1d(x: object, *, stream: object = None) -> bool:
    """Return whether all scales equal the first within rtol 1e-5 and atol 0: one reduction, one synchronisation.

    Args:
        x: fp32 with one axis. Empty is True; a NaN anywhere is False.
        stream: the stream to launch on.
    """
    view = interop.view(x, "x")
    scales.is_scale(view, "x")
    if len(view.shape) != 1:
        raise ShapeError(f"x needs one axis, got shape {view.shape}")
    count = _contiguous(view, "x")
    if count == 0:
        return True
    work = interop.stream_of(view, stream)
    flag = view.framework.scratch(4, view.target, None if stream is None else work)
    ALL_CLOSE.plan(AllClose(view.target))(work, view.pointer, count, flag.pointer)
    return device.read_int32(flag.pointer, view.target, work) != 0
