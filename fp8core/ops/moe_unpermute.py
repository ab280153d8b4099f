"""The rows of a mixture of experts, summed again for each token."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core.core import specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import HIGH_PRECISION, ITEMSIZE
from fp8core.errors import DTypeError, ShapeError
from fp8core.interop import Operand, dtype_name, eager_only
from fp8core.kernels.moe import MOE_UNPERMUTE
from fp8core.ops.choices import check_choices, check_countable
from fp8core.problem import MoeUnpermute
from fp8core.runtime.plans import MoeUnpermuteNumbers
from fp8core.types import Array, ArrayT, NumpyArray, UnpermuteKeywords, Untyped

OUT: Final = 3
"""The index of the result among the operands."""


@overload
def moe_unpermute(
    y: Untyped, inverse: Array, topk_weights: Array | None = None, **keywords: Unpack[UnpermuteKeywords]
) -> Any: ...
@overload
def moe_unpermute(
    y: NumpyArray, inverse: Array, topk_weights: Array | None = None, **keywords: Unpack[UnpermuteKeywords]
) -> NumpyArray: ...
@overload
def moe_unpermute(
    y: ArrayT, inverse: Array, topk_weights: Array | None = None, **keywords: Unpack[UnpermuteKeywords]
) -> ArrayT: ...
@eager_only
def moe_unpermute(
    y: object,
    inverse: object,
    topk_weights: object = None,
    *,
    out_dtype: object = None,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return the weighted sum of the rows of each token: ``sum(topk_weights[t, j] * y[inverse[t, j]] for j)``.

    Products and sums are computed in float32, in the order of j, and rounded once to out_dtype: the same bits in each
    run. Choices without a row (-1, or beyond the last row of y) are left out, whatever their weights are, so
    what undefined rows hold does not matter.

    Args:
        y: float32, float16 or bfloat16 ``[rows, cols]``, rows contiguous: the results of the experts.
        inverse: int32 ``[tokens, k]``, contiguous: the row of each choice, as `moe_permute` returns it.
        topk_weights: float32, float16 or bfloat16 ``[tokens, k]``, contiguous; None for the plain sum.
        out_dtype: float32, float16 or bfloat16; None for that of y.
        out: an array ``[tokens, cols]`` of that dtype for the result.
        stream: the stream to launch on; by default the current stream of the framework of y.

    Returns:
        ``[tokens, cols]`` of out_dtype, in the framework of y.

    Raises:
        ShapeError: y or inverse has not two axes, or topk_weights or ``out`` does not fit them.
        DTypeError: the call does not take the dtype of an array.
        LayoutError: an array is not contiguous as above, or ``out`` overlaps another array.
        DeviceError: the arrays are on several devices, or stream is not a stream. All errors are raised before
            anything is launched or written.
        UnsupportedProblemError: there are 2**30 tokens, choices or rows, or more.

    Examples:
        >>> import numpy as np, fp8core
        >>> y = np.array([[1.0], [10.0], [100.0]], np.float32)
        >>> weights = np.array([[0.5, 2.0], [1.0, 9.0]], np.float32)
        >>> fp8core.moe_unpermute(y, np.array([[2, 0], [1, -1]], np.int32), weights).tolist()
        [[52.0], [10.0]]
    """
    return UNPERMUTE_CALLS((y, inverse, topk_weights, out), (out_dtype,), stream)[0][OUT]


def _describe_unpermute(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    y, inverse, weights, out = operands
    y = specs.required(y, "y")
    inverse = specs.required(inverse, "inverse")
    specs.check_high_precision(y)
    if len(y.shape) != 2:
        raise ShapeError(f"{y.name} needs two axes [rows, cols], got shape {y.shape}")
    if inverse.dtype != "int32":
        raise DTypeError(f"{inverse.name} needs int32, got {inverse.dtype}")
    if len(inverse.shape) != 2:
        raise ShapeError(f"{inverse.name} needs two axes [tokens, k], got shape {inverse.shape}")
    tokens, at = inverse.shape[0], specs.matrix(y)
    each = check_choices(inverse, tokens)
    if weights is not None:
        specs.check_high_precision(weights)
        if weights.shape != inverse.shape:
            raise ShapeError(f"{weights.name} needs shape {inverse.shape}, that of inverse, got {weights.shape}")
        specs.contiguous_count(weights)
    specs.check_same_device(y, inverse, weights)
    wide = y.dtype if options[0] is None else dtype_name(options[0], "out_dtype", HIGH_PRECISION)
    shape, size = (tokens, at.cols), ITEMSIZE[wide]
    stride = specs.result_stride(out, y, shape, wide)
    at_out = specs.alignment(specs.alignment_of(out), stride * size) * y.itemsize // size
    problem = MoeUnpermute(
        target=y.target,
        y=y.dtype,
        weights="" if weights is None else weights.dtype,
        out=wide,
        each=each,
        cols=at.cols,
        alignment=specs.alignment(y.alignment, at.stride * y.itemsize, at_out),
    )

    def countable() -> MoeUnpermute:
        check_countable(y, at.rows, "rows")
        check_countable(inverse, max(tokens, tokens * each), "rows and elements")
        return problem

    def plan() -> Planned:
        if not tokens or not at.cols:
            return Planned(None)
        numbers = MoeUnpermuteNumbers(tokens, at.rows, at.stride, stride)
        return Planned(MOE_UNPERMUTE.plan(countable()).bind(numbers))

    return Described({OUT: NewArray(shape, wide)}, plan, lambda: MOE_UNPERMUTE.explain(countable()))


UNPERMUTE_CALLS: Final = Operation(
    (
        Operand("y", *HIGH_PRECISION),
        Operand("inverse", "int32"),
        Operand("topk_weights", *HIGH_PRECISION),
        Operand("out", *HIGH_PRECISION),
    ),
    _describe_unpermute,
)
