"""Meshes of four devices, arrays on them, and checks of what calls on them return and communicate."""

import jax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_ffi.cases import same

COLLECTIVES = "all-gather", "all-reduce", "all-to-all", "collective-permute", "dynamic-slice"
MESHES = {
    f"{kind.name}": jax.make_mesh((2, 2), ("a", "b"), axis_types=(kind,) * 2)
    for kind in (AxisType.Auto, AxisType.Explicit)
}


def collectives(function, *args):
    text = jax.jit(function).lower(*args).compile().as_text()
    return [name for name in COLLECTIVES if f" {name}(" in text or f" {name}-start(" in text]


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def check(name, made, wanted, found=(), allowed=(), alike=same):
    assert alike(made, wanted), name
    assert set(found) <= set(allowed), (name, found)
    print(name)
