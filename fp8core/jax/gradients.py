"""Gradients of calls: `linear` has straight-through gradients for its input and its bias; other calls have none."""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from fp8core.core.scale_shapes import is_one_number
from fp8core.dtypes import FORMATS
from fp8core.errors import UnsupportedProblemError
from fp8core.jax.calls import CALL, CALLS_KEPT, bind
from fp8core.jax.primitives import CallOf
from fp8core.ops.dequantize import dequantize
from fp8core.ops.linear import LINEAR_CALLS, LinearOptions
from fp8core.problem import BLOCK, BLOCK_128, GROUP_128, PER_CHANNEL, PER_TENSOR, GroupShape

X, WEIGHT, WEIGHT_SCALE, BIAS = 0, 1, 2, 3
"""Positions of the operands of `linear`."""
PRODUCT: Final = Primitive("fp8core_straight_through")
"""``x @ dequantize(weight).T``, linear in x. The backward pass keeps the FP8 weight, not the dequantized one."""


@lru_cache(CALLS_KEPT)
def _dequantization(kinds: tuple[tuple[Any, Any], ...], group: GroupShape, dtype: Any, mesh: Any) -> Any:
    """Return the jaxpr of a dequantization, by shapes and dtypes, and by ``mesh``, that of the context.

    The jaxpr never runs. JAX searches the jaxprs of a primitive's parameters for primitives that need the devices when
    they are lowered, such as the dequantization, except inside of a `jax.shard_map` over some axes of a mesh.
    """
    del mesh
    weight, scale = (jax.ShapeDtypeStruct(*kind) for kind in kinds)
    return jax.make_jaxpr(partial(dequantize, group_shape=group, dtype=dtype))(weight, scale)


def _bind(x: Any, weight: Any, scale: Any, group: GroupShape) -> Any:
    kinds = tuple([(one.shape, np.dtype(one.dtype)) for one in (weight, scale)])
    jaxpr = _dequantization(kinds, group, np.dtype(x.dtype), jax.sharding.get_abstract_mesh())
    return PRODUCT.bind(x, weight, scale, group=group, jaxpr=jaxpr)


def _product(x: Any, weight: Any, scale: Any, *, group: GroupShape, jaxpr: Any) -> Any:
    del jaxpr
    sharding = _sharding(jax.typeof(x), jax.typeof(weight))
    return _multiplied(x, dequantize(weight, scale, group_shape=group, dtype=x.dtype).T, sharding)


def _multiplied(x: Any, y: Any, sharding: NamedSharding) -> Any:
    """Return ``x @ y``, with the given sharding on a mesh with explicit axes, for which JAX requires it."""
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return jnp.matmul(x, y, out_sharding=sharding if explicit else None)


def _sharding(x: Any, weight: Any) -> NamedSharding:
    """Return the sharding of a product: its rows are sharded like those of x, its channels like the weight's."""
    rows, channels = tuple(x.sharding.spec)[:-1], next(iter(weight.sharding.spec))
    return NamedSharding(x.sharding.mesh, PartitionSpec(*rows, channels))


def _abstract(x: Any, weight: Any, scale: Any, *, group: GroupShape, jaxpr: Any) -> Any:
    del scale, group, jaxpr
    return x.update(shape=(*x.shape[:-1], weight.shape[0]), weak_type=False, sharding=_sharding(x, weight))


def _transposed(grad: Any, x: Any, weight: Any, scale: Any, *, group: GroupShape, jaxpr: Any) -> Any:
    del jaxpr
    wide = dequantize(weight, scale, group_shape=group, dtype=grad.dtype)
    return (_multiplied(grad, wide, x.aval.sharding), None, None)


def _product_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, group: GroupShape, jaxpr: Any) -> Any:
    del jaxpr
    x, weight, scale = primals
    of_x, *others = tangents
    _frozen(others, ("weight", "weight_scale"))
    return _bind(x, weight, scale, group), _bind(of_x, weight, scale, group)


def _product_batched(arrays: Sequence[Any], axes: Sequence[Any], *, group: GroupShape, jaxpr: Any) -> Any:
    del jaxpr
    x, weight, scale = arrays
    if axes[1] is None and axes[2] is None:
        return _bind(jnp.moveaxis(x, axes[0], 0), weight, scale, group), 0
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    each = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    return jax.lax.map(lambda one: _bind(one[0], one[1], one[2], group), each), 0


def _scale_of(weight: Any, scale: Any) -> tuple[Any, GroupShape]:
    """Return a weight's scale in the weight's orientation, and its group shape, as `linear` interprets them.

    Where a shape that `linear` takes fits several group shapes, they are the same numbers.
    """
    (n, k), shape = weight.shape, scale.shape
    if is_one_number(shape):
        return scale, PER_TENSOR
    if len(shape) == 1 or shape == (n, 1):
        return scale, PER_CHANNEL
    if shape == (n, -(-k // BLOCK)):
        return scale, GROUP_128
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    return (scale if shape == blocks else scale.T), BLOCK_128  # `linear` takes the scales of blocks transposed, too


def _frozen(tangents: Sequence[Any], names: Sequence[str]) -> None:
    for tangent, name in zip(tangents, names, strict=True):
        if type(tangent) is not ad.Zero and tangent is not None:
            raise UnsupportedProblemError(
                f"{name} needs to be outside of a gradient, got an argument of one: FP8 weights and scales"
                " have none (jax.lax.stop_gradient keeps them out)"
            )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: CallOf, jaxpr: Any) -> Any:
    """Differentiate a call: the rule of `jax.jvp`, `jax.grad` and the like."""
    del jaxpr
    given = dict(zip(call.places, primals, strict=True))
    of = dict(zip(call.places, tangents, strict=True))
    if call.name != "linear" or str(given[X].dtype) in FORMATS:
        what = "linear of an x that is FP8" if call.name == "linear" else call.name
        raise UnsupportedProblemError(
            f"{what} needs to be outside of a gradient, got a differentiated operand: FP8 has no gradient;"
            " fp8core.linear has one, straight through the quantization of x, and jax.lax.stop_gradient ends one"
        )
    activation = LinearOptions(*call.options).activation
    if activation:
        raise UnsupportedProblemError(
            f"linear needs to be without an activation inside of a gradient, got {activation}: its derivative needs the"
            f" value before it (jax.nn.{'silu' if activation == 'silu' else 'gelu'} behind linear has one)"
        )
    fixed = [at for at in call.places if at not in (X, BIAS)]
    _frozen([of[at] for at in fixed], [LINEAR_CALLS.operands[at] for at in fixed])
    made = bind(call, *primals)
    out = made[0]
    parts = []
    if type(of[X]) is not ad.Zero:
        scale, group = _scale_of(given[WEIGHT], given[WEIGHT_SCALE])
        narrow = of[X].dtype == np.float16 and out.dtype != np.float16  # other results have a larger range
        of_x = of[X].astype(np.float32) if narrow else of[X]
        parts.append(_bind(of_x, given[WEIGHT], scale, group).astype(out.dtype))
    if BIAS in of and type(of[BIAS]) is not ad.Zero:
        # in float32, so that its transpose adds the rows of a gradient in float32
        parts.append(jnp.broadcast_to(of[BIAS].astype(np.float32), out.shape).astype(out.dtype))
    return made, [sum(parts[1:], parts[0])]


def install() -> None:
    """Register the rules by which `jax.grad` and the like differentiate calls, or raise why they cannot."""
    PRODUCT.def_impl(_product)
    PRODUCT.def_abstract_eval(_abstract)
    mlir.register_lowering(PRODUCT, mlir.lower_fun(_product, multiple_results=False))
    ad.primitive_transposes[PRODUCT] = _transposed
    ad.primitive_jvps[PRODUCT] = _product_jvp
    batching.primitive_batchers[PRODUCT] = _product_batched
    ad.primitive_jvps[CALL] = _jvp
