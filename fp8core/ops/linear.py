"""FP8 linear layers: `linear` quantizes its input and multiplies; `Fp8Linear` (`fp8core.ops.layer`) keeps a weight."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Unpack, overload

from fp8core.core import checks, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.product import Product, known_activation, product_of
from fp8core.core.scale_shapes import ACTIVATION_GROUPS, is_one_number, known_group
from fp8core.core.scaling import number_or_operand
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS, HIGH_PRECISION
from fp8core.errors import ScaleError
from fp8core.interop import Operand, ScaleOperand, dtype_name, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.kernels.linear.overlapped import plan_behind_producer
from fp8core.kernels.linear.table import LINEAR, Steps, explain_linear
from fp8core.ops.linear_scratch import codes_in_scratch, planned
from fp8core.ops.quantize import quantize_problem
from fp8core.ops.quantized import Quantized, parts
from fp8core.problem import PER_TOKEN, GroupShape, Linear, ScaledMm
from fp8core.types import Array, ArrayT, LinearKeywords, NumpyArray, Scale, Untyped

OUT: Final = 6
"""The index of the result among the operands."""


class LinearOptions(NamedTuple):
    """Everything that defines a linear layer besides its arrays, unchecked."""

    group_shape: Any = PER_TOKEN
    scale_ub: Any = None
    """A number; None if there is none, or if it is an operand."""
    out_dtype: Any = None
    use_fast_accum: bool = True
    batch_invariant: bool = False
    x_group: GroupShape | None = None
    """The group shape of an x that is already quantized, if it is known."""
    weight_group: GroupShape | None = None
    activation: Any = None


@overload
def linear(
    x: Float8Array | Quantized[Float8Array, Untyped],
    weight: Array | Quantized[object, object],
    weight_scale: Scale | None = None,
    **keywords: Unpack[LinearKeywords],
) -> Any: ...
@overload
def linear(
    x: NumpyArray | Quantized[object, NumpyArray],
    weight: Array | Quantized[object, object],
    weight_scale: Scale | None = None,
    **keywords: Unpack[LinearKeywords],
) -> NumpyArray: ...
@overload
def linear(
    x: ArrayT | Quantized[object, ArrayT],
    weight: Array | Quantized[object, object],
    weight_scale: Scale | None = None,
    **keywords: Unpack[LinearKeywords],
) -> ArrayT: ...
@eager_only
def linear(
    x: object,
    weight: object,
    weight_scale: object = None,
    *,
    bias: object = None,
    activation: object = None,
    input_scale: object = None,
    group_shape: tuple[int, int] = PER_TOKEN,
    scale_ub: object = None,
    out_dtype: object = None,
    use_fast_accum: bool = True,
    batch_invariant: bool = False,
    out: object = None,
    stream: object = None,
) -> Any:
    """Return ``activation(x @ weight.T + bias)``; x is quantized to FP8 first, unless it is FP8 already.

    The formulas are those of ``scaled_mm_nt(quantize(x, group_shape=group_shape), weight)``.

    Args:
        x: float32, float16 or bfloat16 ``[..., k]``, which is quantized to the weight's format, or to E4M3 if that is
            E5M2; or FP8, as a `Quantized` or together with input_scale.
        weight: FP8 ``[n, k]`` as it is stored, rows contiguous, or a `Quantized`.
        weight_scale: a number, or float32 in the weight's orientation: one number, ``[n, 1]`` or ``[n]`` per channel,
            ``[ceil(n / 128), ceil(k / 128)]`` for blocks of 128x128, or ``[n, ceil(k / 128)]`` for groups of 1x128;
            blocks and groups need group_shape (1, 128).
        bias: ``[n]`` in out_dtype or float32.
        activation: None, "gelu", "gelu_tanh" or "silu", as for `scaled_mm`.
        input_scale: the scale of x, for static quantization; required if x is an array of FP8.
        group_shape: how x is quantized: PER_TOKEN, PER_TENSOR or GROUP_128, and no other. An input_scale of one number
            holds for all of x, whatever group_shape is. If x is FP8 already, it may be left out, and needs to be that
            of x otherwise.
        scale_ub: an upper bound of amax per token.
        out_dtype: float32, float16 or bfloat16; None means x's dtype, or bfloat16 if x is FP8.
        use_fast_accum: as for `scaled_mm`.
        batch_invariant: as for `scaled_mm`.
        out: an array ``[..., n]`` for the result.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        ``[..., n]`` of out_dtype, in the framework of x.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError: as for `scaled_mm`, before anything is launched
            or written.
        UnsupportedProblemError: no kernel can run the call.

    Examples:
        >>> import numpy as np, fp8core
        >>> weight = fp8core.quantize(np.eye(4, 32, dtype=np.float32))
        >>> fp8core.linear(np.ones((2, 32), np.float32), weight).round(3)
        array([[1., 1., 1., 1.],
               [1., 1., 1., 1.]], dtype=float32)
    """
    x_group = weight_group = None
    if isinstance(x, Quantized):
        x, input_scale, x_group = parts(x, input_scale, "x", "input_scale")
        if x_group is not None and checks.group_shape(group_shape) not in (PER_TOKEN, x_group):
            raise ScaleError(f"group_shape needs to be that of x, {tuple(x_group)}, or left out, got {group_shape}")
    if weight_scale is None or isinstance(weight, Quantized):
        weight, weight_scale, weight_group = parts(weight, weight_scale, "weight", "weight_scale")
    bound, upper = (None, None) if scale_ub is None else number_or_operand(scale_ub)
    options = group_shape, bound, out_dtype, use_fast_accum, batch_invariant, x_group, weight_group, activation
    return LINEAR_CALLS((x, weight, weight_scale, bias, input_scale, upper, out), options, stream)[0][OUT]


def activation_group(group_shape: Any) -> GroupShape:
    """Check and return a group shape of activations that products take.

    Raises:
        ScaleError: products do not take this group shape.
    """
    group = checks.group_shape(group_shape)
    known_group(group, ACTIVATION_GROUPS, "group_shape")
    return group


def result_dtype(out_dtype: Any, own: str) -> str:
    """Return the dtype of results, one of `HIGH_PRECISION`; ``own`` if ``out_dtype`` is None."""
    return own if out_dtype is None else dtype_name(out_dtype, "out_dtype", HIGH_PRECISION)


INPUT_FORMAT: Final = {"float8_e5m2": "float8_e4m3fn", "float8_e5m2fnuz": "float8_e4m3fnuz"}
"""The format that inputs are quantized to if the weight is e5m2: no product multiplies e5m2 by e5m2."""


def input_format(weight: str) -> str:
    """Return the format that inputs are quantized to: that of the weight, unless it is e5m2."""
    return INPUT_FORMAT.get(weight, weight)


def _describe(operands: Sequence[TensorSpec | None], options: tuple[Any, ...]) -> Described:
    x, weight, weight_scale, bias, input_scale, upper, out = operands
    chosen = LinearOptions(*options)
    chosen = chosen._replace(
        use_fast_accum=checks.flag(chosen.use_fast_accum, "use_fast_accum"),
        batch_invariant=checks.flag(chosen.batch_invariant, "batch_invariant"),
    )
    x, weight = specs.required(x, "x"), specs.required(weight, "weight")
    weight_scale = specs.required(weight_scale, "weight_scale")
    specs.check_fp8(weight)
    group = activation_group(chosen.group_shape)
    if x.dtype in FORMATS:
        if chosen.scale_ub is not None or upper is not None:
            raise ScaleError(f"scale_ub needs to be left out where x is FP8, got x of {x.dtype}")
        return _describe_product(x, weight, weight_scale, bias, input_scale, out, group, chosen)
    return _describe_both(x, weight, weight_scale, bias, input_scale, upper, out, group, chosen)


def _describe_product(
    x: TensorSpec,
    weight: TensorSpec,
    weight_scale: TensorSpec,
    bias: TensorSpec | None,
    input_scale: TensorSpec | None,
    out: TensorSpec | None,
    group: GroupShape,
    options: LinearOptions,
) -> Described:
    """Describe the product for an x that is already FP8."""
    if input_scale is None:
        raise ScaleError(f"x of {x.dtype} needs input_scale or to be a Quantized, as quantize returns it, got neither")
    x_group = options.x_group
    if x_group is None and group != PER_TOKEN and not is_one_number(input_scale.shape):
        x_group = group
    product = product_of(
        x,
        weight,
        input_scale,
        weight_scale,
        bias,
        result_dtype(options.out_dtype, "bfloat16"),
        stored=True,
        group_a=x_group,
        group_b=options.weight_group,
    )
    problem = _problem(product, options, out)

    def steps(prefetch: bool) -> Steps:
        if not prefetch:
            return Steps(None, SCALED_MM.plan(problem))
        return Steps(None, plan_behind_producer(problem._replace(prefetch_weight=True)))

    def plan() -> Planned:
        return planned(steps, None) if product.m and product.n else Planned(None)

    return Described({OUT: NewArray(product.shape, product.out)}, plan, lambda: SCALED_MM.explain(problem))


def _describe_both(
    x: TensorSpec,
    weight: TensorSpec,
    weight_scale: TensorSpec,
    bias: TensorSpec | None,
    input_scale: TensorSpec | None,
    upper: TensorSpec | None,
    out: TensorSpec | None,
    group: GroupShape,
    options: LinearOptions,
) -> Described:
    """Describe a quantization of x into a scratch, followed by the product."""
    q = codes_in_scratch(x, input_format(weight.dtype), group, input_scale, upper, options.scale_ub)
    product = product_of(
        q.codes,
        weight,
        q.scale,
        weight_scale,
        bias,
        result_dtype(options.out_dtype, x.dtype),
        stored=True,
        group_a=None if q.how.given else q.how.group_shape,
        group_b=options.weight_group,
    )
    quantization = quantize_problem(x, q.at, q.how, q.at.rows, None, q.stride)
    limit, multiplied = None if upper is not None else q.how.upper, _problem(product, options, out)
    problem = Linear(quantization, multiplied, q.at.stride, limit)

    def steps(prefetch: bool) -> Steps:
        made: Steps = LINEAR.plan(problem._replace(product=multiplied._replace(prefetch_weight=prefetch)))
        return made

    def plan() -> Planned:
        return planned(steps, q) if product.m and product.n else Planned(None)

    return Described({OUT: NewArray(product.shape, product.out)}, plan, lambda: explain_linear(problem))


def _problem(product: Product, options: LinearOptions, out: TensorSpec | None) -> ScaledMm:
    """Return the problem of a layer's product, after checking ``out`` and the activation."""
    asked = product.problem(options.use_fast_accum, options.batch_invariant, out)
    return asked._replace(activation=known_activation(options.activation))


ARRAYS: Final = (
    Operand("weight", *FORMATS),
    ScaleOperand("weight_scale", "float32"),
    Operand("bias", *HIGH_PRECISION),
    ScaleOperand("input_scale", "float32"),
)
"""The arrays of a layer."""
LINEAR_CALLS: Final = Operation(
    (
        Operand("x", *HIGH_PRECISION, *FORMATS),
        *ARRAYS,
        ScaleOperand("scale_ub", "float32"),
        Operand("out", *HIGH_PRECISION),
    ),
    _describe,
    scratch=True,
    numbers=(2, 4),
)
"""The calls of `linear` and of all layers: layers of one shape share them."""
