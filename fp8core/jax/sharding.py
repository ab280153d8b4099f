"""Sharding of calls over the devices of a mesh: by rows of the input, and by channels of the weight.

Each device computes its part of the results exactly as a single device would (`fp8core.jax.rules`), so no collective is
needed.
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
    """Return the mesh axes that each factor is sharded over, taken from the first argument that is sharded along it.

    Groups are sharded only if each device gets whole groups.
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
    """Return the partition spec of an array, given the mesh axes of each factor."""
    return PartitionSpec(*[over.get(axis[0]) for axis in axes])


def named(shardings: Sequence[Sharding], ranks: Sequence[int], mesh: Mesh) -> list[NamedSharding]:
    """Return XLA's shardings as named shardings over a mesh's axes or, if these do not suffice, over parts of axes.

    A reshape may shard an array over a part of a mesh axis: for example, eight rows over four devices, reshaped to
    ``[2, 4, k]``. An array whose sharding no parts of axes express is treated as replicated.
    """
    for parts in chain([mesh], _finer(mesh)):
        specs = [_spec(sharding, rank, parts) for sharding, rank in zip(shardings, ranks, strict=True)]
        if None not in specs:
            break
    return [NamedSharding(parts, spec or PartitionSpec()) for spec in specs]


def _devices_of(shardings: Sequence[Sharding], ranks: Sequence[int]) -> Mesh:
    """Return a mesh of one axis over the devices of a program that has no mesh of its own.

    Its operands lie on no mesh, such as arrays made before `jax.set_mesh`, so that JAX replicates them.
    """
    places = shardings[0].devices_indices_map((len(shardings[0].device_set),) * ranks[0])
    return Mesh(np.array(list(places)), "devices")


def _spec(sharding: Sharding, rank: int, mesh: Mesh) -> PartitionSpec | None:
    """Return the partition spec over a mesh that equals a sharding, or None if there is none."""
    extent = mesh.size  # in place of the array's extents: the parts have the same number and order
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
    """Yield meshes of the same devices with each axis split into its prime factors, in every order of the factors."""
    for sizes in product(*map(_orders, mesh.shape.values())):
        names = [f"{name}.{at}" for name, of in zip(mesh.axis_names, sizes, strict=True) for at in range(len(of))]
        yield Mesh(mesh.devices.reshape([size for of in sizes for size in of]), names)


def _orders(number: int) -> list[tuple[int, ...]]:
    """Return all distinct orders of the prime factors of a number."""
    if number == 1:
        return [()]
    factors = [factor for factor in range(2, number + 1) if number % factor == 0]
    primes = [factor for factor in factors if all(factor % other for other in factors if other < factor)]
    return [(prime, *rest) for prime in primes for rest in _orders(number // prime)]


def partitioned(call: CallOf, known: Traced, shapes: Sequence[tuple[Any, ...]], context: Any) -> Callable[..., Any]:
    """Return a function that makes a call, which XLA partitions over devices.

    Inside of a `jax.shard_map` the call is not partitioned: over its axes each device has its part, and over the other
    axes of the mesh operands are replicated, as JAX cannot express a partition there.
    """

    def run(*arrays: Any) -> Any:
        return tuple(FFI.bind(*arrays, call=call))

    if context.manual_axes:
        return run

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        given, ranks = [x.sharding for x in arguments], [len(x.shape) for x in arguments]
        mesh = _devices_of(given, ranks) if mesh.empty else mesh
        rule = rule_of(call, shapes, known)
        shardings = named(given, ranks, mesh)
        parts = shardings[0].mesh
        over = specs_of(rule, shardings, [x.shape for x in arguments], parts)
        taken, made = ([NamedSharding(parts, spec_over(axes, over)) for axes in all_] for all_ in rule[:2])
        return mesh, run, tuple(made), tuple(taken)

    made = custom_partitioning(run)
    # JAX fails to decode a sharding over a part of a mesh axis; `named` does it instead.
    made.def_partition(
        partition,
        decode_shardings=False,
        sharding_rule=lambda *_: rule_of(call, shapes, known).shardy,
    )
    return made
