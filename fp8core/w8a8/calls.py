"""Functions with vLLM's names: a quantization, products, and a layer."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from fp8core import interop
from fp8core.core import checks, specs
from fp8core.errors import ScaleError, ShapeError
from fp8core.ops.linear import input_format
from fp8core.ops.quantize import quantize_by, quantize_operation
from fp8core.ops.scaled_mm import product_by, product_operation
from fp8core.problem import FORMATS, HIGH_PRECISION, PER_TENSOR, PER_TOKEN, native_e4m3
from fp8core.types import Array, DType, Scale, WideDType

QUANTIZE: Final = quantize_operation("input", "output")
QUANTIZE_INPUT: Final = quantize_operation("input", "output", "input_scale", "input_scale_ub")
PRODUCT: Final = product_operation("qinput", "weight", stored=False, results=HIGH_PRECISION)
APPLY: Final = product_operation("input", "weight", "input_scale", "weight_scale", stored=False, results=HIGH_PRECISION)
"""Like all operations here, with vLLM's operand names in error messages."""
VARIANTS: Final = {"quantize": (QUANTIZE, QUANTIZE_INPUT), "scaled_mm": (PRODUCT, APPLY)}
"""By the name of an operation: the operations here that differ from it in the names of operands and take less."""
INPUT: Final = interop.Operand("input", *HIGH_PRECISION)
ANY_INPUT: Final = interop.Operand("input", *HIGH_PRECISION, *FORMATS)
OUTPUT: Final = interop.Operand("output", *FORMATS)
WEIGHT: Final = interop.Operand("weight", *FORMATS)
QINPUT: Final = interop.Operand("qinput", *FORMATS)
UPPER: Final = interop.ScaleOperand("scale_ub", "float32")
INPUT_UPPER: Final = interop.ScaleOperand("input_scale_ub", "float32")
PER_TOKEN_IF_DYNAMIC: Final = "use_per_token_if_dynamic"


@interop.eager_only
def scaled_fp8_quant(
    input: Array,
    scale: Scale | None = None,
    num_token_padding: int | None = None,
    scale_ub: Scale | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Array | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[Any, Any]:
    """Return ``(data, scale)`` of a matrix ``[m, k]``: `fp8core.quantize` with vLLM's name and arguments.

    Args:
        input: float32, float16 or bfloat16 ``[m, k]``.
        scale: a given scale, a number or a float32 array; without it the scale is dynamic.
        num_token_padding: the least number of rows of the result, at most 2**31 - 1.
        scale_ub: an upper bound of amax, per token only; ignored per tensor and with a given scale, as by vLLM.
        use_per_token_if_dynamic: with a dynamic scale, use one per token instead of one for the tensor.
        output: an FP8 array for the data; without it the data has the native E4M3 format of the device.
        group_shape: the groups of a scale, given or dynamic; per token with use_per_token_if_dynamic.

    Returns:
        tuple: FP8 data in the framework of ``input``, and its scale, ``[1]`` per tensor and ``[m, 1]`` per token.

    Raises:
        DTypeError, ShapeError, LayoutError, ScaleError, DeviceError: before anything is launched or written.

    Examples:
        >>> import numpy as np
        >>> from fp8core import w8a8
        >>> data, scale = w8a8.scaled_fp8_quant(np.array([[1.0, -448.0]], np.float32), num_token_padding=4)
        >>> data.shape, scale.tolist()
        ((4, 2), [1.0])
    """
    rows = None if num_token_padding is None else checks.least_rows(num_token_padding, "num_token_padding")
    per_token = checks.flag(use_per_token_if_dynamic, PER_TOKEN_IF_DYNAMIC)
    dynamic = PER_TOKEN if per_token else PER_TENSOR
    shape = checks.group_shape(group_shape) if group_shape is not None else dynamic if scale is None else PER_TOKEN
    if scale is None and per_token and shape != PER_TOKEN:
        wanted = f"{tuple(PER_TOKEN)} where {PER_TOKEN_IF_DYNAMIC} is set"
        raise ScaleError(f"group_shape needs {wanted}, got {tuple(shape)}")
    return quantize_by(
        QUANTIZE,
        input,
        native_e4m3(interop.declared(input, INPUT)[1]) if output is None else fp8_of(output, OUTPUT),
        shape,
        scale=scale,
        scale_ub=_upper(scale_ub, UPPER, used=scale is None and shape != PER_TENSOR),
        rows_padded=rows,
        out=output,
    )


def _upper(x: Any, name: interop.ScaleOperand, *, used: bool) -> Any:
    """Return an upper bound of amax, or None where it is ignored; refuse what is neither a number nor an array."""
    if x is not None and interop.scalar(x) is None:
        interop.declared(x, name)
    return x if used else None


def _product(
    qinput: Any, weight: Any, out_dtype: Any, scale_a: Any, scale_b: Any, bias: Any, output_shape: Sequence[int]
) -> Any:
    most, n = (_extent(x, at, name) for x, at, name in ((qinput, 0, QINPUT), (weight, -1, WEIGHT)))
    shape = _extents(output_shape)
    rows: Any = math.prod(shape[:-1])
    known = isinstance(rows, int) and isinstance(most, int)  # comparing symbols of torch.export would constrain them
    if (known and rows > most) or shape[-1:] != (n,):
        raise ShapeError(f"output_shape needs at most {most} rows of {n} columns, got {shape}")
    result = product_by(PRODUCT, qinput[:rows], weight, _rows_of(scale_a, rows), scale_b, bias, out_dtype)
    return result.reshape(shape)


def _extent(x: Any, axis: int, name: interop.Operand) -> Any:
    """Return an extent of an operand, which may be a symbol."""
    if not getattr(x, "shape", ()):
        interop.declared(x, name)  # refuses anything but an array
        raise ShapeError(f"{name} needs two axes, got a 0-d array")
    return x.shape[axis]


def _extents(output_shape: Any) -> tuple[Any, ...]:
    """Return a shape whose extents are ints, or symbols of a tracer."""
    try:
        shape = tuple([n if type(n) is int or _symbol(n) else checks.as_int(n) for n in checks.ordered(output_shape)])
    except TypeError as error:
        raise ShapeError(f"output_shape needs whole numbers, got {output_shape!r}") from error
    if any(isinstance(n, int) and n < 0 for n in shape):
        raise ShapeError(f"output_shape needs extents of at least 0, got {shape}")
    return shape


def _symbol(extent: Any) -> bool:
    """Return whether an extent is a symbol of torch.export or jax.export."""
    return type(extent).__module__.partition(".")[0] in ("torch", "jax") and not hasattr(extent, "dtype")


def _rows_of(scale: Any, rows: int) -> Any:
    """Return the scales of the first ``rows`` tokens, without those of padding rows; one scale is for any rows."""
    shape = tuple(getattr(scale, "shape", ()))  # a number has none
    return scale[:rows] if len(shape) > 0 and shape[0] > rows and shape not in ((1,), (1, 1)) else scale


@interop.eager_only
def cutlass_w8a8_scaled_mm(
    *,
    qinput: Array,
    weight: Array,
    out_dtype: DType,
    scale_a: Scale,
    scale_b: Scale,
    bias: Array | None,
    output_shape: Sequence[int],
    input_2d: Array | None = None,
) -> Any:
    """Return `fp8core.scaled_mm` in the shape ``output_shape``, for any mix of scales per tensor and per row.

    Args:
        qinput: FP8 ``[rows, k]``; rows beyond those of output_shape are padding and are ignored.
        weight: FP8 ``[k, n]``, columns contiguous.
        out_dtype: the result's dtype: bfloat16, float16 or float32.
        scale_a: the input's scale: a number, or float32 of one or of ``[rows, 1]``.
        scale_b: the weight's scale: a number, or float32 of one or of ``[n, 1]``.
        bias: ``[n]`` in out_dtype or float32, or None.
        output_shape: the result's shape, ``[..., n]``.
        input_2d: the unquantized input; not needed.

    Returns:
        An array of shape output_shape and dtype out_dtype, in the framework of qinput.

    Raises:
        ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for
            `fp8core.scaled_mm`.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> a, weight = (fp8core.quantize(np.ones((rows, 32), np.float32)) for rows in (2, 3))
        >>> w8a8.cutlass_w8a8_scaled_mm(
        ...     qinput=a.data, weight=weight.data.T, out_dtype="float32", scale_a=a.scale, scale_b=weight.scale,
        ...     bias=None, output_shape=(1, 2, 3),
        ... ).round(3).tolist()
        [[[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]]
    """
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


@interop.eager_only
def rocm_per_tensor_w8a8_scaled_mm(
    *,
    qinput: Array,
    weight: Array,
    out_dtype: DType,
    scale_a: Scale,
    scale_b: Scale,
    bias: Array | None,
    input_2d: Array | None = None,
    output_shape: Sequence[int],
) -> Any:
    """Return the same as `cutlass_w8a8_scaled_mm` for the same arguments: the table chooses the kernel.

    ``torch_per_tensor_...``, ``torch_per_token_...`` and ``torch_channelwise_w8a8_scaled_mm`` are this function, too.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> a = fp8core.quantize(np.ones((2, 32), np.float32), group_shape=fp8core.PER_TENSOR)
        >>> w8a8.rocm_per_tensor_w8a8_scaled_mm(
        ...     qinput=a.data, weight=a.data.T, out_dtype="float32", scale_a=a.scale, scale_b=a.scale, bias=None,
        ...     input_2d=None, output_shape=(2, 2),
        ... ).round(3).tolist()
        [[32.0, 32.0], [32.0, 32.0]]
    """
    return _product(qinput, weight, out_dtype, scale_a, scale_b, bias, output_shape)


torch_per_tensor_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
torch_per_token_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm
torch_channelwise_w8a8_scaled_mm = rocm_per_tensor_w8a8_scaled_mm


def dispatch_w8a8_scaled_mm(
    cutlass_fp8_supported: bool,
    per_tensor_weights: bool,
    per_tensor_activations: bool,
    use_per_token_if_dynamic: bool | None = None,
) -> Callable[..., Any]:
    """Return vLLM's product function for a kind of scales; all use the same table and give the same numbers.

    Args:
        cutlass_fp8_supported: the result of the function `cutlass_fp8_supported`.
        per_tensor_weights: whether the weight has one scale.
        per_tensor_activations: whether the input has one scale.
        use_per_token_if_dynamic: whether a dynamic scale is per token.

    Examples:
        >>> from fp8core import w8a8
        >>> w8a8.dispatch_w8a8_scaled_mm(True, True, True).__name__
        'cutlass_w8a8_scaled_mm'
    """
    if cutlass_fp8_supported:
        return cutlass_w8a8_scaled_mm
    if per_tensor_weights and per_tensor_activations:
        return torch_per_tensor_w8a8_scaled_mm
    if not per_tensor_weights and not per_tensor_activations and use_per_token_if_dynamic:
        return torch_per_token_w8a8_scaled_mm
    return torch_channelwise_w8a8_scaled_mm


def fp8_of(x: Any, name: interop.Operand) -> str:
    """Return the dtype of an array; refuse any but FP8."""
    dtype, target = interop.declared(x, name)
    specs.check_fp8(specs.TensorSpec(name, dtype, (), (), target))
    return dtype


class Fp8LinearOp:
    """An FP8 linear layer for a weight ``[k, n]``: quantizes its input, unless that is FP8 already, and multiplies.

    Examples:
        >>> import numpy as np, fp8core
        >>> from fp8core import w8a8
        >>> weight = fp8core.quantize(np.ones((3, 32), np.float32))
        >>> op = w8a8.Fp8LinearOp(use_per_token_if_dynamic=True)
        >>> op.apply(np.ones((2, 32), np.float32), weight.data.T, weight.scale).round(3).tolist()
        [[32.0, 32.0, 32.0], [32.0, 32.0, 32.0]]
    """

    def __init__(
        self,
        cutlass_fp8_supported: bool | None = None,
        use_per_token_if_dynamic: bool = False,
        pad_output: bool | None = None,
    ) -> None:
        """Take vLLM's arguments, those of 0.9: a later version's ``GroupShape`` is no flag and is refused.

        Args:
            cutlass_fp8_supported: accepted and stored, but unused; the table chooses the kernel.
            use_per_token_if_dynamic: with a dynamic scale, use one per token.
            pad_output: accepted, but unused; no kernel here needs padding.

        Raises:
            DTypeError: use_per_token_if_dynamic or pad_output is neither True nor False.
        """
        self.cutlass_fp8_supported = cutlass_fp8_supported
        self.use_per_token_if_dynamic = checks.flag(use_per_token_if_dynamic, PER_TOKEN_IF_DYNAMIC)
        self.output_padding = 17 if pad_output is not None and checks.flag(pad_output, "pad_output") else None

    @interop.eager_only
    def apply(
        self,
        input: Array,
        weight: Array,
        weight_scale: Scale,
        out_dtype: WideDType | None = None,
        input_scale: Scale | None = None,
        input_scale_ub: Scale | None = None,
        bias: Array | None = None,
        use_per_token_if_dynamic: bool | None = None,
    ) -> Any:
        """Return ``input @ weight + bias`` for an input with any leading axes.

        Args:
            input: float32, float16 or bfloat16 ``[..., k]``, or FP8 together with input_scale.
            weight: FP8 ``[k, n]``, columns contiguous. The input gets its format, or E4M3 if that is E5M2.
            weight_scale: a number, or float32 of one or of ``[n, 1]``.
            out_dtype: the result's dtype; None means the input's dtype, or bfloat16 if the input is FP8.
            input_scale: a given scale of the input.
            input_scale_ub: an upper bound of amax, ignored unless the scale is dynamic and per token.
            bias: ``[n]`` in the result's dtype or float32.
            use_per_token_if_dynamic: overrides the setting of the layer.

        Returns:
            ``[..., n]`` of the result's dtype, in the framework of the input.

        Raises:
            ShapeError, DTypeError, LayoutError, ScaleError, DeviceError, UnsupportedProblemError: as for
                `fp8core.linear`.
        """
        own, _ = interop.declared(input, ANY_INPUT)
        given = self.use_per_token_if_dynamic if use_per_token_if_dynamic is None else use_per_token_if_dynamic
        per_token = checks.flag(given, PER_TOKEN_IF_DYNAMIC)
        data: Any = input
        scale: Any = input_scale
        dtype: Any = out_dtype
        if own not in FORMATS:
            data, scale = quantize_by(
                QUANTIZE_INPUT,
                input,
                input_format(fp8_of(weight, WEIGHT)),
                PER_TOKEN if per_token and input_scale is None else PER_TENSOR,
                scale=input_scale,
                scale_ub=_upper(input_scale_ub, INPUT_UPPER, used=per_token and input_scale is None),
            )
            dtype = own if out_dtype is None else out_dtype
        elif input_scale is None:
            raise ScaleError(f"input of {own} needs input_scale, got None")
        return product_by(APPLY, data, weight, scale, weight_scale, bias, "bfloat16" if dtype is None else dtype)
