"""Conversion between the two E4M3 formats: OCP's e4m3fn and e4m3fnuz of AMD's MI300."""

from collections.abc import Sequence
from typing import Any, Final, Unpack, overload

from fp8core import interop
from fp8core.core import scale_shapes, specs
from fp8core.core.calls import Described, NewArray, Planned
from fp8core.core.operation import Operation
from fp8core.core.specs import TensorSpec, contiguous_count
from fp8core.dtypes import FORMATS
from fp8core.errors import DTypeError
from fp8core.interop import Operand, ScaleOperand, eager_only
from fp8core.interop.float8 import Float8Array
from fp8core.kernels.weights import NORMALIZE
from fp8core.problem import Normalize
from fp8core.runtime.plans import NormalizeNumbers
from fp8core.types import ArrayT, CallKeywords, NumpyArray, Scale

WEIGHT, OUT, SCALE, NEW_SCALE, INPUT_SCALE, NEW_INPUT_SCALE = range(6)
"""The indices of the operands."""


@overload
def normalize_e4m3fn_to_e4m3fnuz(
    weight: Float8Array, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[Float8Array, Any, Any]: ...
@overload
def normalize_e4m3fn_to_e4m3fnuz(
    weight: NumpyArray, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[NumpyArray, NumpyArray, NumpyArray | None]: ...
@overload
def normalize_e4m3fn_to_e4m3fnuz(
    weight: ArrayT, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[ArrayT, ArrayT, ArrayT | None]: ...
@eager_only
def normalize_e4m3fn_to_e4m3fnuz(
    weight: object, weight_scale: object, input_scale: object = None, *, out: object = None, stream: object = None
) -> Any:
    """Convert a weight to AMD's e4m3fnuz with the same real values: ``(weight, weight_scale, input_scale)``.

    A byte means half the value in fnuz, so scales are doubled. 0x80 (-0) becomes 0x00, the NaN bytes 0x7f and 0xff
    become 0x80, and all other bytes stay the same. The name and the rule for 0x80 are those of vLLM's ``w8a8_utils``.

    Args:
        weight: float8_e4m3fn, contiguous, of any shape.
        weight_scale: a number, or float32, contiguous, of any shape.
        input_scale: like weight_scale, or None.
        out: memory for the new weight; ``out=weight`` converts in place and returns an array over that memory.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        The weight in float8_e4m3fnuz, the doubled weight_scale, and the doubled input_scale or None.

    Raises:
        DTypeError: weight has another format.
        ShapeError, LayoutError, DeviceError: before anything is launched or written.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32))
        >>> weight, scale, _ = fp8core.normalize_e4m3fn_to_e4m3fnuz(*q)
        >>> weight.dtype, float(scale[0, 0])
        (dtype(float8_e4m3fnuz), 2.0)
    """
    return _normalized(weight, "float8_e4m3fn", "float8_e4m3fnuz", weight_scale, input_scale, out, stream)


@overload
def normalize_e4m3fnuz_to_e4m3fn(
    weight: Float8Array, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[Float8Array, Any, Any]: ...
@overload
def normalize_e4m3fnuz_to_e4m3fn(
    weight: NumpyArray, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[NumpyArray, NumpyArray, NumpyArray | None]: ...
@overload
def normalize_e4m3fnuz_to_e4m3fn(
    weight: ArrayT, weight_scale: Scale, input_scale: Scale | None = None, **keywords: Unpack[CallKeywords]
) -> tuple[ArrayT, ArrayT, ArrayT | None]: ...
@eager_only
def normalize_e4m3fnuz_to_e4m3fn(
    weight: object, weight_scale: object, input_scale: object = None, *, out: object = None, stream: object = None
) -> Any:
    """Convert a weight to OCP's e4m3fn with the same real values: the inverse of `normalize_e4m3fn_to_e4m3fnuz`.

    Scales are halved and 0x80 (NaN) becomes 0x7f. The bytes 0x7f and 0xff mean +-240, which is +-480 at the halved
    scale; e4m3fn cannot represent that, and they become the nearest value, +-448.

    Args:
        weight: float8_e4m3fnuz, contiguous, of any shape.
        weight_scale: a number, or float32, contiguous, of any shape.
        input_scale: like weight_scale, or None.
        out: memory for the new weight; ``out=weight`` converts in place.
        stream: the stream to launch on, as for `quantize`.

    Returns:
        The weight in float8_e4m3fn, the halved weight_scale, and the halved input_scale or None.

    Raises:
        DTypeError: weight has another format.
        ShapeError, LayoutError, DeviceError: before anything is launched or written.

    Examples:
        >>> import numpy as np, fp8core
        >>> q = fp8core.quantize(np.array([[448.0, -2.0]], np.float32), dtype="float8_e4m3fnuz")
        >>> weight, scale, _ = fp8core.normalize_e4m3fnuz_to_e4m3fn(*q)
        >>> fp8core.dequantize(weight, scale).tolist()
        [[448.0, -2.0]]
    """
    return _normalized(weight, "float8_e4m3fnuz", "float8_e4m3fn", weight_scale, input_scale, out, stream)


def _normalized(
    weight: Any, old: str, new: str, weight_scale: Any, input_scale: Any, out: Any, stream: object
) -> tuple[Any, Any, Any]:
    operands = weight, out, weight_scale, None, input_scale, None
    arrays, _ = NORMALIZE_CALLS(operands, (old, new), stream)
    result = arrays[OUT] if out is None else interop.reinterpret(out, new)
    return result, arrays[NEW_SCALE], arrays[NEW_INPUT_SCALE]


def _describe_normalize(operands: Sequence[TensorSpec | None], formats: tuple[str, str]) -> Described:
    weight, out, scale, _, of_input, _ = operands
    weight = specs.required(weight, "weight")
    old, new = formats
    if weight.dtype != old:
        raise DTypeError(f"weight needs {old}, got {weight.dtype}")
    scale = specs.required(scale, "weight_scale")
    count = contiguous_count(weight)
    scale_shapes.check_scale_dtype(scale)
    if of_input is not None:
        scale_shapes.check_scale_dtype(of_input)
    specs.check_same_device(weight, scale, of_input, out)
    if out is not None:
        if out.dtype not in formats:
            raise DTypeError(f"out needs {new}, or {old} as for weight itself, got {out.dtype}")
        specs.check_written(out, weight.shape, out.dtype)
        contiguous_count(out)
    counts = contiguous_count(scale), 0 if of_input is None else contiguous_count(of_input)
    problem = Normalize(weight.target, old, specs.alignment(weight.alignment, specs.alignment_of(out)))
    results = {OUT: NewArray(weight.shape, new), NEW_SCALE: NewArray(scale.shape, "float32")}
    if of_input is not None:
        results[NEW_INPUT_SCALE] = NewArray(of_input.shape, "float32")

    def plan() -> Planned:
        return Planned(NORMALIZE.plan(problem).bind(NormalizeNumbers(count, *counts)))

    return Described(results, plan, lambda: NORMALIZE.explain(problem))


NORMALIZE_CALLS: Final = Operation(
    (
        Operand("weight", *FORMATS),
        Operand("out", *FORMATS),
        ScaleOperand("weight_scale", "float32"),
        "new weight_scale",
        ScaleOperand("input_scale", "float32"),
        "new input_scale",
    ),
    _describe_normalize,
    in_place=((OUT, WEIGHT),),
    numbers=(SCALE, INPUT_SCALE),
)
