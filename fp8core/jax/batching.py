"""`jax.vmap` of calls: the batch axis becomes rows if that changes no scale; otherwise calls run in a loop."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax.interpreters import batching
from jax.sharding import PartitionSpec

from fp8core.core.scale_shapes import is_one_number
from fp8core.errors import Fp8Error
from fp8core.jax.calls import CALL, bind
from fp8core.jax.primitives import CallOf, traced
from fp8core.ops.linear import LinearOptions
from fp8core.problem import PER_TENSOR


def _scale_with_rows(shapes: dict[int, tuple[Any, ...]], scale: int) -> bool:
    """Return whether a scale has the leading axes of operand 0, so that both may get a batch axis."""
    return len(shapes[scale]) == len(shapes[0]) > 1 and shapes[scale][:-1] == shapes[0][:-1]


def _may_scale(places: frozenset[int], scale: int) -> Callable[[CallOf, dict[int, tuple[Any, ...]], set[int]], bool]:
    """Return a predicate for batched calls that one call with more rows can compute.

    All operands at ``places`` have to be batched, the scale may be, and no other operand.
    """

    def holds(call: CallOf, shapes: dict[int, tuple[Any, ...]], batched: set[int]) -> bool:
        del call
        if scale in batched and not _scale_with_rows(shapes, scale):
            return False
        if scale in shapes and scale not in batched and not is_one_number(shapes[scale]):
            return False
        return batched - {scale} == places & shapes.keys()

    return holds


def _linear(call: CallOf, shapes: dict[int, tuple[Any, ...]], batched: set[int]) -> bool:
    own_scale = tuple(LinearOptions(*call.options).group_shape) == PER_TENSOR and 4 not in shapes
    return not own_scale and _may_scale(frozenset({0}), 4)(call, shapes, batched)


def _scaled_mm(call: CallOf, shapes: dict[int, tuple[Any, ...]], batched: set[int]) -> bool:
    return 7 not in shapes and _may_scale(frozenset({0}), 2)(call, shapes, batched)


FOLDS: Final[dict[str, Callable[[CallOf, dict[int, tuple[Any, ...]], set[int]], bool]]] = {
    "quantize": _may_scale(frozenset({0}), 2),
    "silu_and_mul_quant": _may_scale(frozenset({0}), 2),
    "rms_norm_quant": _may_scale(frozenset({0, 2}), 4),
    "dequantize": _may_scale(frozenset({0}), 1),
    "linear": _linear,
    "scaled_mm": _scaled_mm,
    "scaled_mm_nt": _scaled_mm,
}
"""By operation: whether a call may take the batch as rows. `_gives_each` also checks that each item gets its scale."""


def _batch(arrays: Sequence[Any], axes: Sequence[Any], *, call: CallOf, jaxpr: Any) -> tuple[list[Any], list[int]]:
    """Batch a call: the rule of `jax.vmap`."""
    del jaxpr
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    batched = {at for at, axis in zip(call.places, axes, strict=True) if axis is not None}
    one = [jax.ShapeDtypeStruct(x.shape[at in batched :], x.dtype) for at, x in zip(call.places, moved, strict=True)]
    shapes = {at: x.shape for at, x in zip(call.places, one, strict=True)}
    folds = FOLDS.get(call.name)
    if folds is not None and folds(call, shapes, batched) and _gives_each(call, one, moved, size):
        made = bind(call, *moved)
    else:
        looped, over = _gathered([x for at, x in zip(call.places, moved, strict=True) if at in batched])

        def each(slices: Sequence[Any]) -> list[Any]:
            given = iter(slices)
            return bind(call, *[next(given) if at in batched else x for at, x in zip(call.places, moved, strict=True)])

        made = [_divided(x, over) for x in jax.lax.map(each, looped)]
    return made, [0] * len(made)


def _gathered(arrays: Sequence[Any]) -> tuple[list[Any], Any]:
    """Return arrays that a loop can take apart along axis 0, and the explicit mesh axes over which that was sharded."""
    over = next(filter(None, [jax.typeof(x).sharding.spec[0] for x in arrays]), None)
    return [x if over is None else _divided(x, None) for x in arrays], over


def _divided(x: Any, over: Any) -> Any:
    """Return an array whose axis 0 is sharded over explicit mesh axes, or is not if they are None."""
    own = jax.typeof(x).sharding
    return x if own.spec[0] == over else jax.reshard(x, own.update(spec=PartitionSpec(over, *own.spec[1:])))


def _gives_each(call: CallOf, one: Sequence[Any], all_: Sequence[Any], size: Any) -> bool:
    """Return whether one call of the whole batch is possible, with a batch axis in front of each result's shape."""
    try:
        whole = traced(call, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in all_])
    except Fp8Error:
        return False
    return whole.shapes == tuple((size, *shape) for shape in traced(call, one).shapes)


def install() -> None:
    """Register the rule by which `jax.vmap` batches calls."""
    batching.primitive_batchers[CALL] = _batch
