"""Changes a layer's scaling: keeps the codes if the same codes can stand for the same numbers, else requantizes."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp8core.checkpoint.disk.files import DTYPES, FP8, Entry, read_rows
from fp8core.checkpoint.formats.granularity import Granularity
from fp8core.checkpoint.reading.layers import Layer
from fp8core.checkpoint.reading.values import (
    MOST_ITEMSIZE,
    are_powers_of_two,
    dequantized,
    rows_of_a_group,
    scales_of_rows,
    sum_of_squares,
)
from fp8core.dtypes import FORMATS, Fp8Name
from fp8core.errors import CheckpointError
from fp8core.host.quantize import up_to_powers_of_two
from fp8core.ops import dequantize, normalize_e4m3fn_to_e4m3fnuz, normalize_e4m3fnuz_to_e4m3fn, quantize
from fp8core.problem import PER_TENSOR, GroupShape, ScaleFormat

STORED: Final = {dtype: name for name, dtype in FP8.items()}
"""safetensors' dtype names of the FP8 formats."""
PAIRS: Final = {
    ("float8_e4m3fn", "float8_e4m3fnuz"): normalize_e4m3fn_to_e4m3fnuz,
    ("float8_e4m3fnuz", "float8_e4m3fn"): normalize_e4m3fnuz_to_e4m3fn,
}
"""By (old, new) format: the conversion between formats whose codes stand for the same numbers under other scales."""
LEAST_E8M0: Final = 2.0**-127
"""The least power of two that an e8m0 byte can hold."""


class Goal(NamedTuple):
    """The scaling that a layer is converted to."""

    granularity: Granularity
    group_shape: GroupShape
    scale_format: ScaleFormat
    dtype: Fp8Name


class Change(NamedTuple):
    """The conversion of one layer.

    Examples:
        `plan_conversion` returns them.

        >>> from fp8core.checkpoint import Change
        >>> Change._fields
        ('layer', 'goal', 'why')
    """

    layer: Layer
    goal: Goal
    why: str
    """Why the codes have to be quantized anew; empty if they are kept, so that all numbers stay the same."""

    @property
    def exact(self) -> bool:
        """Whether the converted layer stands for the same numbers."""
        return not self.why

    def scales(self, index: int) -> NDArray[np.float32]:
        """Return the old scales of a matrix on the new grid: for each new group, the largest old scale in it."""
        old = self.layer.scales(index)
        assert self.layer.group_shape is not None
        return regrouped(old, self.layer.group_shape, self.goal.group_shape, self.layer.matrix_shape, np.max)

    @property
    def scale_shape(self) -> tuple[int, int]:
        """The shape of the new scales of one matrix."""
        return self.goal.group_shape.scale_shape(*self.layer.matrix_shape)

    @property
    def scale_dtype(self) -> str:
        """The safetensors dtype of the new scales. Exponents are U8 in MXFP8, and F8_E8M0 in DeepSeek's format."""
        if self.goal.scale_format != "ue8m0_bytes":
            return "F32"
        return "U8" if self.goal.granularity == "group" else "F8_E8M0"


class Error(NamedTuple):
    """How much a requantized layer differs from the original."""

    difference: float
    """The sum of the squared differences."""
    norm: float
    """The sum of the original's squares."""

    @property
    def relative(self) -> float:
        """The Euclidean norm of the difference over that of the original."""
        return math.sqrt(self.difference / self.norm) if self.norm else 0.0


def change_of(layer: Layer, goal: Goal) -> Change:
    """Return the change that a layer needs to reach a goal.

    Codes are kept if all old scales within each new group are equal, and the scales fit the goal's scale format.

    Raises:
        CheckpointError: the layer cannot be read, or has scales that are not finite positive numbers.
    """
    reasons: dict[str, None] = {}
    for index in range(layer.experts or 1):
        old = layer.scales(index)
        refuse_scales_that_are_not_positive(_scale_name(layer), old)
        reasons |= dict.fromkeys(_reasons(layer, goal, old))
    if layer.dtype == "float8_e4m3fnuz" and goal.dtype == "float8_e4m3fn" and not reasons and _has_240(layer):
        reasons["the codes of +-240 of e4m3fnuz have no counterpart in e4m3fn"] = None
    return Change(layer, goal, " and ".join(reasons))


def scale_factor(old: str, new: str) -> np.float32:
    """Return the factor on scales if codes change their format: those of fnuz formats stand for half the numbers."""
    if old.endswith("fnuz") == new.endswith("fnuz"):
        return np.float32(1.0)
    return np.float32(2.0 if new.endswith("fnuz") else 0.5)


def refuse_scales_that_are_not_positive(name: str, scales: NDArray[np.float32]) -> None:
    """Refuse scales of which no reader can make numbers.

    Raises:
        CheckpointError: a scale is NaN, infinite (in float32), zero or negative.
    """
    bad = scales[~(np.isfinite(scales) & (scales > 0))]
    if bad.size:
        raise CheckpointError(f"{name} needs finite scales above 0, got {bad[0]}: fp8core verify says where")


def refuse_scales_that_are_not_finite(layer: Layer) -> None:
    """Refuse a layer whose dequantized weight would hold NaN or Inf that its codes do not stand for.

    Raises:
        CheckpointError: a scale is NaN or Inf, or beyond float32.
    """
    for index in range(layer.experts or 1):
        scales = layer.scales(index)
        bad = scales[~np.isfinite(scales)]
        if bad.size:
            raise CheckpointError(f"{_scale_name(layer)} needs finite scales, got {bad[0]}: fp8core verify says where")


def _reasons(layer: Layer, goal: Goal, old: NDArray[np.float32]) -> Iterator[str]:
    """Yield the reasons why a matrix's scales and format do not allow its codes to be kept."""
    assert layer.group_shape is not None
    largest = regrouped(old, layer.group_shape, goal.group_shape, layer.matrix_shape, np.max)
    smallest = regrouped(old, layer.group_shape, goal.group_shape, layer.matrix_shape, np.min)
    if not np.array_equal(largest, smallest):
        before, after = (_described(one.granularity, one.group_shape) for one in (layer, goal))
        yield f"one scale per {before} becomes one per {after}"
    if goal.scale_format != "float32" and not are_powers_of_two(largest):
        yield "scales become powers of two"
    elif goal.scale_format == "ue8m0_bytes" and (largest < LEAST_E8M0).any():
        yield "scales below 2**-127 have no exponent byte"
    if layer.dtype == goal.dtype:
        return
    if (layer.dtype, goal.dtype) not in PAIRS:
        yield f"{layer.dtype} becomes {goal.dtype}"
        return
    factor = scale_factor(layer.dtype, goal.dtype)
    with np.errstate(over="ignore"):
        if not (largest * factor / factor == largest).all():
            yield f"scales times {factor:g} are not exact in float32"


def _described(granularity: Granularity | None, group_shape: GroupShape | None) -> str:
    """Return in words what shares a scale; blocks and groups include their size."""
    if group_shape is None or granularity not in ("block", "group"):
        return str(granularity)
    return f"{granularity} of {group_shape.rows}x{group_shape.cols}"


def _scale_name(layer: Layer) -> str:
    return layer.weight.name if layer.scale is None else layer.scale.name


def _has_240(layer: Layer) -> bool:
    with layer.weight.path.open("rb") as file:
        return any(
            bool(((codes.view(np.uint8) & 0x7F) == 0x7F).any())
            for matrix in layer.matrices()
            for _, codes in read_rows(file, matrix)
        )


def regrouped(
    scales: NDArray[np.float32],
    old: GroupShape,
    new: GroupShape,
    matrix: tuple[int, int],
    reduce: Callable[..., NDArray[np.float32]],
) -> NDArray[np.float32]:
    """Return a matrix's scales on another grid: ``reduce`` (np.max, np.min) of the old scales in each new group."""
    for axis, (before, after, extent) in enumerate(zip(old, new, matrix, strict=True)):
        step = extent if after < 0 else after
        begins = np.arange(0, extent, step)
        ends = np.minimum(begins + step, extent) - 1
        wide = extent if before < 0 else before
        first, last = begins // wide, ends // wide
        if (first == last).all():
            scales = scales.take(first, axis)
        else:
            parts = [reduce(scales.take(range(a, b + 1), axis), axis=axis) for a, b in zip(first, last, strict=True)]
            scales = np.stack(parts, axis)
    return np.ascontiguousarray(scales)


class Rows(NamedTuple):
    """Some rows of a changed layer."""

    matrix: int
    """The index of the matrix."""
    first: int
    """The index of the first row."""
    codes: NDArray[np.uint8]
    scales: NDArray[Any]
    """The scales of the groups that begin in these rows; with one scale per tensor, that scale."""
    nbytes: int
    """The bytes of these rows in the old weight."""
    error: Error


def changed(change: Change) -> Iterator[Rows]:
    """Yield the new codes and scales, some rows at a time.

    Raises:
        CheckpointError: codes that have to be quantized anew are NaN or infinite.
    """
    for index, matrix in enumerate(change.layer.matrices()):
        yield from _kept(change, index, matrix) if change.exact else _anew(change, index, matrix)


def _kept(change: Change, index: int, matrix: Entry) -> Iterator[Rows]:
    layer, goal = change.layer, change.goal
    scales = change.scales(index)
    multiple = max(goal.group_shape.rows, 1)
    with layer.weight.path.open("rb") as file:
        for first, codes in read_rows(file, matrix, multiple):
            part = scales_of_rows(scales, goal.group_shape, first, len(codes))
            data: NDArray[Any] = codes
            if layer.dtype != goal.dtype:
                data, part, _ = PAIRS[layer.dtype, goal.dtype](codes, np.ascontiguousarray(part))
            stored = part.astype(DTYPES["F8_E8M0"]) if goal.scale_format == "ue8m0_bytes" else part
            yield Rows(index, first, data.view(np.uint8), stored, codes.nbytes, Error(0.0, 0.0))


def _anew(change: Change, index: int, matrix: Entry) -> Iterator[Rows]:
    layer, goal = change.layer, change.goal
    multiple = math.lcm(max(goal.group_shape.rows, 1), rows_of_a_group(layer))
    whole = _scale_of_all(change, index) if goal.group_shape == PER_TENSOR else None
    for first, values in dequantized(layer, index, matrix, "float32", MOST_ITEMSIZE, multiple):
        if not np.isfinite(values).all():
            raise CheckpointError(f"{layer.weight.name} needs finite numbers to be requantized, got NaN or Inf")
        result = quantize(
            values,
            dtype=goal.dtype,
            group_shape=goal.group_shape,
            **({"scale_format": goal.scale_format} if whole is None else {"scale": whole}),
        )
        scale = np.asarray(result.scale)
        back = np.asarray(dequantize(result.data, scale, group_shape=goal.group_shape))
        stored = scale.reshape(1, 1) if whole is not None else scale
        if whole is not None and goal.scale_format == "ue8m0_bytes":
            stored = stored.astype(DTYPES["F8_E8M0"])
        error = Error(sum_of_squares(back - values), sum_of_squares(values))
        yield Rows(index, first, np.asarray(result.data).view(np.uint8), stored, values.size, error)


def _scale_of_all(change: Change, index: int) -> NDArray[np.float32]:
    """Return one scale for a matrix, from its largest scale: codes with that scale keep their values."""
    grow = FORMATS[change.layer.dtype].largest / FORMATS[change.goal.dtype].maximum
    largest = change.scales(index).reshape(1) * np.float32(grow)
    return largest if change.goal.scale_format == "float32" else up_to_powers_of_two(largest)
