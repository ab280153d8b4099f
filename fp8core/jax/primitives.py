"""The primitive of a custom call, its description from shapes and dtypes, and its lowering."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from fp8core.core.calls import Described
from fp8core.core.specs import TensorSpec
from fp8core.errors import ShapeError
from fp8core.interop import numpy_arrays
from fp8core.jax import handler
from fp8core.jax.programs import (
    ALIGNMENT,
    OPERATIONS,
    Placed,
    Problem,
    layout_of,
    layout_of_operand,
    strides_of,
)
from fp8core.jax.scratch import most_scratch
from fp8core.target import HOST

UNKNOWN: Final = 1_000_000_007, 1_100_000_009
"""The numbers that stand for the first symbolic extent in two descriptions: primes above the extents of models."""


class CallOf(NamedTuple):
    """A call without its operands, as the parameter of a primitive."""

    name: str
    """The operation's name in programs."""
    given: tuple[bool, ...]
    """For each operand, whether it is given."""
    options: Any
    """The options, converted by `programs.plain`."""
    tuned: int = 0
    """See `Problem.tuned`."""

    @property
    def places(self) -> list[int]:
        """The positions of the operands that are given."""
        return [at for at, there in enumerate(self.given) if there]


class Traced(NamedTuple):
    """A call described from the shapes and dtypes of its operands."""

    described: Described
    results: tuple[int, ...]
    """The positions of the results."""
    shapes: tuple[tuple[Any, ...], ...]
    """The shapes of the results, in terms of the symbols in the operands' shapes."""
    written: dict[int, int]
    """By index of an argument: the index of the result that is written over it."""


def traced(call: CallOf, avals: Sequence[Any], names: Sequence[str] | None = None) -> Traced:
    """Describe a call from the avals of its operands; ``names`` are the operand names in errors.

    Raises:
        Fp8Error: the errors of the call itself; and a ShapeError if a result's extent depends on a symbol in another
            way than being a multiple of it, as that of padded rows does.
    """
    if call.name == "quantize" and call.options[-1] is not None:  # rows_padded
        rows = avals[0].shape[:-1]
        if not all(isinstance(extent, int) for extent in rows):
            name = names[0] if names else "x"
            raise ShapeError(f"{name} needs a fixed number of rows to be padded, got shape {avals[0].shape}")
    described, results, extents = _described(call, avals, names, UNKNOWN[0])
    fixed = all(isinstance(extent, int) for aval in avals for extent in aval.shape)
    if not fixed and extents != _described(call, avals, names, UNKNOWN[1])[2]:
        raise ShapeError(f"{call.name} needs extents of results that are products of extents, got one that is not")
    written = {call.places.index(at): i for i, at in enumerate(results) if call.given[at]}
    return Traced(described, results, extents, written)


def _described(
    call: CallOf, avals: Sequence[Any], names: Sequence[str] | None, unknown: int
) -> tuple[Described, tuple[int, ...], tuple[tuple[Any, ...], ...]]:
    """Describe a call with numbers in place of symbols, and return the positions and shapes of results, too."""
    operation = OPERATIONS[call.name]
    shapes, symbols = _numbers([aval.shape for aval in avals], unknown)
    given = iter(zip(avals, shapes, strict=True))
    specs: list[TensorSpec | None] = []
    placed = place(call, shapes)
    for at, (name, there) in enumerate(zip(names or operation.operands, call.given, strict=True)):
        if not there:
            specs.append(None)
            continue
        aval, shape = next(given)
        dtype = numpy_arrays.dtype_of(aval.dtype, name)
        specs.append(TensorSpec(name, dtype, shape, strides_of(shape, placed[at]), HOST, ALIGNMENT))
    described = operation.describe(specs, call.options)
    results = tuple(sorted(described.results))
    extents = tuple(tuple(_extent(number, symbols) for number in described.results[at].shape) for at in results)
    return described, results, extents


def place(call: CallOf, shapes: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return the layouts of the given operands, by position."""
    known = dict(zip(call.places, shapes, strict=True))
    return {at: layout_of_operand(call.name, at, known) for at in known}


def _numbers(
    shapes: Sequence[tuple[Any, ...]], unknown: int = UNKNOWN[0]
) -> tuple[list[tuple[int, ...]], dict[int, Any]]:
    """Return shapes with numbers in place of symbols, and the symbols by number."""
    symbols: dict[int, Any] = {}
    numbers: dict[Any, int] = {}

    def number(extent: Any) -> int:
        if isinstance(extent, int | np.integer):
            return int(extent)
        if extent not in numbers:
            numbers[extent] = _prime(unknown if not symbols else max(symbols) + 2)
            symbols[numbers[extent]] = extent
        return numbers[extent]

    return [tuple(map(number, shape)) for shape in shapes], symbols


def _extent(number: int, symbols: dict[int, Any]) -> Any:
    """Return the extent of a result in terms of symbols: a number, a symbol, or a product of them."""
    extent: Any = 1
    for prime, symbol in symbols.items():
        while number and number % prime == 0:
            extent, number = extent * symbol, number // prime
    return extent * number


def _prime(least: int) -> int:
    while any(least % factor == 0 for factor in range(3, math.isqrt(least) + 1, 2)):
        least += 2
    return least


def avals_of(known: Traced, first: Any, shardings: Sequence[Any] | None = None) -> list[Any]:
    """Return the avals of a call's results; inside of `jax.shard_map` they vary over the same axes as ``first``."""
    dtypes = numpy_arrays.dtypes()
    mesh = first.sharding.mesh
    made = []
    for i, (at, shape) in enumerate(zip(known.results, known.shapes, strict=True)):
        dtype = dtypes[known.described.results[at].dtype]
        sharding = NamedSharding(mesh, PartitionSpec(*(None,) * len(shape))) if shardings is None else shardings[i]
        made.append(first.update(shape=shape, dtype=dtype, weak_type=False, sharding=sharding))
    return made


# ---- the custom call -----------------------------------------------------------------------------------------

FFI: Final = Primitive("fp8core_ffi")
"""A custom call on one device."""
FFI.multiple_results = True


def _abstract(*avals: Any, call: CallOf) -> list[Any]:
    return avals_of(traced(call, avals), avals[0])


def _lower(platform: str, ctx: Any, *operands: Any, call: CallOf) -> Any:
    """Lower a call for a platform: compile and load its kernels, and add a result for its scratch."""
    avals = ctx.avals_in
    known = traced(call, avals)
    layouts = place(call, _numbers([aval.shape for aval in avals])[0])
    names = numpy_arrays.names()
    arrays = {at: (names[np.dtype(x.dtype)], x.shape) for at, x in zip(call.places, avals, strict=True)}
    placed: list[Placed | None] = [None] * len(call.given)
    for at, (dtype, shape) in arrays.items():
        placed[at] = Placed(dtype, tuple([n if isinstance(n, int) else None for n in shape]), layouts[at])
    problem = Problem(call.name, tuple(placed), call.options, call.tuned)
    there = handler.ALL[platform]
    scratch: Any = 0
    if problem.fixed and there.here:
        text, scratch = there.plan(problem)
    else:
        if OPERATIONS[call.name].scratch:
            scratch = most_scratch(call.name, arrays, call.options, platform)
        text = problem.text(scratch if problem.fixed else None)
    results = [known.described.results[at] for at in known.results]
    result_layouts = [layout_of(new) for new in results]
    out = list(ctx.avals_out)
    if not isinstance(scratch, int) or scratch:
        out.append(jax.core.ShapedArray((handler.scratch_extent(scratch),), np.uint8))
        result_layouts.append((0,))
    rule = jax.ffi.ffi_lowering(
        handler.TARGET,
        operand_layouts=[layouts[at] for at in call.places],
        result_layouts=result_layouts,
        operand_output_aliases=known.written or None,
    )
    made = rule(ctx.replace(avals_out=out), *operands, problem=text)
    return list(made)[: len(ctx.avals_out)]


FFI.def_abstract_eval(_abstract)
for _platform in handler.PLATFORMS:
    mlir.register_lowering(FFI, partial(_lower, _platform), platform=_platform)
