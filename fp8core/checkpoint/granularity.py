"""What the shape of a scale says: how many elements of the weight share one number."""

import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple

from fp8core.problem import PER_CHANNEL, PER_TENSOR, GroupShape

Granularity = Literal["tensor", "shard", "channel", "column", "block", "group"]
Shape = tuple[int, ...]

E8M0: Final = ("F8_E8M0", "U8")
"""How exponents alone are stored: powers of two."""
SIZES: Final = (128, 64, 32, 256, 512, 16)
"""Of groups and blocks, the usual ones first."""
FUSED: Final[Mapping[str, int]] = {"qkv_proj": 3, "gate_up_proj": 2, "w13": 2}
"""Weights of several layers in one, which may have a scale for each: how many they are."""


class Grouping(NamedTuple):
    """How the numbers of a scale lie over a weight."""

    granularity: Granularity
    group_shape: GroupShape
    """Rows and columns that share one number; -1 spans the axis."""
    scale_shape: tuple[int, int]
    """Of the scales of one matrix, as `fp8core.dequantize` takes them; of shards, one for each row."""
    widths: tuple[int, ...] = ()
    """Of shards: the rows of each."""


class Matrices(NamedTuple):
    """A weight as matrices: experts that are stacked, or one with all axes but the first as its columns."""

    experts: int | None
    rows: int
    cols: int


def matrices(name: str, shape: Shape) -> Matrices:
    """Return a weight's tensor as matrices: 3 axes in a module of experts are experts, rows and columns."""
    if len(shape) == 3 and "expert" in name:
        return Matrices(*shape)
    return Matrices(None, shape[0], math.prod(shape[1:]))


def grouping(
    name: str,
    weight: Shape,
    scale: Shape,
    dtype: str,
    claimed: GroupShape | None,
    config: Mapping[str, Any],
    *,
    blocks: bool = False,
) -> Grouping | None:
    """Return how a scale lies over a weight, or None where its shape fits no granularity.

    Args:
        name: of the weight.
        weight: its shape.
        scale: the shape of the scale.
        dtype: the scale's, in safetensors' words.
        claimed: the blocks that the configuration names: they count where they fit.
        config: config.json, which tells the sizes of fused attention layers.
        blocks: whether the configuration calls them blocks, and those of one row not groups.
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
    if scale in ((n,), (n, 1)):
        return Grouping("channel", PER_CHANNEL, (n, 1))
    if scale in ((numbers,), (numbers, 1)):
        widths = shard_widths(name, n, numbers, config)
        if widths is not None:
            return Grouping("shard", PER_CHANNEL, (n, 1), widths)
    if len(scale) != 2:
        return None
    if scale == (1, k) and k > 1:
        return Grouping("column", GroupShape(-1, 1), (1, k))
    return _blocks(n, k, (scale[0], scale[1]), dtype, claimed)


def _without_ones(scale: Shape) -> Shape:
    """Return a scale's shape without axes of one element that say nothing; of one number (1, 1)."""
    if math.prod(scale) == 1:
        return 1, 1
    if len(scale) == 4 and scale[1] == scale[3] == 1:  # ModelOpt's FP8_PB_WO: [n blocks, 1, k blocks, 1]
        return scale[0], scale[2]
    return scale[:1] if len(scale) > 2 and all(size == 1 for size in scale[1:]) else scale


def _blocks(n: int, k: int, scale: tuple[int, int], dtype: str, claimed: GroupShape | None) -> Grouping | None:
    sizes = (32, *SIZES) if dtype in E8M0 else SIZES
    groups = [GroupShape(1, size) for size in sizes]
    blocks = [GroupShape(size, size) for size in SIZES]
    wanted = [claimed] if claimed is not None else []
    for one in (*wanted, *(groups + blocks if scale[0] == n else blocks + groups)):
        if one.scale_shape(n, k) == scale:
            return Grouping(_name_of(one), one, scale)
    return None


def _name_of(one: GroupShape) -> Granularity:
    return "group" if one.rows == 1 else "block"


def shard_widths(name: str, n: int, shards: int, config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the rows of each layer in a fused weight, or None where they are not known.

    Gate and up are halves. Of q, k and v the numbers of heads in config.json tell.
    """
    part = name.removesuffix(".weight").rpartition(".")[2]
    if FUSED.get(part) != shards:
        return None
    if shards == 2:
        return (n // 2, n // 2) if n % 2 == 0 else None
    text = config.get("text_config")
    sizes = {**config, **(text if isinstance(text, dict) else {})}
    heads, hidden = (_count(sizes.get(key)) for key in ("num_attention_heads", "hidden_size"))
    if not heads:
        return None
    given, head = sizes.get("num_key_value_heads"), sizes.get("head_dim")
    pairs = _count(given) if given else heads
    size = _count(head) if head else hidden // heads
    widths = heads * size, pairs * size, pairs * size
    return widths if all(widths) and sum(widths) == n else None


def _count(value: object) -> int:
    """Return a number of heads or elements that a configuration has for all layers, or 0, as of a list for each."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
