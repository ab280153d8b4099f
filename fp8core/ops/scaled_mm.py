"""Scaled matrix products of FP8 matrices."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Unpack, overload

from fp8core.core import checks, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.product import RESULTS, checked_beta, known_activation, product_of, transposed
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.interop import Operand, ScaleOperand, dtype_name, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.gemm.generic import plan_clear_amax
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import GroupShape
from fp8core.types import Array, ArrayT, NumpyArray, ProductKeywords, Scale

OUT, AMAX = 5, 7
"""Indices among the operands of a product."""


@overload
def scaled_mm(
    a: Float8Array | Quantized[Float8Array, object],
    b: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> Any: ...
@overload
def scaled_mm(
    a: NumpyArray | Quantized[NumpyArray, NumpyArray],
    b: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> NumpyArray: ...
@overload
def scaled_mm(
    a: ArrayT | Quantized[ArrayT, ArrayT],
    b: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> ArrayT: ...
@eager_only
def scaled_mm(
    a: object,
    b: object,
    scale_a: object = None,
    scale_b: object = None,
    *,
    bias: object = None,
    activation: object = None,
    beta: object = 0.0,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``round(activation(scale_a * (scale_b * (a @ b)) + bias + beta * out))``, in float32 and rounded once.

    Operands and scales have the meaning that they have in ``torch._scaled_mm`` and in vLLM's ``cutlass_scaled_mm``.

    Args:
        a: FP8 ``[..., m, k]``, rows contiguous, or a `Quantized` per tensor, per token or by groups of 1x128.
        b: FP8 ``[k, n]``, columns contiguous: ``weight.T`` of a stored ``[n, k]``; or a `Quantized` (``q.T`` of a
            quantized weight) per tensor, per channel, by blocks of 128x128 or by groups of 1x128.
        scale_a: a number or float32: one number, ``[..., m, 1]`` or ``[m]`` per token, or ``[..., m, ceil(k / 128)]``
            for groups of 1x128.
        scale_b: a number or float32: one number, ``[1, n]``, ``[n]`` or ``[n, 1]`` per channel, or, with groups of a,
            ``[ceil(k / 128), ceil(n / 128)]`` for blocks of 128x128 or ``[ceil(k / 128), n]`` for groups of 1x128.
        bias: ``[n]`` in out_dtype or float32, added in float32.
        activation: None; "gelu", which is ``x * (1 + erf(x / sqrt(2))) / 2``; "gelu_tanh", its approximation
            ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2``; or "silu", ``x / (1 + exp(-x))``.
        beta: a number. If it is not 0, the values of ``out`` before the call are multiplied by it and added.
        out_dtype: bfloat16, float16, float32, or an FP8 format together with out_scale.
        out_scale: the scale of an FP8 result, a number or a float32 array of one: the result is
            ``value * (1 / out_scale)``, clamped and rounded.
        amax: a float32 array of one, which receives the largest magnitude of the result before rounding (for an FP8
            out_dtype, before the multiplication by ``1 / out_scale``). NaN is ignored: with nothing else, or without
            elements, it is 0.
        use_fast_accum: let kernels accumulate with fewer bits: a relative error of up to 4e-3 for k up to 16,384, and
            more beyond, instead of 2e-3 at any k (docs/performance/accuracy.md).
        batch_invariant: give each row the same bits for any m.
        out: an array ``[..., m, n]`` of out_dtype for the result; required, in float32, float16 or bfloat16, if beta is
            not 0.
        stream: the stream to launch on; by default the current stream of the framework of a.

    Returns:
        ``[..., m, n]`` of out_dtype, in the framework of a.

    Raises:
        ShapeError: the matrices do not share k, or a scale, bias or ``out`` does not fit them.
        DTypeError: the call does not take the dtype of an array, beta is no number, or there is no such activation.
        LayoutError: rows of a, columns of b or the bias are not contiguous, ``out`` overlaps another array, or beta is
            not 0 without ``out``.
        ScaleError: the scales do not go together, one is missing, or float32 does not hold a number or beta.
        DeviceError: the arrays are on several devices, or stream is not a stream. All errors are raised before
            anything is launched or written.
        UnsupportedProblemError: no kernel can run the call, for example e5m2 times e5m2.

    Examples:
        >>> import numpy as np, fp8core
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32))
        >>> weight = fp8core.quantize(np.full((3, 32), 0.5, np.float32))
        >>> fp8core.scaled_mm(a, weight.T, out_dtype="float32").round(3).tolist()
        [[16.0, 16.0, 16.0], [16.0, 16.0, 16.0]]
        >>> fp8core.scaled_mm(a.data, weight.data.T, a.scale, weight.scale.T).dtype
        dtype(bfloat16)
        >>> out = np.ones((2, 3), np.float32)
        >>> _ = fp8core.scaled_mm(a, weight.T, beta=2.0, out=out, out_dtype="float32")
        >>> out.round(3).tolist()
        [[18.0, 18.0, 18.0], [18.0, 18.0, 18.0]]
    """
    group_a = group_b = None
    if scale_a is None or scale_b is None or isinstance(a, Quantized) or isinstance(b, Quantized):
        a, scale_a, group_a = parts(a, scale_a, "a", "scale_a")
        b, scale_b, stored = parts(b, scale_b, "b", "scale_b")
        group_b = None if stored is None else (stored.cols, stored.rows)
    if type(beta) is not float:
        beta = checks.number(beta, "beta")
    options = out_dtype, use_fast_accum, batch_invariant, group_a, group_b, activation, beta
    return SCALED_MM_CALLS((a, b, scale_a, scale_b, bias, out, out_scale, amax), options, stream)[0][OUT]


@overload
def scaled_mm_nt(
    a: Float8Array | Quantized[Float8Array, object],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> Any: ...
@overload
def scaled_mm_nt(
    a: NumpyArray | Quantized[NumpyArray, NumpyArray],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> NumpyArray: ...
@overload
def scaled_mm_nt(
    a: ArrayT | Quantized[ArrayT, ArrayT],
    weight: Array | Quantized[object, object],
    scale_a: Scale | None = None,
    scale_b: Scale | None = None,
    **keywords: Unpack[ProductKeywords],
) -> ArrayT: ...
@eager_only
def scaled_mm_nt(
    a: object,
    weight: object,
    scale_a: object = None,
    scale_b: object = None,
    *,
    bias: object = None,
    activation: object = None,
    beta: object = 0.0,
    out_dtype: object = "bfloat16",
    out_scale: object = None,
    amax: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return `scaled_mm` of a and a weight in its stored orientation, ``[n, k]``.

    Args:
        a: as for `scaled_mm`.
        weight: FP8 ``[n, k]``, rows contiguous, or a `Quantized`.
        scale_a: as for `scaled_mm`.
        scale_b: in the weight's orientation: one number, ``[n, 1]`` or ``[n]`` per channel, or, with groups of a,
            ``[ceil(n / 128), ceil(k / 128)]`` for blocks of 128x128 or ``[n, ceil(k / 128)]`` for groups of 1x128.
        bias: as for `scaled_mm`, like all that follow.
        activation: None, "gelu", "gelu_tanh" or "silu".
        beta: the factor of the values of ``out`` before the call.
        out_dtype: bfloat16, float16, float32, or an FP8 format together with out_scale.
        out_scale: the scale of an FP8 result.
        amax: receives the largest magnitude of the result.
        use_fast_accum: let the tensor cores accumulate with fewer bits.
        batch_invariant: give each row the same bits for any m.
        out: an array ``[..., m, n]`` for the result.
        stream: the stream to launch on.

    Returns:
        ``[..., m, n]`` of out_dtype, in the framework of a.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for `scaled_mm`.

    Examples:
        >>> import numpy as np, fp8core
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32))
        >>> weight = fp8core.quantize(np.full((3, 32), 0.5, np.float32))
        >>> fp8core.scaled_mm_nt(a, weight, out_dtype="float32").shape
        (2, 3)
    """
    group_a = group_b = None
    if scale_a is None or scale_b is None or isinstance(a, Quantized) or isinstance(weight, Quantized):
        a, scale_a, group_a = parts(a, scale_a, "a", "scale_a")
        weight, scale_b, group_b = parts(weight, scale_b, "weight", "scale_b")
    if type(beta) is not float:
        beta = checks.number(beta, "beta")
    options = out_dtype, use_fast_accum, batch_invariant, group_a, group_b, activation, beta
    return SCALED_MM_NT_CALLS((a, weight, scale_a, scale_b, bias, out, out_scale, amax), options, stream)[0][OUT]


class ProductOptions(NamedTuple):
    """Everything that defines a product besides its arrays, unchecked."""

    out_dtype: Any
    use_fast_accum: Any
    batch_invariant: Any
    group_a: GroupShape | None = None
    group_b: Any = None
    """The group shape of the stored weight, whose transpose b may be."""
    activation: Any = None
    beta: Any = 0.0


def _describe(
    operands: Sequence[TensorSpec | None],
    options: tuple[Any, ...],
    *,
    names: tuple[str, ...],
    stored: bool,
    results: Collection[str],
) -> Described:
    a, b, scale_a, scale_b, bias, out, out_scale, amax = operands
    chosen = ProductOptions(*options)
    use_fast_accum = checks.flag(chosen.use_fast_accum, "use_fast_accum")
    batch_invariant = checks.flag(chosen.batch_invariant, "batch_invariant")
    out_dtype = dtype_name(chosen.out_dtype, "out_dtype", results)
    a, b, scale_a, scale_b = (specs.required(x, name) for x, name in zip(operands[:4], names, strict=True))
    weight = b if stored else transposed(b)
    product = product_of(
        *(a, weight, scale_a, scale_b, bias, out_dtype, out_scale, amax),
        stored=stored,
        group_a=chosen.group_a,
        group_b=chosen.group_b,
    )
    activation, beta = known_activation(chosen.activation), checked_beta(chosen.beta, out, product.out)
    problem = product.problem(use_fast_accum, batch_invariant, out)._replace(activation=activation, beta=beta)
    new = {OUT: NewArray(product.shape, product.out)}
    if amax is not None:
        new[AMAX] = NewArray((1,), "float32")

    def plan() -> Planned:
        if product.m and product.n:
            launch = SCALED_MM.plan(problem)
            return Planned(launch, launch.scratch_bytes)
        if amax is None:
            return Planned(None)
        clear = plan_clear_amax(product.a.target)
        return Planned(lambda stream_, *addresses: clear(stream_, addresses[AMAX]))

    return Described(new, plan, lambda: SCALED_MM.explain(problem))


def product_operation(
    a: str = "a",
    b: str = "b",
    scale_a: str = "scale_a",
    scale_b: str = "scale_b",
    *,
    stored: bool,
    results: Collection[str] = RESULTS,
) -> Operation:
    """Return a product operation whose error messages use these operand names, in the order of its launches.

    ``stored`` says whether b is the weight as it is stored, ``[n, k]``, and ``results`` which dtypes a result may have.
    """
    operands = (
        Operand(a, *FORMATS),
        Operand(b, *FORMATS),
        ScaleOperand(scale_a, "float32"),
        ScaleOperand(scale_b, "float32"),
        Operand("bias", *HIGH_PRECISION),
        Operand("out", *RESULTS),
        ScaleOperand("out_scale", "float32"),
        Operand("amax", "float32"),
    )
    describe = partial(_describe, names=operands[:4], stored=stored, results=results)
    return Operation(operands, describe, scratch=True, numbers=(2, 3, 6))


SCALED_MM_CALLS: Final = product_operation(stored=False)
SCALED_MM_NT_CALLS: Final = product_operation(b="weight", stored=True)


@eager_only
def product_by(
    operation: Operation, a: object, b: object, scale_a: object, scale_b: object, bias: object, out_dtype: object
) -> Any:
    """Call `scaled_mm` through an operation whose error messages use the operand names of another function."""
    options = out_dtype, True, False, None, None, None, 0.0
    return operation((a, b, scale_a, scale_b, bias, None, None, None), options)[0][OUT]
