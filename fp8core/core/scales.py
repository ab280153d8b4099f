"""What the shape of a scale says. The number of its elements never decides anything."""

from typing import NamedTuple

from fp8core.errors import DTypeError, ScaleError, ShapeError
from fp8core.interop import TensorView
from fp8core.problem import PER_TENSOR, Granularity, GroupShape

Strides = tuple[int, int]
BLOCK = 128
BROADCAST: Strides = (0, 0)
ONE_NUMBER = ((), (1,), (1, 1))
"""The shapes of a single number."""


class Reading(NamedTuple):
    """What a scale of a product means, and its strides as a matrix of rows (or row blocks) by k blocks."""

    granularity: Granularity
    strides: Strides


def is_scale(view: TensorView, name: str, *, bytes_allowed: bool = False) -> None:
    """Refuse a scale that is not fp32 (or, where they are allowed, float8_e8m0fnu bytes)."""
    if view.dtype != "float32" and not (bytes_allowed and view.dtype == "float8_e8m0fnu"):
        wanted = "float32 or float8_e8m0fnu" if bytes_allowed else "float32"
        raise DTypeError(f"{name} needs {wanted}, got {view.dtype}")


def one_number(view: TensorView, name: str) -> None:
    """Refuse a scale that is not a single number: (), (1,) or (1, 1)."""
    if view.shape not in ONE_NUMBER:
        raise ShapeError(f"{name} needs one number, of shape (), (1,) or (1, 1), got {view.shape}")


def of_groups(view: TensorView, shape: GroupShape, rows: int, cols: int, name: str) -> tuple[GroupShape, Strides]:
    """Return the group shape that a given scale means for a matrix, and its strides.

    A single number is one scale for the whole matrix, whatever the group shape says.
    """
    if view.shape in ONE_NUMBER:
        return PER_TENSOR, BROADCAST
    wanted = shape.scale_shape(rows, cols)
    if view.shape == wanted:
        return shape, (view.strides[0] if wanted[0] > 1 else 0, view.strides[1] if wanted[1] > 1 else 0)
    if len(view.shape) == 1 and 1 in wanted and view.shape[0] == wanted[0] * wanted[1]:
        return shape, (view.strides[0], 0) if wanted[1] == 1 else (0, view.strides[0])
    raise ShapeError(
        f"{name} of a {rows} x {cols} matrix needs shape {wanted} for groups {tuple(shape)}, got {view.shape}"
    )


def implied_group(view: TensorView, rows: int, cols: int, name: str) -> GroupShape:
    """Return the group shape that a two-dimensional scale implies; sides of 128 are preferred where several fit."""
    if view.shape in ONE_NUMBER:
        return PER_TENSOR
    if len(view.shape) != 2:
        raise ScaleError(f"{name} of shape {view.shape} needs group_shape to say what its axis is")
    return GroupShape(_side(view.shape[0], rows, name), _side(view.shape[1], cols, name))


def _side(scales: int, size: int, name: str) -> int:
    if scales == 1:
        return -1
    if scales == size:
        return 1
    if scales == -(-size // BLOCK):
        return BLOCK
    if scales > 0 and size % scales == 0:
        return size // scales
    raise ShapeError(f"{name} has {scales} scales along an axis of {size} elements, which no group size explains")


def activation(view: TensorView, leading: tuple[int, ...], m: int, k: int) -> Reading:
    """Read scale_a: one number, one a token ``[m, 1]`` or ``[m]``, or 1x128 groups ``[m, ceil(k / 128)]``.

    Leading axes like those of a itself stand for m, where they fold.
    """
    shape, strides = view.shape, view.strides
    if shape in ONE_NUMBER:
        return Reading("tensor", BROADCAST)
    groups = -(-k // BLOCK)
    if len(shape) > 2 and shape[:-1] == leading:
        shape, strides = (m, shape[-1]), (_folded_step(view, "scale_a"), strides[-1])
    if shape in ((m,), (m, 1)):
        return Reading("row", (strides[0], 0))
    if shape == (m, groups):
        return Reading("group", (strides[0], strides[1]))
    raise ShapeError(
        f"scale_a for a of {m} rows and k={k} needs shape (), (1,) or (1, 1) per tensor, ({m}, 1) or ({m},) per token, "
        f"or ({m}, {groups}) for groups of 1x{BLOCK}, got {view.shape}"
    )


def _folded_step(view: TensorView, name: str) -> int:
    shape, strides = view.shape[:-1], view.strides[:-1]
    step = strides[-1]
    for axis in range(len(shape) - 1):
        if shape[axis] > 1 and strides[axis] != strides[axis + 1] * shape[axis + 1]:
            raise ShapeError(f"{name} needs leading axes that fold, got shape {view.shape} with strides {view.strides}")
    return step


def weight(view: TensorView, n: int, k: int, *, stored: bool, grouped: bool) -> Reading:
    """Read scale_b for a weight of n output channels.

    Args:
        view: the scale.
        n: output channels.
        k: the shared axis.
        stored: the scale is oriented as the stored weight ``[n, k]``; else as b, ``[k, n]``.
        grouped: scale_a holds 1x128 groups, so that blocks are what is meant where a shape could also be channels.
    """
    shape = view.shape
    if shape in ONE_NUMBER:
        return Reading("tensor", BROADCAST)
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    if len(shape) == 2:
        turned = shape if stored else (shape[1], shape[0])
        rows, cols = view.strides if stored else (view.strides[1], view.strides[0])
        readings: dict[tuple[int, int], Reading] = {}
        if grouped:
            readings[(blocks, groups)] = Reading("block", (rows, cols))
            readings[(n, groups)] = Reading("group", (rows, cols))
        else:
            readings[(n, 1)] = Reading("row", (rows, 0))
            readings[(1, n)] = Reading("row", (cols, 0))
            readings.setdefault((blocks, groups), Reading("block", (rows, cols)))
            readings.setdefault((n, groups), Reading("group", (rows, cols)))
        found = readings.get((turned[0], turned[1]))
        if found is None and grouped:
            found = _vector_in_the_other_orientation(turned, rows, cols, n, groups, blocks)
        if found is not None:
            return found
    elif shape == (n,):
        return Reading("row", (view.strides[0], 0))
    wanted = [(n, 1), (blocks, groups), (n, groups)] if stored else [(1, n), (groups, blocks), (groups, n)]
    raise ShapeError(
        f"scale_b for n={n}, k={k} needs shape (), (1,) or (1, 1) per tensor, {wanted[0]} or ({n},) per channel, "
        f"{wanted[1]} for blocks of {BLOCK}x{BLOCK} or {wanted[2]} for groups of 1x{BLOCK}, "
        f"in the orientation of {'the stored weight [n, k]' if stored else 'b [k, n]'}, got {shape}"
    )


def _vector_in_the_other_orientation(
    turned: tuple[int, ...], rows: int, cols: int, n: int, groups: int, blocks: int
) -> Reading | None:
    """Accept a block scale along one axis only, which cannot mean anything else, or channels at k <= 128."""
    if 1 in (blocks, groups) and turned == (groups, blocks) and n not in turned:
        return Reading("block", (cols, rows))
    if groups == 1 and turned == (1, n):
        return Reading("row", (cols, 0))
    return None
