"""The rows of a mixture of experts, sorted by expert for grouped products."""

import math
from collections.abc import Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar, Unpack, overload

from fp8core.core import checks, scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.scaling import SCALES
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import DTypeError, ScaleError, ShapeError, UnsupportedProblemError
from fp8core.interop import Operand, eager_only, scalar
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.moe import MOE_PERMUTE, counts_bytes
from fp8core.ops.choices import check_choices, check_countable
from fp8core.ops.quantized import Quantized, quantized
from fp8core.problem import PER_TENSOR, GroupShape, MoePermute
from fp8core.runtime.plans import MoePermuteNumbers
from fp8core.types import Array, ArrayT, CupyT, NumpyArray, StreamKeyword, Untyped

IDS: Final = ("int32", "int64")
"""The dtypes of chosen experts."""
ROWS, ROW_SCALE, OFFS, INVERSE = 3, 4, 5, 6
"""Indices among the operands of `moe_permute`."""
MOST_GROUPS: Final = 1 << 21
"""The scales of a block's rows, of which there are up to 1024, are counted in 32 bits."""
RowsT_co = TypeVar("RowsT_co", covariant=True)
IndexT_co = TypeVar("IndexT_co", covariant=True)


class Permuted(NamedTuple, Generic[RowsT_co, IndexT_co]):
    """Rows sorted by expert: what `fp8core.moe_permute` returns.

    Examples:
        >>> import numpy as np, fp8core
        >>> made = fp8core.moe_permute(np.ones((2, 8), np.float32), np.array([[1, 0], [1, 2]]), experts=3)
        >>> made.rows.shape, made.offs.tolist(), made.inverse.tolist()
        ((4, 8), [1, 3, 4], [[1, 0], [2, 3]])
    """

    rows: RowsT_co
    """``[tokens * k, cols]``: the rows of the first expert, then those of the second, and so on; a `Quantized` if the
    tokens were one. Rows after the last end are undefined."""
    offs: IndexT_co
    """int32 ``[experts]``: where the rows of each expert end, for `fp8core.grouped_scaled_mm_nt`."""
    inverse: IndexT_co
    """int32 ``[tokens, k]``: the row of each choice, or -1 if it is no expert's, for `fp8core.moe_unpermute`."""


@overload
def moe_permute(x: Untyped, topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]) -> Any: ...
@overload
def moe_permute(
    x: Quantized[Float8Array, CupyT], topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]
) -> Permuted[Quantized[Float8Array, CupyT], CupyT]: ...
@overload
def moe_permute(
    x: Quantized[ArrayT, ArrayT], topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]
) -> Permuted[Quantized[ArrayT, ArrayT], ArrayT]: ...
@overload
def moe_permute(
    x: Float8Array, topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]
) -> Permuted[Float8Array, Any]: ...
@overload
def moe_permute(
    x: NumpyArray, topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]
) -> Permuted[NumpyArray, NumpyArray]: ...
@overload
def moe_permute(
    x: ArrayT, topk_ids: Array, experts: int, **keywords: Unpack[StreamKeyword]
) -> Permuted[ArrayT, ArrayT]: ...
@eager_only
def moe_permute(x: object, topk_ids: object, experts: int, *, stream: object = None) -> Any:
    """Return the row of its token for each choice of an expert, sorted by expert: a stable sort, and a copy.

    The layout is that of vLLM's function of this name, but for the ends of experts' rows in place of their starts.
    Nothing waits for the choices, so the call can be captured into a CUDA graph. A choice that is negative, or not
    below ``experts``, has no row: so a process of expert parallelism leaves out the experts of others.

    Args:
        x: the tokens ``[tokens, cols]``, rows contiguous: float32, float16, bfloat16 or FP8, or a `Quantized` per
            tensor, per token or by groups of 1xg, whose scales are permuted, too.
        topk_ids: int32 or int64 ``[tokens, k]``, contiguous: the experts of each token.
        experts: the number of experts.
        stream: the stream to launch on; by default the current stream of the framework of x.

    Returns:
        Permuted: ``rows, offs, inverse`` in the framework of x. Scales keep their layout; one for all tokens stays as
            it is.

    Raises:
        ShapeError: x or topk_ids has not two axes, they differ in tokens, experts is not a whole number, or the scale
            of x does not fit its group shape.
        DTypeError: the call does not take the dtype of an array.
        ScaleError: x is a `Quantized` by groups of several rows.
        LayoutError: the rows of x, or topk_ids, are not contiguous.
        DeviceError: the arrays are on several devices, or stream is not a stream. All errors are raised before
            anything is launched.
        UnsupportedProblemError: there are 2**30 tokens or choices or more; or on a GPU more than 1024 experts or
            choices of a token, or rows of 2**31 bytes or more.

    Examples:
        >>> import numpy as np, fp8core
        >>> x = np.array([[1.0], [2.0], [3.0]], np.float32)
        >>> rows, offs, inverse = fp8core.moe_permute(x, np.array([[2, 0], [0, 1], [2, 0]]), experts=3)
        >>> rows.ravel().tolist(), offs.tolist()
        ([1.0, 2.0, 3.0, 2.0, 1.0, 3.0], [3, 4, 6])
        >>> inverse.tolist()
        [[4, 0], [1, 3], [5, 2]]
    """
    if not isinstance(x, Quantized):
        arrays = PERMUTE_CALLS((x, None, topk_ids, None, None, None, None), (experts, None), stream)[0]
        return Permuted(arrays[ROWS], arrays[OFFS], arrays[INVERSE])
    if x.scale is None:
        raise DTypeError("scale needs an array, got None")
    given = None if _is_of_all(x) else x.scale
    options = experts, x.group_shape
    arrays = PERMUTE_CALLS((x.data, given, topk_ids, None, None, None, None), options, stream)[0]
    rows = quantized(arrays[ROWS], x.scale if given is None else arrays[ROW_SCALE], x.group_shape)
    return Permuted(rows, arrays[OFFS], arrays[INVERSE])


def _is_of_all(x: Quantized[Any, Any]) -> bool:
    """Return whether the scale of ``x`` is one number for all tokens, rather than for the only one."""
    if scalar(x.scale) is not None:
        return True
    shape, of_data = getattr(x.scale, "shape", None), getattr(x.data, "shape", None)
    if shape is None or of_data is None:  # no arrays, which the call refuses
        return False
    by_token = x.group_shape != PER_TENSOR and tuple(shape[:1]) == tuple(of_data[:1])
    return not by_token and scale_shapes.is_one_number(shape)


def _check_scale(scale: TensorSpec, group: GroupShape | None, x: TensorSpec) -> None:
    """Refuse a scale that has not a row for each token of ``x``, or another number of groups than ``group`` makes."""
    scale_shapes.check_scale_dtype(scale, bytes_allowed=True)
    if group == PER_TENSOR:
        scale_shapes.check_one_number(scale)
    rows, cols = x.shape
    across = math.prod(scale.shape[1:]) if group is None else group.scale_shape(1, cols)[1]
    if len(scale.shape) not in (1, 2) or (scale.shape[0], math.prod(scale.shape[1:])) != (rows, across):
        wanted = f"({rows}, groups)" if group is None else f"({rows}, {across}), as group_shape is {tuple(group)}"
        raise ShapeError(f"{scale.name} needs shape {wanted}, a row for each token, got {scale.shape}")


def _describe_permute(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, scale, topk_ids, *_ = operands
    x = specs.required(x, "x")
    experts = checks.extent(options[0], "experts")
    group = None if options[1] is None else checks.group_shape(options[1])
    topk_ids = specs.required(topk_ids, "topk_ids")
    if x.dtype not in (*FORMATS, *HIGH_PRECISION):
        raise DTypeError(f"{x.name} needs {', '.join((*HIGH_PRECISION, *FORMATS))}, got {x.dtype}")
    if len(x.shape) != 2:
        raise ShapeError(f"{x.name} needs two axes [tokens, cols], got shape {x.shape}")
    if topk_ids.dtype not in IDS:
        raise DTypeError(f"{topk_ids.name} needs {' or '.join(IDS)}, got {topk_ids.dtype}")
    if group is not None and group != PER_TENSOR and group.rows != 1:
        raise ScaleError(
            f"{x.name} needs scales per tensor, per token or by groups of 1xg, got group_shape {tuple(group)}"
        )
    at = specs.matrix(x)
    each = check_choices(topk_ids, at.rows)
    specs.check_same_device(x, topk_ids, scale)
    choices = at.rows * each
    results = {ROWS: NewArray((choices, at.cols), x.dtype)}
    strides, new_strides, scale_cols, scale_bytes = (0, 0), (0, 0), 0, 0
    if scale is not None:
        _check_scale(scale, group, x)
        scale_cols, scale_bytes = math.prod(scale.shape[1:]), scale.itemsize
        strides = scale.strides[0], scale.strides[-1]
        by_columns = scale_cols > 1 and strides[0] == 1
        new_strides = (1, choices) if by_columns else (scale_cols, 1)
        shape = (choices, *scale.shape[1:])
        results[ROW_SCALE] = NewArray(shape, scale.dtype, new_strides if by_columns else None)
    results[OFFS] = NewArray((experts,), "int32")
    results[INVERSE] = NewArray((at.rows, each), "int32")
    row_bytes, stride = at.cols * x.itemsize, at.stride * x.itemsize
    problem = MoePermute(
        target=x.target,
        ids=topk_ids.dtype,
        experts=experts,
        each=each,
        row_bytes=row_bytes,
        scale_bytes=scale_bytes,
        alignment=specs.alignment(x.alignment, stride, row_bytes),
    )

    def countable() -> MoePermute:
        check_countable(topk_ids, max(at.rows, choices), "rows and elements")
        if scale is not None and scale_cols >= MOST_GROUPS:
            raise UnsupportedProblemError(f"{scale.name} needs less than 2**21 groups of a row, got {scale_cols}")
        return problem

    def plan() -> Planned:
        if not experts and not choices:
            return Planned(None)
        numbers = MoePermuteNumbers(at.rows, stride, scale_cols, *strides, *new_strides)
        return Planned(MOE_PERMUTE.plan(countable()).bind(numbers), counts_bytes(problem, at.rows))

    return Described(results, plan, lambda: MOE_PERMUTE.explain(countable()))


PERMUTE_CALLS: Final = Operation(
    (
        Operand("x", *HIGH_PRECISION, *FORMATS),
        Operand("scale", *SCALES),
        Operand("topk_ids", *IDS),
        *("rows", "row_scale", "offs", "inverse"),
    ),
    _describe_permute,
    scratch=True,
)
