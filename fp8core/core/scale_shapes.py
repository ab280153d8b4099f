"""What the shape of a scale means, and which shape a new scale has. The number of elements never decides anything."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from fp8core.core import specs
from fp8core.core.specs import TensorSpec
from fp8core.errors import DTypeError, ScaleError, ShapeError
from fp8core.problem import BLOCK, BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Granularity, GroupShape

Strides = tuple[int, int]
BROADCAST: Final[Strides] = (0, 0)

ACTIVATION_GROUPS: Final[dict[GroupShape, Granularity]] = {PER_TENSOR: "tensor", PER_TOKEN: "row", GROUP_128: "group"}
WEIGHT_GROUPS: Final[dict[GroupShape, Granularity]] = {**ACTIVATION_GROUPS, BLOCK_128: "block"}
"""The group shapes of scales that a product takes, for a and for the weight."""


class Reading(NamedTuple):
    """The meaning of a product's scale, and its strides as a matrix of rows (or row blocks) by k blocks."""

    granularity: Granularity
    strides: Strides


# ---- the scales of one array ---------------------------------------------------------------------------------


def of_array(shape: tuple[int, ...], group: GroupShape, name: str) -> tuple[int, ...]:
    """Return the shape of the scales of an array: ``[1]`` per tensor, else with the array's leading axes.

    Raises:
        ShapeError: groups of several rows would cross the array's leading axes.
    """
    if group == PER_TENSOR:
        return (1,)
    *leading, cols = shape
    across = group.scale_shape(1, cols)[1]
    if group.rows == 1 or not leading:
        return (*leading, across)
    *outer, rows = leading
    if math.prod(outer) > 1 and (group.rows < 0 or rows % group.rows):
        raise ShapeError(
            f"group_shape {tuple(group)} needs groups that stay within the last two axes of {name}, got shape {shape}: "
            "reshape it to two axes if its rows belong together"
        )
    return (*outer, *group.scale_shape(rows, cols))


def check_scale_dtype(x: TensorSpec, *, bytes_allowed: bool = False) -> None:
    """Refuse a scale that is not fp32 (or, where they are allowed, float8_e8m0fnu bytes)."""
    if x.dtype != "float32" and not (bytes_allowed and x.dtype == "float8_e8m0fnu"):
        wanted = "float32 or float8_e8m0fnu" if bytes_allowed else "float32"
        raise DTypeError(f"{x.name} needs {wanted}, got {x.dtype}")


def is_one_number(shape: Sequence[int]) -> bool:
    """Return whether an array of this shape holds one number, whatever its axes."""
    return all(extent == 1 for extent in shape)


def check_one_number(x: TensorSpec) -> None:
    """Refuse a scale that is not a single number."""
    if not is_one_number(x.shape):
        raise ShapeError(f"{x.name} needs one number, of shape (), (1,) or (1, 1), got {x.shape}")


def of_groups(scale: TensorSpec, group: GroupShape, x: TensorSpec) -> tuple[GroupShape, Strides]:
    """Return the group shape of a given scale of ``x``, and the scale's strides as a matrix.

    A single number is one scale for all of x, whatever ``group`` is.
    """
    if is_one_number(scale.shape):
        return PER_TENSOR, BROADCAST
    at = specs.matrix(x)
    wanted, kept = group.scale_shape(at.rows, at.cols), of_array(x.shape, group, x.name)
    if scale.shape in (wanted, kept):
        return group, _strides(scale, wanted)
    if len(scale.shape) == 1 and 1 in wanted and scale.shape[0] == wanted[0] * wanted[1]:
        return group, (scale.strides[0], 0) if wanted[1] == 1 else (0, scale.strides[0])
    shapes = f"{kept}" if kept == wanted else f"{kept} or {wanted}"
    raise ShapeError(
        f"{scale.name} of {x.name}{x.shape} by groups {tuple(group)} needs shape {shapes}, got {scale.shape}"
    )


def _strides(scale: TensorSpec, wanted: tuple[int, int]) -> Strides:
    """Return the strides of a scale as a matrix of shape ``wanted``; 0 along an axis that has one scale."""
    return specs.folded(scale)[1], scale.strides[-1] if wanted[1] > 1 else 0


def implied_group(scale: TensorSpec, x: TensorSpec) -> GroupShape:
    """Return the only group shape that fits a scale: along each axis of x it has one scale, or one per element.

    Raises:
        ScaleError: it has another number of scales along an axis, which leaves the extent of a group open.
        ShapeError: no group shape fits it.
    """
    if is_one_number(scale.shape):
        return PER_TENSOR
    at = specs.matrix(x)
    if scale.shape[:-1] == x.shape[:-1]:
        shape = at.rows, scale.shape[-1]
    elif len(scale.shape) == 2:
        shape = scale.shape
    else:
        raise ScaleError(f"{scale.name} needs group_shape to say what its axes are, got shape {scale.shape} alone")
    return GroupShape(_side(shape[0], at.rows, scale), _side(shape[1], at.cols, scale))


def _side(count: int, extent: int, scale: TensorSpec) -> int:
    if count == 1:
        return -1
    if count == extent:
        return 1
    if count > extent:
        raise ShapeError(f"{scale.name} needs at most one scale per element, got {count} along an axis of {extent}")
    if count == 0 or -(-extent // -(-extent // count)) != count:
        raise ShapeError(f"{scale.name} needs one scale per group, got {count} along {extent} elements: no groups fit")
    raise ScaleError(
        f"{scale.name} needs group_shape where it has fewer scales than elements, "
        f"got {count} along an axis of {extent} elements"
    )


# ---- the two scales of a product -----------------------------------------------------------------------------


def known_group(group: GroupShape | None, groups: dict[GroupShape, Granularity], name: str) -> Granularity | None:
    """Return the granularity of an operand whose group shape is known; None if it is not known."""
    if group is None:
        return None
    if group not in groups:
        wanted = ", ".join(str(tuple(one)) for one in groups)
        raise ScaleError(f"{name} needs one of the group shapes {wanted}, which products have, got {tuple(group)}")
    return groups[group]


def of_product(
    scale_a: TensorSpec,
    scale_b: TensorSpec,
    leading: tuple[int, ...],
    m: int,
    n: int,
    k: int,
    *,
    stored: bool,
    group_a: GroupShape | None = None,
    group_b: GroupShape | None = None,
) -> tuple[Reading, Reading]:
    """Read both scales of a product together: blocks and groups of b require groups of a, and groups of a require them.

    Args:
        scale_a: the scale of a.
        scale_b: the scale of b, oriented like the stored weight ``[n, k]`` if ``stored``, otherwise like b, ``[k, n]``.
        leading: the extents of all axes of a but the last.
        m: rows of a.
        n: output channels.
        k: the shared axis.
        stored: the orientation of scale_b.
        group_a: the group shape of a if it is known.
        group_b: the group shape of the stored weight if it is known.
    """
    known_a = known_group(group_a, ACTIVATION_GROUPS, f"group_shape beside {scale_a.name}")
    known_b = known_group(group_b, WEIGHT_GROUPS, f"group_shape beside {scale_b.name}")
    a = _activation(scale_a, leading, m, k, known_a)
    b = _weight(scale_b, n, k, stored=stored, grouped=a.granularity == "group", known=known_b)
    if not k and "group" in (a.granularity, b.granularity):  # a scale has no elements, and nothing may read it
        return Reading("group", BROADCAST), Reading("group", BROADCAST)
    granularity = paired(a.granularity, b.granularity, k, scale_a.name, scale_b.name, known_a)
    return Reading(granularity, a.strides if granularity != "row" else (a.strides[0], 0)), b


def _activation(x: TensorSpec, leading: tuple[int, ...], m: int, k: int, known: Granularity | None) -> Reading:
    """Read scale_a: one number, one per token (``[..., 1]``, ``[m, 1]``, ``[m]``) or one per 1x128 group."""
    if known != "group" and is_one_number(x.shape):
        return Reading("tensor", BROADCAST)
    groups, shape, strides = -(-k // BLOCK), x.shape, x.strides
    if len(shape) != 2 and shape[:-1] == leading and len(shape) == len(leading) + 1:
        shape, strides = (m, shape[-1]), (specs.folded(x)[1], strides[-1])
    if known in (None, "row") and shape in ((m, 1), (m,)):
        return Reading("row", (strides[0], 0))
    if known in (None, "group") and shape == (m, groups):
        return Reading("group", (strides[0], strides[1]))
    kinds = {
        "tensor": "(), (1,) or (1, 1) per tensor",
        "row": f"({m}, 1) or ({m},) per token",
        "group": f"({m}, {groups}) for groups of 1x{BLOCK}",
    }
    wanted = kinds[known] if known in kinds else ", ".join(kinds.values())
    raise ShapeError(f"{x.name} for m={m}, k={k} needs shape {wanted}, got {x.shape}")


def _weight(x: TensorSpec, n: int, k: int, *, stored: bool, grouped: bool, known: Granularity | None) -> Reading:
    """Read scale_b; if ``grouped`` (scale_a has 1x128 groups), a shape that fits blocks and channels means blocks."""
    if known in (None, "tensor") and is_one_number(x.shape):
        return Reading("tensor", BROADCAST)
    if known in (None, "row") and x.shape == (n,):
        return Reading("row", (x.strides[0], 0))
    found = _weight_matrix(x, n, k, stored, grouped, known) if len(x.shape) == 2 else None
    if found is None:
        raise _wrong_weight_scale(x, n, k, stored, grouped, known)
    return found


def _weight_matrix(
    x: TensorSpec, n: int, k: int, stored: bool, grouped: bool, known: Granularity | None
) -> Reading | None:
    """Read a scale_b of two axes; None if its shape has no meaning."""
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    turned = x.shape if stored else (x.shape[1], x.shape[0])  # as of the stored weight
    rows, cols = x.strides if stored else (x.strides[1], x.strides[0])
    along_k = [((n, groups), Reading("group", (rows, cols))), ((blocks, groups), Reading("block", (rows, cols)))]
    by_row = [((n, 1), Reading("row", (rows, 0)))]
    if not stored:  # vLLM's users give [n, 1] beside b [k, n]
        by_row.append(((1, n), Reading("row", (cols, 0))))
    readings = [*along_k, *by_row] if grouped else [*by_row, *along_k]
    if grouped and groups > 1 and known is None:
        readings = along_k  # a product of groups and channels is refused
    for shape, reading in readings:
        if shape == turned and known in (None, reading.granularity):
            return reading
    if grouped and known in (None, "block"):
        return _vector_in_the_other_orientation(turned, rows, cols, n, groups, blocks)
    return None


def _wrong_weight_scale(
    x: TensorSpec, n: int, k: int, stored: bool, grouped: bool, known: Granularity | None
) -> ShapeError:
    """Return the error for a scale_b whose shape has no meaning: the shapes that have one."""
    groups, blocks = -(-k // BLOCK), -(-n // BLOCK)
    wanted = [(n, 1), (blocks, groups), (n, groups)] if stored else [(1, n), (groups, blocks), (groups, n)]
    kinds = {
        "tensor": "(), (1,) or (1, 1) per tensor",
        "row": (f"{wanted[0]} or ({n},)" if stored else f"{wanted[0]}, ({n},) or ({n}, 1)") + " per channel",
        "block": f"{wanted[1]} for blocks of {BLOCK}x{BLOCK}",
        "group": f"{wanted[2]} for groups of 1x{BLOCK}",
    }
    *others, last = [kinds[known]] if known else list(kinds.values())[2 if grouped and groups > 1 else 0 :]
    able = f"{', '.join(others)} or {last}" if others else last
    beside = f", beside groups of 1x{BLOCK} of the input" if grouped else ""
    return ShapeError(
        f"{x.name} for n={n}, k={k} needs shape {able}{beside}, "
        f"in the orientation {'of the stored weight [n, k]' if stored else '[k, n]'}, got {x.shape}"
    )


def _vector_in_the_other_orientation(
    turned: tuple[int, ...], rows: int, cols: int, n: int, groups: int, blocks: int
) -> Reading | None:
    """Accept a transposed block scale that has one block along an axis, where its shape has no other meaning."""
    if 1 in (blocks, groups) and turned == (groups, blocks) and n not in turned:
        return Reading("block", (cols, rows))
    return None


def paired(
    a: Granularity,
    b: Granularity,
    k: int,
    name_a: str = "scale_a",
    name_b: str = "scale_b",
    known_a: Granularity | None = None,
) -> Granularity:
    """Return the granularity of scale_a beside scale_b: groups of a require groups or blocks of b, and the reverse.

    Args:
        a: the granularity of scale_a by its shape.
        b: the granularity of scale_b.
        k: the shared axis.
        name_a: the name of scale_a in error messages.
        name_b: the name of scale_b in error messages.
        known_a: the granularity that the caller stated for a. For one row, scales per token and per tensor have the
            same shape.

    Raises:
        ScaleError: no product takes both scales.
    """
    a_grouped, b_grouped = a == "group", b in ("group", "block")
    if a_grouped == b_grouped:
        return a
    if k <= BLOCK:  # one 1x128 group then holds a whole row, and a block scale with one number is one per tensor
        return "group" if b_grouped else "row"
    if b_grouped:
        kind = "128x128 block" if b == "block" else "1x128 group"
        raise ScaleError(
            f"{name_b} with one scale per {kind} needs {name_a} "
            f"for groups of 1x128, with group_shape=(1, 128), got one per {'token' if 'row' in (a, known_a) else a}"
        )
    got = "channel" if b == "row" else b
    raise ScaleError(
        f"{name_a} for groups of 1x128 needs {name_b} for 128x128 blocks or 1x128 groups, got one per {got}"
    )
