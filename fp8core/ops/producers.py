"""Fused producers: the operation before a linear layer and the quantization of its result, in one launch."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core.core import checks, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.scaling import EPS, SCALES, ScaleOptions, number_or_operand, results_of, scaling, split
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import ShapeError
from fp8core.interop import Operand, ScaleOperand, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.fused import NORM_QUANTIZE, SILU_QUANTIZE
from fp8core.ops.quantized import Quantized, quantized
from fp8core.problem import PER_TOKEN, NormQuantize, ScaleFormat, ScaleLayout, SiluQuantize
from fp8core.runtime.plans import RmsNormNumbers, SiluNumbers
from fp8core.types import Array, ArrayT, CupyT, NormKeywords, NumpyArray, SiluKeywords, Untyped

RESIDUAL, NORM_DATA, NORM_SCALE = 2, 3, 4
"""Indices among the operands of `rms_norm_quant`."""
SILU_DATA, SILU_SCALE = 1, 2
"""Indices among the operands of `silu_and_mul_quant`."""


@overload
def rms_norm_quant(x: Untyped, weight: Array, epsilon: float, **keywords: Unpack[NormKeywords]) -> Any: ...
@overload
def rms_norm_quant(
    x: CupyT, weight: Array, epsilon: float, **keywords: Unpack[NormKeywords]
) -> Quantized[Float8Array, CupyT]: ...
@overload
def rms_norm_quant(
    x: NumpyArray, weight: Array, epsilon: float, **keywords: Unpack[NormKeywords]
) -> Quantized[NumpyArray, NumpyArray]: ...
@overload
def rms_norm_quant(
    x: ArrayT, weight: Array, epsilon: float, **keywords: Unpack[NormKeywords]
) -> Quantized[ArrayT, ArrayT]: ...
@eager_only
def rms_norm_quant(
    x: object,
    weight: object,
    epsilon: float,
    *,
    residual: object = None,
    dtype: object = "float8_e4m3fn",
    group_shape: tuple[int, int] = PER_TOKEN,
    scale: object = None,
    scale_ub: object = None,
    scale_format: ScaleFormat = "float32",
    scale_layout: ScaleLayout = "k",
    eps: float = EPS,
    round_intermediate: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``quantize(x / sqrt(mean(x**2) + epsilon) * weight)`` in one launch.

    The norm is that of Zhang and Sennrich 2019 (arXiv:1910.07467). It is computed in float32 and, without
    ``round_intermediate``, not rounded to x's dtype before it is quantized.

    Args:
        x: float32, float16 or bfloat16 ``[..., cols]``; the mean is over the last axis.
        weight: float32, float16 or bfloat16 ``[cols]``, contiguous.
        epsilon: a number of at least 0, added to the mean square.
        residual: an array of x's shape and dtype. The float32 sum ``x + residual`` is normalized instead of x, and
            written to residual in its dtype.
        dtype: the FP8 format of the result.
        group_shape: per token, or ``(1, g)`` with g = 8, 16, 32, 64 or 128; with a given scale any whose columns are -1
            or a multiple of 8.
        scale: a given scale, as for `quantize`.
        scale_ub: an upper bound of amax, per token.
        scale_format: as for `quantize`.
        scale_layout: as for `quantize`.
        eps: the lower bound of a group's amax, as for `quantize` (not that of the norm, which is ``epsilon``).
        round_intermediate: first round the norm to x's dtype, and with a given scale also the sum with the residual, as
            vLLM's kernels do.
        out: an FP8 array for the data, or a tuple of two arrays, for data and scale.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        ``Quantized(data, scale)`` as for `quantize`.

    Raises:
        ShapeError: weight or residual does not fit x, or epsilon is negative or not finite.
        DTypeError, LayoutError, ScaleError, DeviceError: as for `quantize`, before anything is launched or written.
        UnsupportedProblemError: group_shape is another, or there are more columns than a GPU kernel counts.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.rms_norm_quant(np.full((1, 64), 3.0, np.float32), np.ones(64, np.float32), 1e-6)
        >>> bool(abs(q.dequantize() - 1).max() < 1e-3)
        True
    """
    data, kept = (None, scale) if out is None else split(out, scale)
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    if type(eps) is not float:
        eps = checks.number(eps, "eps")
    if type(epsilon) is not float:
        epsilon = checks.number(epsilon, "epsilon")
    options = (
        dtype,
        group_shape,
        scale is not None,
        bound,
        scale_format,
        scale_layout,
        eps,
        epsilon,
        round_intermediate,
    )
    arrays, group = NORM_CALLS((x, weight, residual, data, kept, upper), options, stream)
    return quantized(arrays[NORM_DATA], arrays[NORM_SCALE], group)


def _describe_norm(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, weight, residual, data, scale, upper = operands
    x = specs.required(x, "x")
    *scales, epsilon, round_intermediate = options
    specs.check_high_precision(x)
    at = specs.matrix(x)
    weight = specs.required(weight, "weight")
    specs.check_high_precision(weight)
    specs.check_vector(weight, at.cols)
    specs.check_same_device(x, weight, residual)
    residual_stride = 0 if residual is None else specs.written(residual, x.shape, x.dtype).stride
    how = scaling(ScaleOptions(*scales), x, x.shape, scale, upper)
    stride = specs.result_stride(data, x, x.shape, how.dtype)
    addend = epsilon_of(epsilon)
    problem = NormQuantize(
        target=x.target,
        x=x.dtype,
        weight=weight.dtype,
        data=how.dtype,
        group_shape=how.group_shape,
        static=how.given,
        scale_format=how.scale_format,
        scale_layout=how.layout,
        residual=residual is not None,
        round_intermediate=checks.flag(round_intermediate, "round_intermediate"),
        cols=at.cols,
        alignment=specs.alignment(
            x.alignment,
            at.stride * x.itemsize,
            0 if residual is None else residual.alignment,
            residual_stride * x.itemsize,
            weight.alignment * x.itemsize // weight.itemsize,
            specs.alignment_of(data) * x.itemsize,
            stride * x.itemsize,
        ),
    )
    results = results_of(how, x.shape, NORM_DATA)
    if residual is not None:
        results[RESIDUAL] = NewArray(x.shape, x.dtype)

    def plan() -> Planned:
        if not at.rows * at.cols and not how.computed():
            return Planned(None)
        strides = residual_stride, at.stride, addend, stride, *how.strides
        return Planned(NORM_QUANTIZE.plan(problem).bind(RmsNormNumbers(*strides, at.rows, how.upper, how.eps)))

    return Described(results, plan, lambda: NORM_QUANTIZE.explain(problem), how.group_shape)


def epsilon_of(epsilon: float) -> float:
    """Check and return the number, at least 0, that is added to a mean square."""
    if not 0 <= epsilon <= checks.LARGEST_FLOAT32 or not checks.in_float32(epsilon):
        raise ShapeError(f"epsilon needs a finite number of at least 0 that float32 holds, got {epsilon!r}")
    return epsilon


@overload
def silu_and_mul_quant(x: Untyped, **keywords: Unpack[SiluKeywords]) -> Any: ...
@overload
def silu_and_mul_quant(x: CupyT, **keywords: Unpack[SiluKeywords]) -> Quantized[Float8Array, CupyT]: ...
@overload
def silu_and_mul_quant(x: NumpyArray, **keywords: Unpack[SiluKeywords]) -> Quantized[NumpyArray, NumpyArray]: ...
@overload
def silu_and_mul_quant(x: ArrayT, **keywords: Unpack[SiluKeywords]) -> Quantized[ArrayT, ArrayT]: ...
@eager_only
def silu_and_mul_quant(
    x: object,
    *,
    dtype: object = "float8_e4m3fn",
    group_shape: tuple[int, int] = PER_TOKEN,
    scale: object = None,
    scale_ub: object = None,
    scale_format: ScaleFormat = "float32",
    scale_layout: ScaleLayout = "k",
    eps: float = EPS,
    round_intermediate: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``quantize(silu(gate) * up)`` for ``x = [gate, up]`` in one launch.

    ``silu(v) = v / (1 + exp(-v))``: the SwiGLU of Shazeer 2020 (arXiv:2002.05202). The product is computed in float32
    and, without ``round_intermediate``, not rounded to x's dtype before it is quantized.

    Args:
        x: float32, float16 or bfloat16 ``[..., 2 * cols]``: gate and up side by side.
        dtype: the FP8 format of the result.
        group_shape: as for `rms_norm_quant`.
        scale: a given scale, as for `quantize`.
        scale_ub: an upper bound of amax, per token.
        scale_format: as for `quantize`.
        scale_layout: as for `quantize`.
        eps: the lower bound of a group's amax, as for `quantize`.
        round_intermediate: first round the activation and the product to x's dtype, as vLLM's kernels do.
        out: an FP8 array ``[..., cols]`` for the data, or a tuple of two arrays, for data and scale.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        ``Quantized(data, scale)`` of ``[..., cols]``, as for `quantize`.

    Raises:
        ShapeError: the columns of x are not two halves of the same length.
        DTypeError, LayoutError, ScaleError, DeviceError: as for `quantize`, before anything is launched or written.
        UnsupportedProblemError: group_shape is another, or there are more columns than a GPU kernel counts.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.silu_and_mul_quant(np.array([[0.0, 1.0, 5.0, 2.0]], np.float32))
        >>> q.data.shape, q.dequantize().round(3)
        ((1, 2), array([[0.   , 1.462]], dtype=float32))
    """
    data, kept = (None, scale) if out is None else split(out, scale)
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    if type(eps) is not float:
        eps = checks.number(eps, "eps")
    options = (dtype, group_shape, scale is not None, bound, scale_format, scale_layout, eps, round_intermediate)
    arrays, group = SILU_CALLS((x, data, kept, upper), options, stream)
    return quantized(arrays[SILU_DATA], arrays[SILU_SCALE], group)


def _describe_silu(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, data, scale, upper = operands
    x = specs.required(x, "x")
    specs.check_high_precision(x)
    at = specs.matrix(x)
    if at.cols % 2:
        raise ShapeError(f"x needs gate and up of equal length side by side, got {at.cols} columns")
    cols = at.cols // 2
    shape = (*x.shape[:-1], cols)
    how = scaling(ScaleOptions(*options[:-1]), x, shape, scale, upper)
    stride = specs.result_stride(data, x, shape, how.dtype)
    size = x.itemsize
    data_at = specs.alignment_of(data)
    problem = SiluQuantize(
        target=x.target,
        x=x.dtype,
        data=how.dtype,
        group_shape=how.group_shape,
        static=how.given,
        scale_format=how.scale_format,
        scale_layout=how.layout,
        round_intermediate=checks.flag(options[-1], "round_intermediate"),
        cols=cols,
        alignment=specs.alignment(x.alignment, at.stride * size, cols * size, data_at * size, stride * size),
    )

    def plan() -> Planned:
        if not at.rows * cols and not how.computed():
            return Planned(None)
        numbers = SiluNumbers(at.stride, stride, *how.strides, at.rows, how.upper, how.eps)
        return Planned(SILU_QUANTIZE.plan(problem).bind(numbers))

    return Described(results_of(how, shape, SILU_DATA), plan, lambda: SILU_QUANTIZE.explain(problem), how.group_shape)


_X: Final = Operand("x", *HIGH_PRECISION)
_SCALED: Final = Operand("out", *FORMATS), ScaleOperand("scale", *SCALES), ScaleOperand("scale_ub", "float32")
NORM_CALLS: Final = Operation(
    (_X, Operand("weight", *HIGH_PRECISION), Operand("residual", *HIGH_PRECISION), *_SCALED),
    _describe_norm,
    numbers=(NORM_SCALE,),
    returned=(NORM_SCALE,),
)
SILU_CALLS: Final = Operation((_X, *_SCALED), _describe_silu, numbers=(SILU_SCALE,), returned=(SILU_SCALE,))
