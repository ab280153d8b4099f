"""Calls on JAX arrays: a traced call binds a primitive, and an eager call runs the same program from a cache."""

from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache, partial
from operator import is_
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from fp8core.core.explaining import ExplainRequest
from fp8core.core.operation import Interned, Operation, float32_number, times_forgotten
from fp8core.errors import DeviceError, LayoutError
from fp8core.interop.names import type_name
from fp8core.jax.primitives import CallOf, avals_of, traced
from fp8core.jax.programs import NAMES, OPERATIONS, plain
from fp8core.jax.rules import rule_of
from fp8core.jax.sharding import partitioned, spec_over, specs_of

CALLS_KEPT: Final = 4096
"""The number of kinds of eager calls whose programs are cached."""
CALL: Final = Primitive("fp8core")
"""A call of an operation, as JAX's transformations see it. It is lowered to its parameter ``jaxpr``."""
CALL.multiple_results = True


class Place:
    """The place of a result that other frameworks write in place: holds the old array or None, then the result.

    JAX arrays cannot be written to.
    """

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


def _abstract(*avals: Any, call: CallOf, jaxpr: Any) -> list[Any]:
    del jaxpr
    known = traced(call, avals)
    mesh = avals[0].sharding.mesh
    if mesh.empty:
        return avals_of(known, avals[0])
    rule = rule_of(call, [aval.shape for aval in avals], known)
    over = specs_of(rule, [aval.sharding for aval in avals], [aval.shape for aval in avals], mesh)
    return avals_of(known, avals[0], [NamedSharding(mesh, spec_over(axes, over)) for axes in rule.results])


def _lower(ctx: Any, *operands: Any, call: CallOf, jaxpr: Any) -> Any:
    del call
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


def _run(*arrays: Any, call: CallOf, jaxpr: Any) -> Any:
    del jaxpr
    with jax.disable_jit(False):
        return jitted(call)(*arrays)


CALL.def_abstract_eval(_abstract)
CALL.def_impl(_run)
mlir.register_lowering(CALL, _lower)


@lru_cache(CALLS_KEPT)
def jitted(call: CallOf) -> Any:
    """Return a jitted function that makes a call."""
    run: Any = partial(bind, call)
    # Without `_apply_primitive`, jax_debug_nans would run the function again eagerly, and recurse into this one.
    run._apply_primitive, run.__qualname__ = True, call.name
    return jax.jit(run)


@lru_cache(CALLS_KEPT)
def _program(call: CallOf, kinds: tuple[tuple[tuple[Any, ...], Any], ...], mesh: Any) -> Any:
    """Return the jaxpr of a call. ``mesh``, the mesh of the context, is part of the key: the jaxpr refers to it."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    return jax.make_jaxpr(partitioned(call, traced(call, avals), [shape for shape, _ in kinds], mesh))(*avals)


def bind(call: CallOf, *arrays: Any) -> list[Any]:
    """Return the results of a call, in the order of their positions."""
    jaxpr = _program(call, tuple([(x.shape, np.dtype(x.dtype)) for x in arrays]), jax.sharding.get_abstract_mesh())
    made: list[Any] = CALL.bind(*_varying_alike(arrays), call=call, jaxpr=jaxpr)
    return made


def _varying_alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Inside of `jax.shard_map`, return arrays that vary over the same axes, converted as JAX's own operations do."""
    each = [jax.typeof(x).mat.varying for x in arrays]
    if not any(each):
        return arrays
    every = frozenset().union(*each)
    missing = [tuple(sorted(every - one)) for one in each]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


class Kind:
    """A described call for arrays of fixed shapes and dtypes."""

    def __init__(self, operation: Operation, options: Any, arrays: Sequence[Any]) -> None:
        call = CallOf(NAMES[operation], tuple([x is not None for x in arrays]), options, times_forgotten())
        known = traced(call, [x for x in arrays if x is not None], operation.operands)  # with the call's own errors
        self.call = call._replace(options=plain(options))
        self.results, self.note = known.results, known.described.note
        self.run = jitted(self.call)


class _Kept(dict[Any, Kind]):
    """A cache of call kinds, which is cleared when it holds `CALLS_KEPT` of them."""

    def keep(self, key: Any, kind: Kind) -> Kind:
        """Cache a kind under a key, and return it; or return the kind that another thread has cached first."""
        if len(self) >= CALLS_KEPT:
            self.clear()
        with suppress(TypeError):  # the options are not hashable
            kind = self.setdefault(key, kind)
        return kind


_KINDS: Final = _Kept()


class _KindOf(dict[type, str]):
    """Classifies a type: "tracer" or "array" of JAX, or "" for any other type."""

    def __missing__(self, kind: type) -> str:
        found = "tracer" if issubclass(kind, Tracer) else "array" if issubclass(kind, jax.Array) else ""
        self[kind] = found
        if found == "array":
            Operation.stand_ins_of[kind] = known
        return found


_KIND_OF: Final = _KindOf()
_EAGER: Final = _Kept()
"""Call kinds for operands that are all JAX arrays, under the cheapest key (`_key`)."""


def stand_in(
    operation: Operation, operands: tuple[Any, ...], options: Any, stream: object
) -> tuple[Sequence[Any], Any] | None:
    """Make a call on JAX arrays. Return None for other arrays or several frameworks: the call path handles these.

    Raises:
        DeviceError: the operands are on several devices; or a stream is given while JAX traces, or to a function of
            `fp8core.jax`.
        LayoutError: an operand was deleted, or would have to be written to; or an operand is not a JAX array while JAX
            traces, or in a call of a function of `fp8core.jax`.
    """
    tracing = "tracer" in [_KIND_OF[type(x.array if type(x) is Place else x)] for x in operands]
    if not tracing and Place in map(type, operands):
        _refuse_others(operation, operands, stream)
    if operation not in NAMES or isinstance(stream, ExplainRequest) or not (tracing or _KIND_OF[type(operands[0])]):
        return None
    if stream is not None:
        if tracing:
            raise DeviceError("stream needs to be left out inside of jax.jit, whose programs have streams of their own")
        return None
    arrays = _arrays(operation, operands, tracing)
    if arrays is None:
        return None
    if tracing and operation is OPERATIONS["all_close_1d"] and type(operands[1]) is not Place:
        raise LayoutError(
            "x needs a value, got a tracer: all_close_1d waits for its result, which jax.jit cannot;"
            " fp8core.jax.all_close_1d returns it as an array"
        )
    kind = _kind(operation, options.options if type(options) is Interned else options, arrays)
    _check_places(operation, operands, arrays, kind)
    made = bind(kind.call, *[x for x in arrays if x is not None]) if tracing else _eager(kind, arrays, operation)
    if not tracing and all(map(is_, arrays, operands)):
        _EAGER.keep(_key(operation, operands, options), kind)
    for at, result in zip(kind.results, made, strict=True):
        arrays[at] = result
        if type(operands[at]) is Place:
            operands[at].array = result
    for at in operation.returned:
        if type(arrays[at]) is np.ndarray:  # the caller gave a number, and gets an array back
            arrays[at] = jnp.asarray(arrays[at]) if tracing else _beside(arrays[at], arrays[0])
    return arrays, kind.note


def _refuse_others(operation: Operation, operands: tuple[Any, ...], stream: object) -> None:
    """Refuse streams and arrays of other frameworks in a call with a `Place`, which only JAX programs can fill."""
    for at, (x, name) in enumerate(zip(operands, operation.operands, strict=True)):
        array = x.array if type(x) is Place else x
        number = at in operation.numbers and float32_number(array, name) is not None
        if array is not None and not number and not _KIND_OF[type(array)]:
            raise LayoutError(f"{name} needs an array of JAX, got {type_name(array)}")
    if stream is not None:
        raise DeviceError("stream needs to be left out, as the functions of fp8core.jax are programs of JAX")


def known(
    operation: Operation, operands: tuple[Any, ...], options: Any, stream: object
) -> tuple[Sequence[Any], Any] | None:
    """Make a call on JAX arrays, from the cache if its kind is known. Return None as `stand_in` does."""
    if stream is not None:
        return stand_in(operation, operands, options, stream)
    try:  # a number among the operands has no dtype, and options may not be hashable
        kind = _EAGER.get(_key(operation, operands, options))
    except (AttributeError, TypeError):
        kind = None
    if kind is None:
        return stand_in(operation, operands, options, stream)
    arrays = list(operands)
    for at, result in zip(kind.results, _eager(kind, arrays, operation), strict=True):
        arrays[at] = result
    return arrays, kind.note


def _key(operation: Operation, operands: tuple[Any, ...], options: Any) -> Any:
    """Return the key of a call whose operands are arrays or None. Types are part of it, so that no others match."""
    kinds = [None if x is None else (type(x), x.shape, x.dtype) for x in operands]
    return operation, options, times_forgotten(), *kinds


def _check_places(operation: Operation, operands: tuple[Any, ...], arrays: Sequence[Any], kind: Kind) -> None:
    """Refuse a JAX array that the call would write a result into."""
    for at in kind.results:
        if arrays[at] is not None and type(operands[at]) is not Place:
            name, call = operation.operands[at], kind.call.name
            way = _INSTEAD.get((call, name), "leave it out").format(call)
            raise LayoutError(f"{name} needs to be writable, got an array of JAX, which cannot be written to: {way}")


_RETURNS: Final = "take fp8core.jax.{}, which returns it"
_INSTEAD: Final = {
    ("rms_norm_quant", "residual"): _RETURNS,
    **{(product, "amax"): _RETURNS for product in ("scaled_mm", "scaled_mm_nt")},
    **{(product, "out"): f"leave it out, or with beta {_RETURNS}" for product in ("scaled_mm", "scaled_mm_nt")},
}
"""By operation and operand: the advice for a result that cannot be written, if it is not to leave the operand out."""


def _kind(operation: Operation, options: Any, arrays: Sequence[Any]) -> Kind:
    kinds = tuple([None if x is None else (x.shape, x.dtype) for x in arrays])
    key = operation, options, times_forgotten(), kinds
    with suppress(TypeError):  # the options are not hashable
        found = _KINDS.get(key)
        if found is not None:
            return found
    return _KINDS.keep(key, Kind(operation, options, arrays))


def _arrays(operation: Operation, operands: tuple[Any, ...], tracing: bool) -> list[Any] | None:
    """Return the operands as arrays that JAX takes; None if one of them is an array of another framework."""
    arrays: list[Any] = []
    for at, x in enumerate(operands):
        array = x.array if type(x) is Place else x
        if array is not None and not _KIND_OF[type(array)]:
            number = float32_number(array, operation.operands[at]) if at in operation.numbers else None
            if number is not None:
                array = np.full(1, number, np.float32)
            elif not tracing:
                return None
            elif not isinstance(array, np.ndarray):
                name, got = operation.operands[at], type_name(array)
                raise LayoutError(f"{name} needs an array of JAX inside of jax.jit, got {got}")
        elif array is not None and _is_number(array):
            array = jax.lax.convert_element_type(array, np.float32)
        arrays.append(array)
    return arrays


def _is_number(array: Any) -> bool:
    """Return whether a JAX array is a Python number that a program was called with, of whatever dtype JAX gave it."""
    return not array.shape and bool(getattr(jax.typeof(array), "weak_type", False)) and array.dtype.kind in "fi"


def _beside(number: Any, x: Any) -> Any:
    """Return a number as an array on the device of ``x``; on a mesh, JAX makes it available to all devices."""
    return jax.device_put(number, x.sharding) if len(x.sharding.device_set) == 1 else jnp.asarray(number)


def _eager(kind: Kind, arrays: Sequence[Any], operation: Operation) -> Any:
    given = [x for x in arrays if x is not None]
    try:
        return kind.run(*given)
    except (RuntimeError, ValueError) as error:
        places = None
        for x, name in zip(arrays, operation.operands, strict=True):
            if not isinstance(x, jax.Array):
                continue
            if x.is_deleted():
                raise LayoutError(f"{name} needs memory of its own, got one that was deleted or donated") from error
            here = sorted(map(str, x.sharding.device_set))
            places = places or here
            if here != places:
                wanted, got = ", ".join(places), ", ".join(here)
                raise DeviceError(
                    f"{name} needs to be where {operation.operands[0]} is, on {wanted}, got {got}"
                ) from error
        if places is not None and len(places) > 1:  # XLA's partitioner hands on the text of our errors only
            kind.run.lower(*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given])
        raise
