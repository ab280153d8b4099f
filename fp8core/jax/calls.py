"""Calls on arrays of JAX: what is traced in their place, and how an eager call runs the same program from a cache."""

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
"""Kinds of eager calls whose programs are kept."""
CALL: Final = Primitive("fp8core")
"""A call of an operation, as transformations of JAX meet it; ``jaxpr`` is what it is lowered to."""
CALL.multiple_results = True


class Place:
    """An array that a call writes a result over, or None. It takes the new one: arrays of JAX cannot be written to."""

    __slots__ = ("array",)

    def __init__(self, array: Any) -> None:
        self.array = array


def _abstract(*avals: Any, call: CallOf, jaxpr: Any) -> list[Any]:
    del jaxpr
    known = traced(call, avals)
    mesh = avals[0].sharding.mesh
    if mesh.empty:
        return avals_of(known, avals[0])
    rule = rule_of(call, [aval.shape for aval in avals], known, mesh)
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
    """Return a call as a program of its own."""
    run: Any = partial(bind, call)
    run._apply_primitive, run.__qualname__ = True, call.name  # jax_debug_nans would run it anew, which comes here again
    return jax.jit(run)


@lru_cache(CALLS_KEPT)
def _program(call: CallOf, kinds: tuple[tuple[tuple[Any, ...], Any], ...], mesh: Any) -> Any:
    """Return the jaxpr of a call; ``mesh`` is that of the context, which JAX puts into it."""
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]
    return jax.make_jaxpr(partitioned(call, traced(call, avals), [shape for shape, _ in kinds], mesh))(*avals)


def bind(call: CallOf, *arrays: Any) -> list[Any]:
    """Return the results of a call, in the order of their places."""
    jaxpr = _program(call, tuple([(x.shape, np.dtype(x.dtype)) for x in arrays]), jax.sharding.get_abstract_mesh())
    made: list[Any] = CALL.bind(*_varying_alike(arrays), call=call, jaxpr=jaxpr)
    return made


def _varying_alike(arrays: Sequence[Any]) -> Sequence[Any]:
    """Return arrays that vary over the same axes inside of `jax.shard_map`, as other operations of JAX make them."""
    each = [jax.typeof(x).mat.varying for x in arrays]
    if not any(each):
        return arrays
    every = frozenset().union(*each)
    missing = [tuple(sorted(every - one)) for one in each]
    return [jax.lax.pcast(x, axes, to="varying") if axes else x for x, axes in zip(arrays, missing, strict=True)]


class Kind:
    """A call of arrays of known shapes and dtypes, described."""

    def __init__(self, operation: Operation, options: Any, arrays: Sequence[Any]) -> None:
        call = CallOf(NAMES[operation], tuple([x is not None for x in arrays]), options, times_forgotten())
        known = traced(call, [x for x in arrays if x is not None], operation.operands)  # with the call's own errors
        self.call = call._replace(options=plain(options))
        self.results, self.note = known.results, known.described.note
        self.run = jitted(self.call)


class _Kept(dict[Any, Kind]):
    """Kinds of calls by what tells them apart; with `CALLS_KEPT` of them it starts anew."""

    def keep(self, key: Any, kind: Kind) -> Kind:
        """Return the kind that is kept under a key: this one, or that of a thread that came first."""
        if len(self) >= CALLS_KEPT:
            self.clear()
        with suppress(TypeError):  # options that cannot be hashed
            kind = self.setdefault(key, kind)
        return kind


_KINDS: Final = _Kept()


class _KindOf(dict[type, str]):
    """What a type is to JAX: "tracer", "array", or "" for what is none of its."""

    def __missing__(self, kind: type) -> str:
        found = "tracer" if issubclass(kind, Tracer) else "array" if issubclass(kind, jax.Array) else ""
        self[kind] = found
        if found == "array":
            Operation.stand_ins_of[kind] = known
        return found


_KIND_OF: Final = _KindOf()
_EAGER: Final = _Kept()
"""Kinds of calls whose operands are all arrays of JAX, by what is quickest to ask."""


def stand_in(
    operation: Operation, operands: tuple[Any, ...], options: Any, stream: object
) -> tuple[Sequence[Any], Any] | None:
    """Make a call on arrays of JAX; None leaves calls of other arrays, and of several frameworks, to their own way.

    Raises:
        DeviceError: the operands are on several devices, or a stream is given while JAX traces, or to `fp8core.jax`.
        LayoutError: an operand was deleted, cannot be written to, or is no array of JAX while JAX traces, or in a call
            of `fp8core.jax`.
    """
    tracing = "tracer" in [_KIND_OF[type(x)] for x in operands]
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
        if type(arrays[at]) is np.ndarray:  # a number, which the caller gets back as an array
            arrays[at] = jnp.asarray(arrays[at]) if tracing else _beside(arrays[at], arrays[0])
    return arrays, kind.note


def _refuse_others(operation: Operation, operands: tuple[Any, ...], stream: object) -> None:
    """Refuse what a function of `fp8core.jax` cannot be given: only programs of JAX return arrays in its places."""
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
    """Make a call on arrays of JAX, at once if its kind was met before; None as for `stand_in`."""
    if stream is not None:
        return stand_in(operation, operands, options, stream)
    try:  # a number among operands has no dtype, and options may be what cannot be hashed
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
    """Return a key of a call whose operands are arrays; other types than those of arrays make another key."""
    kinds = [None if x is None else (type(x), x.shape, x.dtype) for x in operands]
    return operation, options, times_forgotten(), *kinds


def _check_places(operation: Operation, operands: tuple[Any, ...], arrays: Sequence[Any], kind: Kind) -> None:
    """Refuse an array that a result would be written into."""
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
"""What to do about a result of a function that cannot be written, where that is not to leave it out."""


def _kind(operation: Operation, options: Any, arrays: Sequence[Any]) -> Kind:
    kinds = tuple([None if x is None else (x.shape, x.dtype) for x in arrays])
    key = operation, options, times_forgotten(), kinds
    with suppress(TypeError):  # options that cannot be hashed
        found = _KINDS.get(key)
        if found is not None:
            return found
    return _KINDS.keep(key, Kind(operation, options, arrays))


def _arrays(operation: Operation, operands: tuple[Any, ...], tracing: bool) -> list[Any] | None:
    """Return operands as what JAX takes; None where one is an array of another framework."""
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
        arrays.append(array)
    return arrays


def _beside(number: Any, x: Any) -> Any:
    """Return a number as an array where ``x`` is; the devices of a mesh have it at hand wherever it is."""
    return jax.device_put(number, x.sharding) if len(x.sharding.device_set) == 1 else jnp.asarray(number)


def _eager(kind: Kind, arrays: Sequence[Any], operation: Operation) -> Any:
    try:
        return kind.run(*[x for x in arrays if x is not None])
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
        raise
