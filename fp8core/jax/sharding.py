"""How a call is divided among the devices of a mesh: by rows of its input, and by channels of its weight.

What a device computes of an axis that is divided is what one device alone computes of it (`fp8core.jax.rules`), so no
collective is needed between.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from fp8core.jax.primitives import FFI, CallOf, Traced
from fp8core.jax.rules import Axes, Rule, rule_of


def specs_of(rule: Rule, shardings: Sequence[Any], shapes: Sequence[tuple[int, ...]], mesh: Any) -> dict[str, Any]:
    """Return the axes of the mesh that each factor is sharded over, as the first argument that is has it.

    Groups are sharded where each device gets whole ones.
    """
    chosen: dict[str, Any] = {}
    taken: set[str] = set()
    for axes, sharding, shape in zip(rule.arguments, shardings, shapes, strict=True):
        spec = tuple(sharding.spec)
        for axis, over in zip(axes, (*spec, *(None,) * (len(shape) - len(spec))), strict=True):
            names = () if over is None else over if isinstance(over, tuple) else (over,)
            factor = axis[0]
            if not names or factor in rule.whole or factor in chosen or not taken.isdisjoint(names):
                continue
            if factor in rule.sizes and rule.sizes[factor] % prod(mesh.shape[name] for name in names):
                continue
            chosen[factor] = over
            taken.update(names)
    return chosen


def spec_over(axes: Axes, over: dict[str, Any]) -> PartitionSpec:
    """Return the axes of the mesh that each axis of an array is sharded over."""
    return PartitionSpec(*[over.get(axis[0]) for axis in axes])


def partitioned(call: CallOf, known: Traced, shapes: Sequence[tuple[Any, ...]]) -> Callable[..., Any]:
    """Return a call that XLA divides among devices."""

    def run(*arrays: Any) -> Any:
        return tuple(FFI.bind(*arrays, call=call))

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        rule = rule_of(call, shapes, known, mesh)
        over = specs_of(rule, [x.sharding for x in arguments], [x.shape for x in arguments], mesh)
        given, made = ([NamedSharding(mesh, spec_over(axes, over)) for axes in all_] for all_ in rule[:2])
        return mesh, run, tuple(made), tuple(given)

    made = custom_partitioning(run)
    made.def_partition(partition, sharding_rule=lambda mesh, *_: rule_of(call, shapes, known, mesh).shardy)
    return made
