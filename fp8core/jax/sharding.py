"""How a call is divided among the devices of a mesh: by rows of its input, and by channels of its weight.

What a device computes of an axis that is divided is what one device alone computes of it (`fp8core.jax.rules`), so no
collective is needed between.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from math import prod
from typing import Any

import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

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


def named(shardings: Sequence[Sharding], ranks: Sequence[int], mesh: Mesh) -> list[NamedSharding]:
    """Return shardings, which XLA has chosen, over the axes of a mesh; where it has no such axes, over parts of them.

    A reshape may leave an array divided over a part of an axis, as four devices are by ``[2, 4, k]`` of eight rows.
    What no parts of axes tell is taken for an array that every device has whole.
    """
    for parts in chain([mesh], _finer(mesh)):
        specs = [_spec(sharding, rank, parts) for sharding, rank in zip(shardings, ranks, strict=True)]
        if None not in specs:
            break
    return [NamedSharding(parts, spec or PartitionSpec()) for spec in specs]


def _spec(sharding: Sharding, rank: int, mesh: Mesh) -> PartitionSpec | None:
    """Return the axes of a mesh that a sharding divides each axis of an array over, or None."""
    extent = mesh.size  # of each axis: whatever the array's, it is in as many parts, and these in the same order
    where = sharding.devices_indices_map((extent,) * rank)
    places = dict(zip(mesh.axis_names, np.indices(mesh.devices.shape), strict=True))
    found: list[tuple[str, ...]] = []
    for axis in range(rank):
        begins = np.array([where[device][axis].start or 0 for device in mesh.devices.flat]).reshape(mesh.devices.shape)
        steps = {name: int(begins[place == 1].min(initial=extent)) for name, place in places.items()}
        names = sorted((name for name, step in steps.items() if 0 < step < extent), key=lambda name: -steps[name])
        wanted, step = np.zeros_like(begins), extent
        for name in names:
            step //= mesh.shape[name]
            wanted += step * places[name]
        if not np.array_equal(begins, wanted):
            return None
        found.append(tuple(names))
    return PartitionSpec(*found)


def _finer(mesh: Mesh) -> Iterator[Mesh]:
    """Yield meshes of the same devices with an axis for each prime factor of an axis, in every order of these."""
    for sizes in product(*map(_orders, mesh.shape.values())):
        names = [f"{name}.{at}" for name, of in zip(mesh.axis_names, sizes, strict=True) for at in range(len(of))]
        yield Mesh(mesh.devices.reshape([size for of in sizes for size in of]), names)


def _orders(number: int) -> list[tuple[int, ...]]:
    """Return the prime factors of a number in every order, each order once."""
    if number == 1:
        return [()]
    factors = [factor for factor in range(2, number + 1) if number % factor == 0]
    primes = [factor for factor in factors if all(factor % other for other in factors if other < factor)]
    return [(prime, *rest) for prime in primes for rest in _orders(number // prime)]


def partitioned(call: CallOf, known: Traced, shapes: Sequence[tuple[Any, ...]], context: Any) -> Callable[..., Any]:
    """Return a call that XLA divides among devices.

    Inside of `jax.shard_map` over some axes of the mesh of the context alone it is not divided over the others, which
    JAX cannot say there: their devices have the operands whole.
    """

    def run(*arrays: Any) -> Any:
        return tuple(FFI.bind(*arrays, call=call))

    if 0 < len(context.manual_axes) < len(context.axis_names):
        return run

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        rule = rule_of(call, shapes, known, mesh)
        shardings = named([x.sharding for x in arguments], [len(x.shape) for x in arguments], mesh)
        parts = shardings[0].mesh
        over = specs_of(rule, shardings, [x.shape for x in arguments], parts)
        given, made = ([NamedSharding(parts, spec_over(axes, over)) for axes in all_] for all_ in rule[:2])
        return mesh, run, tuple(made), tuple(given)

    made = custom_partitioning(run)
    # not decoded: JAX fails on what is divided over a part of an axis
    made.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=lambda mesh, *_: rule_of(call, shapes, known, mesh).shardy,
    )
    return made
