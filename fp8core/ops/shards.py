"""Fused weights whose shards have one scale each: converts these to one scale for all rows, or to one per row."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core import interop
from fp8core.core import checks, scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec, contiguous_count
from fp8core.dtypes import FORMATS
from fp8core.errors import ScaleError, ShapeError
from fp8core.interop import Operand, ScaleOperand, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.weights import EXPAND, REQUANTIZE
from fp8core.problem import Expand, Requantize
from fp8core.runtime.plans import ExpandNumbers, RequantizeNumbers
from fp8core.types import ArrayT, CallKeywords, NumpyArray, Scale, StreamKeyword

MOST_ROWS: Final = 2**31 - 1
"""The most rows of a fused weight: kernels hold the ends of shards in 32 bits."""
WEIGHT, SCALE, OUT, MAX_SCALE = range(4)
"""The indices of the operands of `requantize_with_max_scale`."""


@overload
def requantize_with_max_scale(
    weight: Float8Array, weight_scale: Scale, logical_widths: Sequence[int], **keywords: Unpack[CallKeywords]
) -> tuple[Any, Float8Array]: ...
@overload
def requantize_with_max_scale(
    weight: NumpyArray, weight_scale: Scale, logical_widths: Sequence[int], **keywords: Unpack[CallKeywords]
) -> tuple[NumpyArray, NumpyArray]: ...
@overload
def requantize_with_max_scale(
    weight: ArrayT, weight_scale: Scale, logical_widths: Sequence[int], **keywords: Unpack[CallKeywords]
) -> tuple[ArrayT, ArrayT]: ...
@eager_only
def requantize_with_max_scale(
    weight: object,
    weight_scale: object,
    logical_widths: Sequence[int],
    *,
    out: object = None,
    stream: object = None,
) -> Any:
    """Requantize every shard of a fused weight to the largest scale; return ``(max_scale, weight)``.

    A code becomes ``float(code) * scale * (1 / max_scale)``, in float32, clamped and rounded once to nearest even.
    Shards with the largest scale keep their bytes. If any scale but the first is the placeholder of a scale that was
    never loaded (the lowest float, or anything <= -448), the weight was fused on disk: the result is its first scale,
    and nothing is requantized. The device decides that: one launch, no synchronisation. If the largest scale is 0,
    infinity or NaN, the codes stay unchanged, too, as no other code would be nearer. Name and rule are those of vLLM's
    ``w8a8_utils``.

    Args:
        weight: FP8 ``[sum(logical_widths), k]``, rows contiguous.
        weight_scale: float32, one scale per shard, or a single one (or a number), which changes nothing.
        logical_widths: the number of rows of each shard; may be 0. The scale of such a shard counts, too: leave the
            shard out if its scale was never loaded.
        out: an array for the new weight. Without it the weight is changed in place; for JAX, whose arrays cannot be
            written to, the result is a new array.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        The scale as a 0-d float32 array, and the weight (``out`` when given).

    Raises:
        ShapeError: the widths are not whole numbers, or do not add up to the rows.
        ScaleError: there is neither one scale nor one per shard.
        DTypeError, LayoutError, DeviceError: before anything is launched or written.
        UnsupportedProblemError: there are more than 512 shards or 2**31 columns, on a GPU.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.ones((4, 8), np.float32), group_shape=(-1, -1)).data
        >>> largest, fused = fp8core.requantize_with_max_scale(q, np.array([0.5, 0.25], np.float32), [2, 2])
        >>> float(largest), fused.astype(np.float32)[:, 0].tolist()
        (0.5, [448.0, 448.0, 224.0, 224.0])
    """
    if out is None:
        framework = interop.framework_of(type(weight))
        out = None if framework is None or framework.immutable else weight
    arrays, _ = REQUANTIZE_CALLS((weight, weight_scale, out, None), _widths(logical_widths), stream)
    return arrays[MAX_SCALE], arrays[OUT]


def _widths(logical_widths: Any) -> tuple[int, ...]:
    try:
        widths = tuple(checks.as_int(width) for width in checks.ordered(logical_widths))
    except TypeError as error:
        raise ShapeError(f"logical_widths needs whole numbers, got {logical_widths!r}") from error
    if any(width < 0 for width in widths) or sum(widths) > MOST_ROWS:
        raise ShapeError(f"logical_widths needs widths of at least 0, at most {MOST_ROWS} together, got {list(widths)}")
    return widths


def _shard_count(scale: TensorSpec, widths: tuple[int, ...]) -> int:
    """Check and return the number of scales: one, or one per shard."""
    scale_shapes.check_scale_dtype(scale)
    count = contiguous_count(scale)
    if count not in (1, len(widths)):
        raise ScaleError(
            f"{scale.name} needs one scale, or one for each of {len(widths)} shards, got shape {scale.shape}"
        )
    return count


def _describe_requantize(operands: Sequence[TensorSpec | None], widths: tuple[int, ...]) -> Described:
    weight, scale, out, _ = operands
    weight = specs.required(weight, "weight")
    scale = specs.required(scale, "weight_scale")
    specs.check_fp8(weight)
    at = specs.matrix(weight)
    count = _shard_count(scale, widths)
    if not count:
        raise ScaleError(f"{scale.name} needs at least one scale, the largest of which is the result, got none")
    specs.check_same_device(weight, scale, out)
    if sum(widths) != at.rows:
        raise ShapeError(f"logical_widths needs to add up to the {at.rows} rows of weight, got {list(widths)}")
    stride = at.cols if out is None else specs.written(out, weight.shape, weight.dtype).stride
    alignment = specs.alignment(weight.alignment, at.stride, specs.alignment_of(out), stride)
    problem = Requantize(weight.target, weight.dtype, len(widths), at.cols, alignment)

    def plan() -> Planned:
        return Planned(REQUANTIZE.plan(problem).bind(RequantizeNumbers(at.stride, count, widths, stride)))

    results = {OUT: NewArray(weight.shape, weight.dtype), MAX_SCALE: NewArray((), "float32")}
    return Described(results, plan, lambda: REQUANTIZE.explain(problem))


REQUANTIZE_CALLS: Final = Operation(
    (Operand("weight", *FORMATS), ScaleOperand("weight_scale", "float32"), Operand("out", *FORMATS), "max_scale"),
    _describe_requantize,
    in_place=((OUT, WEIGHT),),
    numbers=(SCALE,),
)


@overload
def convert_to_channelwise(
    weight_scale: NumpyArray, logical_widths: Sequence[int], **keywords: Unpack[StreamKeyword]
) -> NumpyArray: ...
@overload
def convert_to_channelwise(
    weight_scale: ArrayT, logical_widths: Sequence[int], **keywords: Unpack[StreamKeyword]
) -> ArrayT: ...
@eager_only
def convert_to_channelwise(weight_scale: object, logical_widths: Sequence[int], *, stream: object = None) -> Any:
    """Expand scales per shard to one scale per row, without loss. The name is vLLM's (w8a8_utils).

    If any scale but the first is the placeholder of a scale that was never loaded (the lowest float, or anything <=
    -448), the weight was fused on disk, and all rows have the first scale, by the rule of `requantize_with_max_scale`.
    vLLM's function gives the rows of such shards the placeholder.

    Args:
        weight_scale: a float32 array of one scale per shard, or of a single one for all shards.
        logical_widths: the number of rows of each shard, as for `requantize_with_max_scale`.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        float32 ``[sum(logical_widths), 1]``.

    Raises:
        ScaleError: there is neither one scale nor one per shard.
        ShapeError: the widths are not whole numbers.
        DTypeError, LayoutError, DeviceError: before anything is launched.
        UnsupportedProblemError: there are more than 512 shards on a GPU.

    Examples:
        >>> import numpy as np, fp8core
        >>> fp8core.convert_to_channelwise(np.array([0.5, 2.0], np.float32), [1, 2]).tolist()
        [[0.5], [2.0], [2.0]]
    """
    return EXPAND_CALLS((weight_scale, None), _widths(logical_widths), stream)[0][1]


def _describe_expand(operands: Sequence[TensorSpec | None], widths: tuple[int, ...]) -> Described:
    scale = specs.required(operands[0], "weight_scale")
    count, rows = _shard_count(scale, widths), sum(widths)
    problem = Expand(scale.target, len(widths))

    def plan() -> Planned:
        if not rows:
            return Planned(None)
        return Planned(EXPAND.plan(problem).bind(ExpandNumbers(count, widths)))

    return Described({1: NewArray((rows, 1), "float32")}, plan, lambda: EXPAND.explain(problem))


EXPAND_CALLS: Final = Operation((Operand("weight_scale", "float32"), "out"), _describe_expand)
