"""Weights: fused shards at one scale, scales a channel, and the way between the two E4M3 formats."""

from collections.abc import Sequence
from typing import Any, Final

from fp8core import interop
from fp8core.core import scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec, contiguous_count
from fp8core.errors import DTypeError, ScaleError, ShapeError
from fp8core.interop import Operand, eager_only
from fp8core.kernels.weights import ALL_CLOSE, EXPAND, NORMALIZE, REQUANTIZE
from fp8core.ops.quantize import dequantize
from fp8core.problem import FORMATS, PER_TENSOR, AllClose, Expand, Normalize, Requantize
from fp8core.runtime import streams
from fp8core.runtime.plans import AllCloseNumbers, ExpandNumbers, NormalizeNumbers, RequantizeNumbers

MOST_ROWS: Final = 2**31 - 1
"""Of fused shards: their ends are 32-bit numbers."""
_WEIGHT: Final = Operand("weight", *FORMATS)
_SCALE: Final = Operand("weight_scale", "float32")


@eager_only
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
        weight_scale: fp32, one scale a shard, or a single one (a number, too), which leaves nothing to do.
        logical_widths: the rows of each shard; zeros are fine.
        out: where the weight goes; without it the weight is changed in place (arrays of JAX, which cannot
            be, give a new one).
        stream: the stream to launch on, as for `quantize`.

    Returns:
        The scale as a 0-d fp32 array, and the weight (``out`` when given).

    Raises:
        ShapeError: the widths do not add up to the rows.
        ScaleError: neither one scale nor one a shard.
        DTypeError, LayoutError, DeviceError: before anything is launched or written.

    Example:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.ones((4, 8), np.float32), group_shape=(-1, -1)).data
        >>> largest, fused = fp8core.requantize_with_max_scale(q, np.array([0.5, 0.25], np.float32), [2, 2])
        >>> float(largest), fused.astype(np.float32)[:, 0].tolist()
        (0.5, [448.0, 448.0, 224.0, 224.0])
    """
    if out is None:
        framework = interop.framework_of(type(weight))
        out = None if framework is None or framework.immutable else weight
    arrays, _ = _REQUANTIZE((weight, weight_scale, out, None), _widths(logical_widths), stream)
    return arrays[3], arrays[2]


def _widths(logical_widths: Any) -> tuple[int, ...]:
    try:
        widths = tuple(specs.extent(width) for width in logical_widths)
    except TypeError as error:
        raise ShapeError(f"logical_widths needs whole numbers, got {logical_widths!r}") from error
    if any(width < 0 for width in widths) or sum(widths) > MOST_ROWS:
        raise ShapeError(f"logical_widths needs widths of at least 0, at most {MOST_ROWS} together, got {list(widths)}")
    return widths


def _shard_count(scale: TensorSpec, widths: tuple[int, ...]) -> int:
    """Return how many scales there are: one, or one a shard."""
    scale_shapes.is_scale(scale)
    count = contiguous_count(scale)
    if count not in (1, len(widths)):
        raise ScaleError(
            f"{scale.name} needs one scale, or one for each of {len(widths)} shards, got shape {scale.shape}"
        )
    return count


def _describe_requantize(operands: Sequence[TensorSpec | None], widths: tuple[int, ...]) -> Described:
    weight, scale, out, _ = operands
    assert weight is not None
    scale = specs.required(scale, "weight_scale")
    specs.is_fp8(weight)
    at = specs.matrix(weight)
    count = _shard_count(scale, widths)
    specs.same_device(weight, scale, out)
    if sum(widths) != at.rows:
        raise ShapeError(f"logical_widths needs to add up to the {at.rows} rows of weight, got {list(widths)}")
    stride = at.cols if out is None else specs.written(out, weight.shape, weight.dtype).stride
    out_at = specs.ALIGNMENT if out is None else out.alignment
    problem = Requantize(
        weight.target, weight.dtype, len(widths), at.cols, specs.alignment(weight.alignment, at.stride, out_at, stride)
    )

    def plan() -> Planned:
        return Planned(REQUANTIZE.plan(problem).bind(RequantizeNumbers(at.stride, count, widths, stride)))

    results = {2: NewArray(weight.shape, weight.dtype), 3: NewArray((), "float32")}
    return Described(results, plan, lambda: REQUANTIZE.explain(problem))


_REQUANTIZE: Final = Operation(
    (_WEIGHT, _SCALE, Operand("out", *FORMATS), "max_scale"), _describe_requantize, in_place=((2, 0),), numbers=(1,)
)


@eager_only
def convert_to_channelwise(weight_scale: object, logical_widths: Sequence[int], *, stream: object = None) -> Any:
    """Return one scale a row, ``[sum(logical_widths), 1]`` fp32, from one scale a shard: nothing is lost.

    Args:
        weight_scale: fp32, one scale a shard, or a single one for all.
        logical_widths: the rows of each shard.
        stream: the stream to launch on, as for `quantize`.

    Raises:
        ScaleError: neither one scale nor one a shard.

    Example:
        >>> import numpy as np, fp8core
        >>> fp8core.convert_to_channelwise(np.array([0.5, 2.0], np.float32), [1, 2]).tolist()
        [[0.5], [2.0], [2.0]]
    """
    return _EXPAND((weight_scale, None), _widths(logical_widths), stream)[0][1]


def _describe_expand(operands: Sequence[TensorSpec | None], widths: tuple[int, ...]) -> Described:
    scale = operands[0]
    assert scale is not None
    count, rows = _shard_count(scale, widths), sum(widths)
    problem = Expand(scale.target, len(widths))

    def plan() -> Planned:
        if not rows:
            return Planned(None)
        return Planned(EXPAND.plan(problem).bind(ExpandNumbers(count, widths)))

    return Described({1: NewArray((rows, 1), "float32")}, plan, lambda: EXPAND.explain(problem))


_EXPAND: Final = Operation((_SCALE, "out"), _describe_expand)


@eager_only
def per_tensor_dequantize(q: object, scale: object, *, stream: object = None) -> Any:
    """Return ``float(q) * scale`` as float16, formed in fp32 and rounded once.

    Args:
        q: FP8 ``[..., cols]``.
        scale: one number, as a number or in an fp32 array.
        stream: the stream to launch on, as for `quantize`.

    Example:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32), group_shape=(-1, -1))
        >>> fp8core.per_tensor_dequantize(q.data, 0.5).tolist()
        [[224.0, -1.0]]
    """
    return dequantize(q, scale, group_shape=PER_TENSOR, dtype="float16", stream=stream)


@eager_only
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
        stream: the stream to launch on, as for `quantize`.

    Raises:
        DTypeError, ShapeError, LayoutError, DeviceError: before anything is launched or written.

    Example:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32))
        >>> weight, scale, _ = fp8core.normalize_e4m3fn_to_e4m3fnuz(*q)
        >>> weight.dtype, float(scale[0, 0])
        (dtype(float8_e4m3fnuz), 2.0)
    """
    return _normalized(weight, "float8_e4m3fn", "float8_e4m3fnuz", weight_scale, input_scale, out, stream)


@eager_only
def normalize_e4m3fnuz_to_e4m3fn(
    weight: object, weight_scale: object, input_scale: object = None, *, out: object = None, stream: object = None
) -> tuple[Any, Any, Any]:
    """Return the same real values in OCP's e4m3fn: the way back from `normalize_e4m3fn_to_e4m3fnuz`.

    Scales are halved and 0x80 (NaN) becomes 0x7f. The bytes 0x7f and 0xff (+-240, at the halved scale +-480) have
    no counterpart and become +-448, the nearest.
    """
    return _normalized(weight, "float8_e4m3fnuz", "float8_e4m3fn", weight_scale, input_scale, out, stream)


def _normalized(
    weight: Any, old: str, new: str, weight_scale: Any, input_scale: Any, out: Any, stream: object
) -> tuple[Any, Any, Any]:
    operands = weight, out, weight_scale, None, input_scale, None
    arrays, _ = _NORMALIZE(operands, (old, new), stream)
    result = arrays[1] if out is None else interop.reinterpret(out, new)
    return result, arrays[3], arrays[5]


def _describe_normalize(operands: Sequence[TensorSpec | None], formats: tuple[str, str]) -> Described:
    weight, out, scale, _, of_input, _ = operands
    assert weight is not None
    old, new = formats
    if weight.dtype != old:
        raise DTypeError(f"weight needs {old}, got {weight.dtype}")
    scale = specs.required(scale, "weight_scale")
    count = contiguous_count(weight)
    scale_shapes.is_scale(scale)
    if of_input is not None:
        scale_shapes.is_scale(of_input)
    specs.same_device(weight, scale, of_input, out)
    if out is not None:
        if out.dtype not in formats:
            raise DTypeError(f"out needs {new}, or {old} as for weight itself, got {out.dtype}")
        specs.check_written(out, weight.shape, out.dtype)
        contiguous_count(out)
    counts = contiguous_count(scale), 0 if of_input is None else contiguous_count(of_input)
    out_at = specs.ALIGNMENT if out is None else out.alignment
    problem = Normalize(weight.target, old, specs.alignment(weight.alignment, out_at))
    results = {1: NewArray(weight.shape, new), 3: NewArray(scale.shape, "float32")}
    if of_input is not None:
        results[5] = NewArray(of_input.shape, "float32")

    def plan() -> Planned:
        return Planned(NORMALIZE.plan(problem).bind(NormalizeNumbers(count, *counts)))

    return Described(results, plan, lambda: NORMALIZE.explain(problem))


_NORMALIZE: Final = Operation(
    (
        _WEIGHT,
        Operand("out", *FORMATS),
        _SCALE,
        "new weight_scale",
        Operand("input_scale", "float32"),
        "new input_scale",
    ),
    _describe_normalize,
    in_place=((1, 0),),
    numbers=(2, 4),
)


@eager_only
def all_close_1d(x: object, *, stream: object = None) -> bool:
    """Return whether all scales equal the first within rtol 1e-5 and atol 0: one reduction, one synchronisation.

    Args:
        x: fp32 with one axis. Empty is True; a NaN anywhere is False.
        stream: the stream to launch on, as for `quantize`.

    Raises:
        DTypeError, ShapeError, LayoutError, DeviceError: before anything is launched.

    Example:
        >>> import numpy as np, fp8core
        >>> fp8core.all_close_1d(np.array([0.5, 0.5], np.float32))
        True
    """
    arrays, count = _ALL_CLOSE((x, None), None, stream)
    if not count:
        return True
    seen = interop.view(x, "x")
    flag = interop.view(arrays[1], "result")
    return streams.read_int32(flag.pointer, seen.target, interop.stream_of(seen, stream)) != 0


def _describe_all_close(operands: Sequence[TensorSpec | None], options: None) -> Described:
    del options
    x = operands[0]
    assert x is not None
    scale_shapes.is_scale(x)
    if len(x.shape) != 1:
        raise ShapeError(f"x needs one axis, got shape {x.shape}")
    count = contiguous_count(x)
    problem = AllClose(x.target)

    def plan() -> Planned:
        if not count:
            return Planned(None)
        return Planned(ALL_CLOSE.plan(problem).bind(AllCloseNumbers(count)))

    return Described({1: NewArray((1,), "float32")}, plan, lambda: ALL_CLOSE.explain(problem), count)


_ALL_CLOSE: Final = Operation((Operand("x", "float32"), "result"), _describe_all_close)
