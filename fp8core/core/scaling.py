"""How a result is scaled and where it goes: what `quantize` and the fused producers share."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from fp8core import interop
from fp8core.core import operands, scales
from fp8core.errors import LayoutError, ScaleError
from fp8core.interop import Allocator, TensorView
from fp8core.interop.tensor import new_tuple
from fp8core.problem import FORMATS, PER_TENSOR, PER_TOKEN, GroupShape, ScaleFormat, ScaleLayout
from fp8core.table import Launch

EPS = 1e-10
"""The least amax of a group, as the kernels that vLLM ships have it."""
SCALE_DTYPE = {"float32": "float32", "ue8m0": "float32", "ue8m0_bytes": "float8_e8m0fnu"}


class Quantized(NamedTuple):
    """FP8 data and the scales to multiply them by."""

    data: Any
    scale: Any


class Scaling(NamedTuple):
    """How a result is scaled."""

    dtype: str
    group_shape: GroupShape
    given: TensorView | None
    strides: tuple[int, int]
    scale_format: ScaleFormat
    layout: ScaleLayout
    upper: TensorView | None
    upper_value: float
    eps: float

    @property
    def others(self) -> tuple[TensorView, ...]:
        """The operands beside x."""
        if self.given is not None:
            return (self.given,)
        return () if self.upper is None else (self.upper,)

    @property
    def upper_pointer(self) -> int:
        """The address of scale_ub, 0 where it is a number or absent."""
        return 0 if self.upper is None else self.upper.pointer

    def computed(self, rows: int, cols: int) -> int:
        """Return how many scales of a ``rows`` x ``cols`` result have to be computed."""
        return 0 if self.given is not None else math.prod(self.group_shape.scale_shape(rows, cols))


def scaling(
    dtype: object,
    group_shape: tuple[int, int],
    scale: object,
    scale_ub: object,
    scale_format: ScaleFormat,
    scale_layout: ScaleLayout,
    eps: float,
    x: TensorView,
    rows: int,
    cols: int,
) -> Scaling:
    """Check everything that says how to scale a ``rows`` x ``cols`` result next to ``x``."""
    name = operands.fp8_name(interop.dtype_name(dtype), "dtype")
    shape = operands.group(group_shape)
    if scale_format not in SCALE_DTYPE:
        raise ScaleError(f"scale_format needs one of {', '.join(SCALE_DTYPE)}, got {scale_format!r}")
    if scale_layout not in ("k", "mn"):
        raise LayoutError(f"scale_layout needs 'k' or 'mn', got {scale_layout!r}")
    smallest = FORMATS[name].maximum * 2.0**-126
    if not smallest <= eps < math.inf:
        raise ScaleError(f"eps needs a number of at least {smallest:.3g}, so that no scale is subnormal, got {eps}")
    if scale is not None:
        given = interop.view(scale, "scale")
        scales.is_scale(given, "scale", bytes_allowed=True)
        operands.same_device(x, "x", scale=given)
        if scale_ub is not None:
            raise ScaleError("scale_ub bounds a scale that is computed; got it together with a given scale")
        format_: ScaleFormat = "ue8m0_bytes" if given.dtype == "float8_e8m0fnu" else "float32"
        shape, strides = scales.of_groups(given, shape, rows, cols, "scale")
        return Scaling(name, shape, given, strides, format_, "k", None, math.inf, eps)
    upper, upper_value = _upper(scale_ub, shape, x)
    return Scaling(name, shape, None, (0, 0), scale_format, scale_layout, upper, upper_value, eps)


def alignment(x: TensorView, at: operands.Matrix, how: Scaling, rows: int, data_at: int, data_stride: int) -> int:
    """Return the alignment of the quantization of ``x`` to ``rows`` rows of codes, ``data_stride`` apart.

    Where one scale is found for a tensor without gaps, it is one long row: only its beginning counts.
    """
    dense = at.stride == data_stride == at.cols and rows == at.rows
    if dense and how.given is None and how.group_shape == PER_TENSOR:
        return operands.octets(x, 0, data_at, 0)
    return operands.octets(x, at.stride, data_at, data_stride)


def _upper(scale_ub: object, shape: GroupShape, x: TensorView) -> tuple[TensorView | None, float]:
    if scale_ub is None:
        return None, math.inf
    if shape != PER_TOKEN:
        raise ScaleError(f"scale_ub bounds amax per token; got it with groups {tuple(shape)}")
    if isinstance(scale_ub, int | float):
        if not scale_ub > 0:
            raise ScaleError(f"scale_ub needs a positive number, got {scale_ub}")
        return None, float(scale_ub)
    view = interop.view(scale_ub, "scale_ub")
    scales.is_scale(view, "scale_ub")
    scales.one_number(view, "scale_ub")
    operands.same_device(x, "x", scale_ub=view)
    return view, math.inf


def only_scale(scale: object, out_scale: object) -> object:
    """Return a given ``scale``, after checking that ``out`` names no other."""
    if out_scale is not None and out_scale is not scale:
        raise ScaleError("out needs no scale when the scale is given")
    return scale


@dataclass(frozen=True, slots=True)
class Destination:
    """Where codes and scales go. An address of 0 is memory yet to be allocated, aligned to 16 bytes at least."""

    give: Callable[[Any, int], Any] | None
    """What makes the caller's arrays of those that were allocated, where the framework has to."""
    data_at: int
    data_stride: int
    new_data: Allocator | None
    """None where the caller gives the array, as for the scale."""
    scale_at: int
    scale_strides: tuple[int, int]
    new_scale: Allocator | None

    def filled(
        self,
        launch: Callable[[int, int, int, int, int], None] | None,
        work: int,
        pool: int | None,
        x_at: int,
        data: Any,
        data_at: int,
        scale: Any,
        scale_at: int,
        upper_at: int,
    ) -> Quantized:
        """Allocate what the caller does not give, launch with the stream and all addresses, and return its arrays."""
        give = self.give
        if self.new_data is not None:
            data_at, data = self.new_data(pool)
        if self.new_scale is not None:
            scale_at, scale = self.new_scale(pool)
        if launch is not None:
            launch(work, x_at, data_at, scale_at, upper_at)
        if give is not None:
            data = data if self.new_data is None else give(data, work)
            scale = scale if self.new_scale is None else give(scale, work)
        made: Quantized = new_tuple(Quantized, (data, scale))
        return made


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that has been checked, for any arrays that look alike."""

    stream: Callable[[], int]
    launch: Launch | None
    """With all of its numbers; None where there is nothing to compute."""
    to: Destination


def destination(
    x: TensorView, how: Scaling, shape: tuple[int, ...], rows: int, cols: int, data: object, scale: object
) -> Destination:
    """Return where a result of this shape goes, after checking the arrays that the caller gave for it, if any."""
    framework = x.framework
    data_at, data_stride = 0, cols
    if data is not None:
        view = interop.view(data, "out", written=True)
        operands.same_device(x, "x", out=view)
        data_at, data_stride = view.pointer, operands.written(view, "out", shape, how.dtype).stride
    wanted: tuple[int, ...] = (1,) if how.group_shape == PER_TENSOR else how.group_shape.scale_shape(rows, cols)
    dtype = SCALE_DTYPE[how.scale_format]
    scale_at, strides = 0, ((1, wanted[0]) if how.layout == "mn" else (wanted[-1], 1))
    if how.given is not None:
        scale_at, strides = how.given.pointer, how.strides
    elif scale is not None:
        view = interop.view(scale, "out scale", written=True)
        operands.same_device(x, "x", out_scale=view)
        operands.check_written(view, "out scale", wanted, dtype)
        scale_at, strides = view.pointer, (view.strides[0], view.strides[-1])
    if len(wanted) == 1:
        strides = (0, 0)
    apart = strides if how.layout == "mn" and len(wanted) == 2 else None
    return Destination(
        framework.wrap if framework.wraps else None,
        data_at,
        data_stride,
        framework.allocator(shape, how.dtype, x.target) if data is None else None,
        scale_at,
        strides,
        framework.allocator(wanted, dtype, x.target, apart) if scale is None else None,
    )
