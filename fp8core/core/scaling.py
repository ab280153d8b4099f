"""How a result is scaled and where it is stored, for `quantize`, the fused producers and linear layers."""

import math
from ctypes import c_float
from typing import Any, Final, NamedTuple

from fp8core.core import checks, scale_shapes, specs
from fp8core.core.calls import NewArray
from fp8core.core.specs import TensorSpec
from fp8core.dtypes import FORMATS
from fp8core.errors import LayoutError, ScaleError, ShapeError
from fp8core.interop import dlpack, dtype_name, scalar
from fp8core.problem import PER_TENSOR, PER_TOKEN, GroupShape, ScaleFormat, ScaleLayout


def default_eps() -> float:
    """Return `EPS`, also to torch.compile, which makes a float of a module an input of a dynamic graph."""
    return 1e-10


EPS: Final = default_eps()
"""The lower bound of the amax of a group; vLLM's kernels use the same."""
SCALE_DTYPE: Final = {"float32": "float32", "ue8m0": "float32", "ue8m0_bytes": "float8_e8m0fnu"}

SCALES: Final = ("float32", "float8_e8m0fnu")
"""The dtypes of scales."""


def split(out: Any, scale: Any) -> tuple[Any, Any]:
    """Split the caller's ``out``: return the array for codes, and the given scale or the array for the computed one.

    Raises:
        ScaleError: a scale is given, and ``out`` has another array for it.
        ShapeError: ``out`` is a tuple, but not of two items.
    """
    if not isinstance(out, tuple):
        return out, scale
    if len(out) != 2:
        raise ShapeError(f"out needs an array for the data, or a pair for data and scale, got {len(out)} items")
    if scale is None:
        return out
    data, kept = out
    if kept is not None and kept is not scale:
        raise ScaleError("out needs no scale when the scale is given")
    return data, scale


def number_or_operand(x: Any) -> tuple[float | None, Any]:
    """Return ``(number, None)`` for a ``scale_ub`` that is a number, otherwise ``(None, x)``: x has to be an array.

    Raises:
        ScaleError: the number is finite, and too large for a float.
    """
    number = scalar(x)
    if number is None:
        return None, x
    if checks.became_infinite(x, number):
        raise ScaleError(f"scale_ub needs a positive number that float32 holds, or infinity, got {x}")
    return number, None


class ScaleOptions(NamedTuple):
    """The caller's options for the scales of a result, unchecked."""

    dtype: Any
    group_shape: Any
    given: bool
    """Whether the scale is given; otherwise it is computed, into an array of the caller or a new one."""
    upper: Any
    """scale_ub if it is a number; None if there is none, or if it is an operand."""
    scale_format: Any = "float32"
    scale_layout: Any = "k"
    eps: float = EPS


class Scaling(NamedTuple):
    """How a result is scaled, checked."""

    dtype: str
    group_shape: GroupShape
    given: bool
    strides: tuple[int, int]
    """The strides of the scales as a matrix, in elements."""
    shape: tuple[int, ...]
    """The shape of the scales."""
    scale_format: ScaleFormat
    layout: ScaleLayout
    upper: float
    """The upper bound of amax if it is a number, otherwise infinity."""
    eps: float

    @property
    def scale_dtype(self) -> str:
        """The dtype of computed scales."""
        return SCALE_DTYPE[self.scale_format]

    def computed(self) -> int:
        """Return the number of scales to compute."""
        return 0 if self.given else math.prod(self.shape)


def scaling(
    options: ScaleOptions,
    x: TensorSpec,
    shape: tuple[int, ...],
    scale: TensorSpec | None,
    scale_ub: TensorSpec | None,
) -> Scaling:
    """Check the options and operands that determine how to scale a result of shape ``shape``, made from ``x``.

    ``scale`` is the given scale, or the caller's array for the computed one.
    """
    name = dtype_name(options.dtype, "dtype", FORMATS)
    group = checks.group_shape(options.group_shape)
    scale_format, layout = options.scale_format, options.scale_layout
    if not checks.is_one_of(scale_format, SCALE_DTYPE):
        raise ScaleError(f"scale_format needs one of {', '.join(SCALE_DTYPE)}, got {scale_format!r}")
    if not checks.is_one_of(layout, ("k", "mn")):
        raise LayoutError(f"scale_layout needs 'k' or 'mn', got {layout!r}")
    eps = _eps(options, FORMATS[name].maximum * 2.0**-126, group)
    result = x._replace(shape=shape, strides=dlpack.row_major(shape))
    at = specs.matrix(result)
    if options.given:
        assert scale is not None
        scale_shapes.check_scale_dtype(scale, bytes_allowed=True)
        specs.check_same_device(x, scale)
        if scale_ub is not None or options.upper is not None:
            raise ScaleError("scale_ub needs to be left out where a scale is given, got both")
        format_: ScaleFormat = "ue8m0_bytes" if scale.dtype == "float8_e8m0fnu" else "float32"
        if scale_format not in ("float32", format_):
            raise ScaleError(
                f"scale_format needs to be left out where a scale is given and kept as it is, got {scale_format!r}"
            )
        if layout != "k":
            raise LayoutError(f"scale_layout needs to be left out where a scale is given, got {layout!r}")
        group, strides = scale_shapes.of_groups(scale, group, result)
        return Scaling(name, group, True, strides, scale.shape, format_, "k", math.inf, eps)
    upper = _upper(options.upper, scale_ub, group, x)
    wanted = scale_shapes.of_array(shape, group, x.name)
    matrix = group.scale_shape(at.rows, at.cols)
    strides = (1, matrix[0]) if layout == "mn" else (matrix[1], 1)
    if scale is not None:
        specs.check_same_device(x, scale)
        specs.check_written(scale, wanted, SCALE_DTYPE[scale_format])
        strides = specs.folded(scale)[1] if len(wanted) > 1 else scale.strides[-1], scale.strides[-1]
        specs.check_no_overlap(scale, strides)
        if layout == "mn" and matrix[0] > 1 and strides[0] != 1:
            raise LayoutError(
                f"{scale.name} needs contiguous columns for scale_layout 'mn', got strides {scale.strides} (elements)"
            )
    if group == PER_TENSOR:
        strides = (0, 0)
    return Scaling(name, group, False, strides, wanted, scale_format, layout, upper, eps)


def _eps(options: ScaleOptions, least: float, group: GroupShape) -> float:
    eps = options.eps
    if not least <= eps <= checks.LARGEST_FLOAT32:
        raise ScaleError(
            f"eps needs a number that float32 holds of at least {least:.3g}, so that no scale is subnormal, got {eps!r}"
        )
    if c_float(eps).value != c_float(EPS).value:
        if options.given:
            raise ScaleError(f"eps needs to be left out where a scale is given, got {eps!r}")
        if group in (PER_TENSOR, PER_TOKEN):
            raise ScaleError(
                "eps needs a group_shape of groups or blocks, as the scales of tokens and tensors have a least value of"
                f" their own, got {eps!r} for {tuple(group)}"
            )
    return eps


def _upper(value: Any, operand: TensorSpec | None, group: GroupShape, x: TensorSpec) -> float:
    if value is None and operand is None:
        return math.inf
    if group != PER_TOKEN:
        raise ScaleError(
            f"scale_ub needs group_shape {tuple(PER_TOKEN)}, as it bounds amax per token, got {tuple(group)}"
        )
    if operand is None:
        if not value > 0 or not checks.in_float32(value):
            raise ScaleError(f"scale_ub needs a positive number that float32 holds, or infinity, got {value}")
        return float(value)
    scale_shapes.check_scale_dtype(operand)
    scale_shapes.check_one_number(operand)
    specs.check_same_device(x, operand)
    return math.inf


def results_of(how: Scaling, shape: tuple[int, ...], data: int) -> dict[int, NewArray]:
    """Return the results of a quantization: codes of shape ``shape`` at index ``data``, and behind them new scales."""
    results = {data: NewArray(shape, how.dtype)}
    if not how.given:
        results[data + 1] = _new_scale(how)
    return results


def _new_scale(how: Scaling) -> NewArray:
    """Return the array for computed scales, yet to be allocated."""
    if how.layout == "mn" and how.group_shape != PER_TENSOR:
        rows = how.shape[:-1]
        return NewArray(how.shape, how.scale_dtype, (*dlpack.row_major(rows), math.prod(rows)))
    return NewArray(how.shape, how.scale_dtype)


def codes_alignment(x: TensorSpec, stride: int, data: int, data_stride: int) -> int:
    """Return the alignment of a quantization, whose kernels load eight elements at a time and store eight bytes.

    Args:
        x: the array to quantize.
        stride: the elements from row to row of x.
        data: the alignment of the codes' address.
        data_stride: the elements from row to row of the codes.
    """
    codes = data | data_stride
    return specs.alignment(x.alignment, stride * x.itemsize, codes if codes % 8 else 0)
