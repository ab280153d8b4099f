"""Sharding rules of calls: which axes of operands and results have a common factor, and which factors may be sharded.

Every axis of an operand or a result is a factor of a Shardy rule. Axes with a common factor are sharded alike. A factor
is not sharded if a sum, or the search of one scale, runs over it. So each device computes its part of the results
exactly as a single device would, and no collective is needed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule

from fp8core.core.scale_shapes import is_one_number
from fp8core.jax.primitives import CallOf, Traced
from fp8core.ops.linear import LinearOptions
from fp8core.problem import BLOCK, PER_TENSOR, PER_TOKEN

Axis = tuple[str, ...]
"""The factors of an axis: one, or two (the groups along the axis, and the elements of a group)."""
Axes = tuple[Axis, ...]


class Rule(NamedTuple):
    """The factors of every argument and result of a call."""

    arguments: tuple[Axes, ...]
    results: tuple[Axes, ...]
    whole: frozenset[str]
    """The factors that are not sharded."""
    sizes: dict[str, int]
    """The sizes of the factors of axes with two."""

    @property
    def shardy(self) -> SdyShardingRule:
        """The rule in JAX's form for Shardy, which needs the sizes of factors that are not a whole axis anywhere."""
        axes = [axis for each in (*self.arguments, *self.results) for axis in each]
        every = dict.fromkeys(name for axis in axes for name in axis)
        alone = {axis[0] for axis in axes if len(axis) == 1}
        sizes: dict[str, Any] = {name: self.sizes[name] for name in every if name not in alone}
        whole = tuple(name for name in every if name in self.whole)  # in the order in which Shardy numbers factors
        arguments, results = (tuple(map(_mapping, each)) for each in (self.arguments, self.results))
        return SdyShardingRule(arguments, results, need_replication_factors=whole, **sizes)


class _Factors:
    """Collects the factors of one call."""

    def __init__(self) -> None:
        self.whole: set[str] = set()
        self.sizes: dict[str, int] = {}
        self._count = 0

    def own(self, shape: Sequence[Any]) -> Axes:
        """Return new factors for an array, which no other array shares and which are not sharded."""
        made = []
        for _ in shape:
            self._count += 1
            made.append((f"w{self._count}",))
            self.whole.add(f"w{self._count}")
        return tuple(made)

    def groups(self, name: str, extent: Any, group: int) -> Axis:
        """Return the factors of an axis with one scale for every ``group`` elements: the groups may be sharded."""
        if group == 1:
            return (name,)
        if extent % group or extent == group:
            self.whole.add(name)
            return (name,)
        inner = f"{name}i"
        self.sizes[name], self.sizes[inner] = extent // group, group
        self.whole.add(inner)
        return name, inner

    def scale(self, shape: Sequence[Any], of: Axes, extents: Sequence[Any], *, by_row: bool = True) -> Axes:
        """Return the factors of an array's scale, which has along each axis one element, or one per element or group.

        A scale with other axes than the array is not sharded, and then neither is the array. A scale with one axis has
        one element for each row, if ``by_row``.
        """
        if is_one_number(shape):
            return self.own(shape)
        if by_row and len(shape) == 1:
            of, extents = of[:-1], extents[:-1]
        if len(shape) != len(of):
            self.whole.update(name for axis in of for name in axis)
            return self.own(shape)
        made: list[Axis] = []
        for extent, axis, whole_extent in zip(shape, of, extents, strict=True):
            if extent == 1:
                made += self.own([extent])
            elif extent == whole_extent:
                made.append(axis)
            elif len(axis) == 2:
                made.append(axis[:1])
            else:
                self.whole.update(axis)
                made += self.own([extent])
        return tuple(made)


def rule_of(call: CallOf, shapes: Sequence[tuple[Any, ...]], known: Traced) -> Rule:
    """Return the sharding rule of a call."""
    extents = dict(zip(call.places, shapes, strict=True))
    factors = _Factors()
    made = _RULES[call.name](_Case(call, extents, known, factors))
    arguments = tuple(made[at] if at in made else factors.own(extents[at]) for at in call.places)
    results = []
    for at, shape in zip(known.results, known.shapes, strict=True):
        results.append(made[at] if at in made else factors.own(shape))
    used = {name for axes in (*arguments, *results) for axis in axes for name in axis}
    return Rule(arguments, tuple(results), frozenset(factors.whole & used), factors.sizes)


Places = dict[int, Any]
"""By the position of an operand or a result: its factors, or its extents."""


class _Case(NamedTuple):
    """A call whose factors are to be found."""

    call: CallOf
    extents: Places
    known: Traced
    factors: _Factors


def _rows(x: Sequence[Any], last: Axis) -> Axes:
    return (*((f"m{axis}",) for axis in range(len(x) - 1)), last)


def _quantize(of: _Case, out: int = 1) -> Places:
    call, extents, known, factors = of
    x, group, given = extents[0], call.options[1], call.options[2]
    at = out + 1
    shape = extents[at] if at in extents else known.shapes[known.results.index(at)]
    last: Axis = ("k",)
    if call.name == "quantize" and group[1] > 0 and not (given and is_one_number(shape[-1:])):
        last = factors.groups("k", x[-1], group[1])
    elif call.name != "quantize" or not given:  # norms, the halves gate and up, and dynamic row scales need all of k
        factors.whole.add("k")
    axes = _rows(x, last)
    if call.name == "quantize" and call.options[-1] is not None:  # rows_padded
        factors.whole.update(name for axis in axes for name in axis)
    if (group[0] > 1 and not is_one_number(shape)) if given else group[0] != 1:
        factors.whole.update(name for axis in axes[:-1] for name in axis)
    made = {0: axes, out: axes}
    if call.name == "silu_and_mul_quant":
        made[out] = _rows(x, factors.own([0])[0])
    if call.name == "rms_norm_quant" and 2 in extents:  # the residual
        made[2] = axes
    codes = known.shapes[known.results.index(out)]
    made[at] = factors.scale(shape, made[out], codes, by_row=tuple(group) == PER_TOKEN)
    return made


def _norm(of: _Case) -> Places:
    return _quantize(of, 3)


def _dequantize(of: _Case) -> Places:
    q, scale, group, factors = of.extents[0], of.extents[1], of.call.options[0], of.factors
    last: Axis = ("k",)
    if group is not None and group[1] > 0 and not is_one_number(scale[-1:]):
        last = factors.groups("k", q[-1], group[1])
    axes = _rows(q, last)
    if group is not None and group[0] > 1 and not is_one_number(scale):
        factors.whole.update(name for axis in axes[:-1] for name in axis)
    by_row = group is not None and tuple(group) == PER_TOKEN
    return {0: axes, 1: factors.scale(scale, axes, q, by_row=by_row), 2: axes}


def _product(
    of: _Case, a: int, weight: int, scale_a: int, scale_b: int, bias: int, out: int, *, stored: bool = True
) -> Places:
    extents, factors = of.extents, of.factors
    n, scale = extents[weight][0 if stored else 1], extents[scale_b]
    by_groups = scale_a in extents and not is_one_number(extents[scale_a][-1:])
    by_rows = stored or (tuple(scale) == (n, 1) and not (by_groups and len(extents[scale_a]) > 1))
    across = 0 if by_rows else len(scale) - 1  # the scale's axis of channels or blocks of channels
    channels: Axis = ("n",)
    made = {scale_b: factors.own(scale)}
    if not is_one_number(scale):
        if scale[across] != n:
            channels = factors.groups("n", n, BLOCK)
            if len(channels) > 1 and scale[across] != factors.sizes["n"]:  # transposed: n is along the other axis
                factors.whole.add("n")
                channels = ("n",)
        if scale[across] == n or len(channels) > 1:
            made[scale_b] = (*made[scale_b][:across], channels[:1], *made[scale_b][across + 1 :])
    factors.whole.add("k")
    rows = _rows(extents[a], ("k",))
    whole: Axes = (channels, ("k",))
    made |= {a: rows, weight: whole if stored else whole[::-1], out: (*rows[:-1], channels)}
    if bias in extents:
        made[bias] = (channels,)
    if scale_a in extents:
        made[scale_a] = factors.scale(extents[scale_a], rows, extents[a])
    return made


def _linear(of: _Case) -> Places:
    call, factors = of.call, of.factors
    made = _product(of, 0, 1, 4, 2, 3, 6)
    options = LinearOptions(*call.options)
    if tuple(options.group_shape) == PER_TENSOR and not call.given[4]:
        factors.whole.update(name for axis in made[0] for name in axis)
    return made


def _scaled_mm(of: _Case) -> Places:
    call, factors = of.call, of.factors
    made = _product(of, 0, 1, 2, 3, 4, 5, stored=call.name == "scaled_mm_nt")
    if call.given[7]:  # amax is the largest magnitude of the whole result
        factors.whole.update(name for axes in made.values() for axis in axes for name in axis)
    return made


def _grouped(of: _Case) -> Places:
    """Shard the channels of all weights; the rows are whole, as ends of groups count those of one array."""
    factors, given = of.factors, {at: shape for at, shape in of.extents.items() if at in (1, 3, 4)}
    one = {at: extents[1:] for at, extents in given.items()}
    made = _product(of._replace(extents={**of.extents, **one}), 0, 1, 2, 3, 4, 6)
    factors.whole.update(made[0][0])
    return {**made, **{at: factors.own(extents[:1]) + made[at] for at, extents in given.items()}}


def _unpermute(of: _Case) -> Places:
    """Shard tokens and columns; the rows that are summed are whole, as places count those of one array."""
    own = of.factors.own
    choices = (("m",), *own([0]))
    return {0: (*own([0]), ("n",)), 1: choices, 2: choices, 3: (("m",), ("n",))}


def _requantize(of: _Case) -> Places:
    of.factors.whole.add("n")
    return {0: (("n",), ("k",)), 2: (("n",), ("k",))}


def _normalize(of: _Case) -> Places:
    def axes(at: int) -> Axes:
        return tuple((f"{'abcdef'[at]}{axis}",) for axis in range(len(of.extents[at])))

    return {to: axes(at) for at, to in ((0, 0), (0, 1), (2, 2), (2, 3), (4, 4), (4, 5)) if at in of.extents}


def _whole(of: _Case) -> Places:
    del of
    return {}


_RULES: Final[dict[str, Callable[[_Case], Places]]] = {
    "quantize": _quantize,
    "silu_and_mul_quant": _quantize,
    "rms_norm_quant": _norm,
    "dequantize": _dequantize,
    "linear": _linear,
    "scaled_mm": _scaled_mm,
    "scaled_mm_nt": _scaled_mm,
    "grouped_scaled_mm_nt": _grouped,
    "moe_permute": _whole,
    "moe_unpermute": _unpermute,
    "requantize_with_max_scale": _requantize,
    "normalize": _normalize,
    "convert_to_channelwise": _whole,
    "all_close_1d": _whole,
}


def _mapping(axes: Axes) -> ArrayMapping:
    return ArrayMapping(*[axis[0] if len(axis) == 1 else CompoundFactor(*axis) for axis in axes])
