"""Derives the granularity of a scale from its shape: which elements of the weight share one number."""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from fp8core.checkpoint.formats.kinds import sizes_of
from fp8core.checkpoint.formats.naming import module_of
from fp8core.problem import PER_CHANNEL, PER_TENSOR, GroupShape

Granularity = Literal["tensor", "shard", "channel", "column", "block", "group"]
Shape = tuple[int, ...]

E8M0: Final = ("F8_E8M0", "U8")
"""The dtypes in which scales are stored as exponents (e8m0): powers of two."""
SIZES: Final = (128, 64, 32, 256, 512, 16)
"""The sides of groups and blocks, the most usual first."""
FUSED: Final[Mapping[str, int]] = {"qkv_proj": 3, "gate_up_proj": 2, "w13": 2}
"""By name: the number of layers in a fused weight, which may have one scale for each layer."""


class Grouping(NamedTuple):
    """The groups of a weight's elements that share a number of its scale."""

    granularity: Granularity
    group_shape: GroupShape
    """The rows and columns that share one number; -1 spans the axis."""
    scale_shape: tuple[int, int]
    """The shape of the scales of one matrix, as `fp8core.dequantize` takes them; for shards, one per row."""
    widths: tuple[int, ...] = ()
    """For shards: the number of rows of each."""


class Matrices(NamedTuple):
    """A weight as matrices: stacked experts, or one matrix whose columns are all axes but the first."""

    experts: int | None
    rows: int
    cols: int


def matrices(name: str, shape: Shape) -> Matrices:
    """Return a weight's shape as matrices; a tensor with 3 axes and "expert" in its name is experts, rows, columns."""
    if len(shape) == 3 and "expert" in name:
        return Matrices(*shape)
    return Matrices(None, shape[0], math.prod(shape[1:]))


def grouping(
    name: str,
    weight: Shape,
    scale: Shape,
    claimed: GroupShape | None,
    config: Mapping[str, Any],
    *,
    blocks: bool = False,
    transposed: bool = False,
) -> Grouping | None:
    """Return the groups of a weight's elements that share a number of its scale, or None if the shapes do not match.

    Args:
        name: the name of the weight.
        weight: the shape of the weight.
        scale: the shape of the scale.
        claimed: the block shape in the configuration, which takes precedence if it fits.
        config: the content of config.json, which holds the sizes of fused attention layers.
        blocks: whether the configuration calls them blocks; then blocks of one row are not called groups.
        transposed: whether stacked experts are stored [in, out], so that a scale [k, 1] is one per output.
    """
    experts, n, k = matrices(name, weight)
    if experts is not None and math.prod(scale) != 1:
        if not scale or scale[0] != experts:
            return None
        scale = scale[1:]
    scale, numbers = _without_ones(scale), math.prod(scale)
    if claimed is not None and min(claimed) > 0 and claimed.scale_shape(n, k) == scale:
        return Grouping("block" if blocks else _name_of(claimed), claimed, scale)
    if numbers == 1:
        return Grouping("tensor", PER_TENSOR, (1, 1))
    if experts is not None and scale == (k, 1) and (transposed or n != k):
        return Grouping("column", GroupShape(-1, 1), (1, k))
    if scale in ((n,), (n, 1)):
        return Grouping("channel", PER_CHANNEL, (n, 1))
    if scale in ((numbers,), (numbers, 1)):
        if experts is not None and n == sizes_of(config, name).get("hidden_size") != k:
            return None  # stored [in, out]: the rows are inputs, not those of gate and up
        widths = shard_widths(name, n, numbers, config)
        if widths is not None:
            return Grouping("shard", PER_CHANNEL, (n, 1), widths)
    if len(scale) != 2:
        return None
    if scale == (1, k) and k > 1:
        return Grouping("column", GroupShape(-1, 1), (1, k))
    return _blocks(n, k, (scale[0], scale[1]), claimed)


def _without_ones(scale: Shape) -> Shape:
    """Return a scale's shape without the axes of extent 1 that have no meaning; (1, 1) for a single number."""
    if math.prod(scale) == 1:
        return 1, 1
    if len(scale) == 4 and scale[1] == scale[3] == 1:  # ModelOpt's FP8_PB_WO: [n blocks, 1, k blocks, 1]
        return scale[0], scale[2]
    return scale[:1] if len(scale) > 2 and all(size == 1 for size in scale[1:]) else scale


def _blocks(n: int, k: int, scale: tuple[int, int], claimed: GroupShape | None) -> Grouping | None:
    groups = [GroupShape(1, size) for size in SIZES]
    blocks = [GroupShape(size, size) for size in SIZES]
    wanted = [claimed] if claimed is not None else []
    for one in (*wanted, *groups, *blocks):
        if one.scale_shape(n, k) == scale:
            return Grouping(_name_of(one), one, scale)
    return None


def _name_of(one: GroupShape) -> Granularity:
    return "group" if one.rows == 1 else "block"


def shard_widths(name: str, n: int, shards: int, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the number of rows of each layer in a fused weight, or None if they are not known.

    Gate and up are halves. The rows of q, k and v follow from the numbers of heads in config.json.
    """
    part = module_of(name).rpartition(".")[2]
    if FUSED.get(part) != shards:
        return None
    if shards == 2:
        return (n // 2, n // 2) if n % 2 == 0 else None
    sizes = sizes_of(config, name)
    heads, hidden = (_count(sizes.get(key)) for key in ("num_attention_heads", "hidden_size"))
    if not heads:
        return None
    given, head = sizes.get("num_key_value_heads"), sizes.get("head_dim")
    pairs = _count(given) if given else heads
    size = _count(head) if head else hidden // heads
    widths = heads * size, pairs * size, pairs * size
    return widths if all(widths) and sum(widths) == n else None


def _count(value: object) -> int:
    """Return a positive number in a configuration, or 0 for anything else, such as a list with one per layer."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
