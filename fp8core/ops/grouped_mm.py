"""Grouped scaled products: rows in consecutive groups, each with a weight of its own, as a mixture of experts has."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Unpack, overload

from fp8core.core import checks, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.grouped import OFFSETS, grouped_product_of
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.interop import Operand, ScaleOperand, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.grouped.table import GROUPED_MM
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import GROUP_128, GroupShape, ScaleLayout
from fp8core.types import Array, ArrayT, GroupedKeywords, NumpyArray, Scale

OUT: Final = 6
"""The index of the result among the operands."""
ALIGNED_ROWS: Final = 4
"""Up to this many rows of an input, scales are stored by rows: there is nothing to gain from another layout."""


@overload
def grouped_scaled_mm_nt(
    a: Float8Array | Quantized[Float8Array, object],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    *,
    offs: Array,
    **keywords: Unpack[GroupedKeywords],
) -> Any: ...
@overload
def grouped_scaled_mm_nt(
    a: NumpyArray | Quantized[NumpyArray, NumpyArray],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    *,
    offs: Array,
    **keywords: Unpack[GroupedKeywords],
) -> NumpyArray: ...
@overload
def grouped_scaled_mm_nt(
    a: ArrayT | Quantized[ArrayT, ArrayT],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    *,
    offs: Array,
    **keywords: Unpack[GroupedKeywords],
) -> ArrayT: ...
@eager_only
def grouped_scaled_mm_nt(
    a: object,
    weight: object,
    scale_a: object = None,
    scale_b: object = None,
    *,
    offs: object,
    bias: object = None,
    out_dtype: object = "bfloat16",
    use_fast_accum: bool = True,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return `scaled_mm_nt` of each group of rows of a with the group's own weight, in one launch.

    Rows ``offs[i - 1]`` (0 for the first group) to ``offs[i]`` are multiplied with ``weight[i]``, the layout of
    ``torch._scaled_grouped_mm``. The ends are read on the device, so nothing waits for them, and in a graph each replay
    has its own. An end beyond the last row counts as the last row, one before an earlier end as that end: such groups
    are empty. Rows after the last end are not written: in a new result they are undefined.

    Args:
        a: FP8 ``[rows, k]``, rows contiguous, or a `Quantized` per tensor, per token or by groups of 1x128.
        weight: FP8 ``[groups, n, k]``, rows contiguous, or a `Quantized` per tensor, per channel (``(1, -1)``), by
            blocks of 128x128 or by groups of 1x128.
        scale_a: as for `scaled_mm`: a number or float32, ``[rows, 1]`` or ``[rows]`` per token, or
            ``[rows, ceil(k / 128)]`` for groups of 1x128.
        scale_b: a number or float32: one number for all groups, ``[groups]`` (also ``[groups, 1, 1]``) for one per
            group, ``[groups, n, 1]`` or ``[groups, n]`` per channel, or, with groups of a,
            ``[groups, ceil(n / 128), ceil(k / 128)]`` for blocks of 128x128 or ``[groups, n, ceil(k / 128)]`` for
            groups of 1x128.
        offs: int32 ``[groups]``: where each group ends, ``cumsum`` of the groups' numbers of rows.
        bias: ``[groups, n]`` in out_dtype or float32, added in float32.
        out_dtype: bfloat16, float16 or float32.
        use_fast_accum: let kernels accumulate with fewer bits, as for `scaled_mm`.
        out: an array ``[rows, n]`` of out_dtype for the result.
        stream: the stream to launch on; by default the current stream of the framework of a.

    Returns:
        ``[rows, n]`` of out_dtype, in the framework of a.

    Raises:
        ShapeError: the matrices do not share k, or offs, a scale, the bias or ``out`` does not fit them.
        DTypeError: the call does not take the dtype of an array.
        LayoutError: rows of a, of the weight or of the bias are not contiguous, or ``out`` overlaps another array.
        ScaleError: the scales do not go together, one is missing, or float32 does not hold a number.
        DeviceError: the arrays are on several devices, or stream is not a stream. All errors are raised before
            anything is launched or written.
        UnsupportedProblemError: no kernel can run the call: e5m2 times e5m2, or more than 1024 groups on a GPU.

    Examples:
        >>> import numpy as np, fp8core
        >>> a = fp8core.quantize(np.ones((3, 32), np.float32))
        >>> experts = np.stack([np.full((2, 32), value, np.float32) for value in (0.5, 2.0)])
        >>> weight = fp8core.quantize(experts)
        >>> offs = np.array([1, 3], np.int32)  # one row for the first expert, two for the second
        >>> fp8core.grouped_scaled_mm_nt(a, weight, offs=offs, out_dtype="float32").round(3).tolist()
        [[16.0, 16.0], [64.0, 64.0], [64.0, 64.0]]
    """
    group_a = group_b = None
    if scale_a is None or scale_b is None or isinstance(a, Quantized) or isinstance(weight, Quantized):
        a, scale_a, group_a = parts(a, scale_a, "a", "scale_a")
        weight, scale_b, group_b = parts(weight, scale_b, "weight", "scale_b")
    options = out_dtype, use_fast_accum, group_a, group_b
    return GROUPED_MM_CALLS((a, weight, scale_a, scale_b, bias, offs, out), options, stream)[0][OUT]


def layout_of_scales(group_shape: GroupShape, rows: int | None) -> ScaleLayout:
    """Return the layout of scales that is the fastest for an input of so many rows; None stands for any number."""
    return "mn" if group_shape == GROUP_128 and (rows is None or rows > ALIGNED_ROWS) else "k"


class GroupedOptions(NamedTuple):
    """Everything that defines a grouped product besides its arrays, unchecked."""

    out_dtype: Any
    use_fast_accum: Any
    group_a: GroupShape | None = None
    group_b: GroupShape | None = None


_OPERANDS: Final = (
    Operand("a", *FORMATS),
    Operand("weight", *FORMATS),
    ScaleOperand("scale_a", "float32"),
    ScaleOperand("scale_b", "float32"),
    Operand("bias", *HIGH_PRECISION),
    Operand("offs", OFFSETS),
    Operand("out", *HIGH_PRECISION),
)


def _describe(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    *needed, bias, offs, out = operands
    chosen = GroupedOptions(*options)
    use_fast_accum = checks.flag(chosen.use_fast_accum, "use_fast_accum")
    a, weight, scale_a, scale_b = (specs.required(x, name) for x, name in zip(needed, _OPERANDS, strict=False))
    grouped = grouped_product_of(
        *(a, weight, scale_a, scale_b, bias, specs.required(offs, "offs"), chosen.out_dtype),
        group_a=chosen.group_a,
        group_b=chosen.group_b,
    )
    problem, product = grouped.problem(use_fast_accum, out), grouped.product

    def plan() -> Planned:
        return Planned(GROUPED_MM.plan(problem) if product.m and product.n and grouped.groups else None)

    return Described({OUT: NewArray(product.shape, product.out)}, plan, lambda: GROUPED_MM.explain(problem))


GROUPED_MM_CALLS: Final = Operation(_OPERANDS, _describe, numbers=(2, 3))
