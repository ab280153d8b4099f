"""Gradients: `linear` has those of its input and its bias, straight through the quantization; other calls have none."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from fp8core.errors import UnsupportedProblemError
from fp8core.jax.calls import CALL, bind
from fp8core.jax.primitives import CallOf
from fp8core.ops.dequantize import dequantize
from fp8core.ops.linear import LinearOptions
from fp8core.problem import BLOCK, BLOCK_128, FORMATS, GROUP_128, PER_CHANNEL, PER_TENSOR, GroupShape

X, WEIGHT, WEIGHT_SCALE, BIAS = 0, 1, 2, 3
"""Places among the operands of `linear`."""
PRODUCT: Final = Primitive("fp8core_straight_through")
"""``x @ dequantize(weight).T``, linear in x: what is kept for the backward pass is FP8."""


def _weight(weight: Any, scale: Any, group: GroupShape, dtype: Any) -> Any:
    if len(scale.shape) == 1 and group == PER_CHANNEL:
        scale = scale[:, None]
    return dequantize(weight, scale, group_shape=group, dtype=dtype)


def _product(x: Any, weight: Any, scale: Any, *, group: GroupShape) -> Any:
    return x @ _weight(weight, scale, group, x.dtype).T


def _abstract(x: Any, weight: Any, scale: Any, *, group: GroupShape) -> Any:
    del scale, group
    mesh, rows, channels = x.sharding.mesh, tuple(x.sharding.spec)[:-1], next(iter(weight.sharding.spec))
    sharding = NamedSharding(mesh, PartitionSpec(*rows, channels))
    return x.update(shape=(*x.shape[:-1], weight.shape[0]), weak_type=False, sharding=sharding)


def _transposed(grad: Any, x: Any, weight: Any, scale: Any, *, group: GroupShape) -> Any:
    del x
    return (grad @ _weight(weight, scale, group, grad.dtype), None, None)


def _product_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, group: GroupShape) -> Any:
    x, weight, scale = primals
    of_x, *others = tangents
    _frozen(others, ("weight", "weight_scale"))
    made = PRODUCT.bind(x, weight, scale, group=group)
    return made, of_x if type(of_x) is ad.Zero else PRODUCT.bind(of_x, weight, scale, group=group)


def _product_batched(arrays: Sequence[Any], axes: Sequence[Any], *, group: GroupShape) -> Any:
    x, weight, scale = arrays
    if axes[1] is None and axes[2] is None:
        return PRODUCT.bind(jnp.moveaxis(x, axes[0], 0), weight, scale, group=group), 0
    size = next(a.shape[axis] for a, axis in zip(arrays, axes, strict=True) if axis is not None)
    each = [
        jnp.broadcast_to(a, (size, *a.shape)) if axis is None else jnp.moveaxis(a, axis, 0)
        for a, axis in zip(arrays, axes, strict=True)
    ]
    return jax.lax.map(lambda one: PRODUCT.bind(*one, group=group), each), 0


def _scale_of(call: CallOf, weight: Any, scale: Any) -> tuple[Any, GroupShape]:
    """Return a weight's scale in the weight's orientation, and its groups, as `linear` has read them."""
    known = LinearOptions(*call.options).weight_group
    if known is not None:
        return scale, GroupShape(*known)
    (n, k), shape = weight.shape, scale.shape
    if all(extent == 1 for extent in shape):
        return scale, PER_TENSOR
    if len(shape) == 1 or shape == (n, 1):
        return scale, PER_CHANNEL
    if shape == (n, -(-k // BLOCK)):
        return scale, GROUP_128
    blocks = -(-n // BLOCK), -(-k // BLOCK)
    return (scale if shape == blocks else scale.T), BLOCK_128  # a block's along one axis are taken turned, too


def _frozen(tangents: Sequence[Any], names: Sequence[str]) -> None:
    for tangent, name in zip(tangents, names, strict=True):
        if type(tangent) is not ad.Zero and tangent is not None:
            raise UnsupportedProblemError(
                f"{name} needs to be no argument of a gradient, got one: FP8 weights and scales have none"
                " (jax.lax.stop_gradient keeps them out)"
            )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: CallOf, jaxpr: Any) -> Any:
    """Differentiate a call: the rule of `jax.grad` and its like."""
    del jaxpr
    places = [at for at, there in enumerate(call.given) if there]
    given = dict(zip(places, primals, strict=True))
    of = dict(zip(places, tangents, strict=True))
    if call.name != "linear" or str(given[X].dtype) in FORMATS:
        what = "linear of an x that is FP8" if call.name == "linear" else call.name
        raise UnsupportedProblemError(
            f"{what} needs to be outside of a gradient, got an operand that is differentiated: FP8 has no gradient;"
            " fp8core.linear has one, straight through the quantization of x, and jax.lax.stop_gradient ends one"
        )
    activation = LinearOptions(*call.options).activation
    if activation:
        raise UnsupportedProblemError(
            f"linear needs to be without an activation inside of a gradient, got {activation}: its derivative needs the"
            f" value before it (jax.nn.{'silu' if activation == 'silu' else 'gelu'} behind linear has one)"
        )
    fixed = [at for at in places if at not in (X, BIAS)]
    _frozen(
        [of[at] for at in fixed],
        [("x", "weight", "weight_scale", "bias", "input_scale", "scale_ub")[at] for at in fixed],
    )
    made = bind(call, *primals)
    out = made[0]
    parts = []
    if type(of[X]) is not ad.Zero:
        scale, group = _scale_of(call, given[WEIGHT], given[WEIGHT_SCALE])
        parts.append(PRODUCT.bind(of[X], given[WEIGHT], scale, group=group).astype(out.dtype))
    if BIAS in of and type(of[BIAS]) is not ad.Zero:
        parts.append(jnp.broadcast_to(of[BIAS].astype(out.dtype), out.shape))
    return made, [sum(parts[1:], parts[0])]


def install() -> None:
    """Let `jax.grad` and its like differentiate calls, or hear why they cannot."""
    PRODUCT.def_impl(_product)
    PRODUCT.def_abstract_eval(_abstract)
    mlir.register_lowering(PRODUCT, mlir.lower_fun(_product, multiple_results=False))
    ad.primitive_transposes[PRODUCT] = _transposed
    ad.primitive_jvps[PRODUCT] = _product_jvp
    batching.primitive_batchers[PRODUCT] = _product_batched
    ad.primitive_jvps[CALL] = _jvp
