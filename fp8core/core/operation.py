"""The one call path: every operation of the library goes through `Operation.__call__`.

A call is made from its operands, each an array or None, and its options. The first call of a kind views the operands,
describes the call from their specs (`fp8core.core.specs`, which hold no address), plans it, and caches it under those
specs and options. Later calls of the same signature find the cached call, ask for the stream, allocate the results, and
launch with the addresses of their own operands.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final
from weakref import WeakSet

from fp8core import interop
from fp8core.core import prefetch, under_way
from fp8core.core.calls import NO_SHORTCUTS, Call, CallCache, Calls, Described
from fp8core.core.explaining import ExplainRequest
from fp8core.core.shortcuts import repeat, shortcut
from fp8core.core.signature import offsets
from fp8core.core.specs import TensorSpec, in_float32, spec_of
from fp8core.errors import DTypeError, ScaleError
from fp8core.interop import Framework, TensorView, eager_only
from fp8core.interop.tensor import fill_number


class Interned:
    """Options that are hashed once: equal ones are one object (`Operation.interned`)."""

    __slots__ = ("options",)

    def __init__(self, options: Any) -> None:
        self.options = options


StandIn = Callable[["Operation", tuple[Any, ...], Any, object], tuple[Sequence[Any], Any] | None]
"""Takes an operation, operands, options and stream, and returns what the call returns; None of calls not its own."""


class Operation:
    """An operation of the library: the names of its operands in the order of its launches, and how to describe a call.

    Args:
        operands: what errors call each operand; the first one decides where the call runs and what its results are.
        describe: checks a call, given the specs of its operands and its options.
        scratch: whether launches are given the address of a scratch after those of the operands.
        in_place: pairs of a result and an operand that may be the same memory.
        numbers: the places of operands that may be Python or NumPy numbers: scales, as fp32 arrays of one.
        returned: those of them that the caller gets back as arrays.
    """

    stand_ins: ClassVar[dict[str, StandIn]] = {}
    """What makes calls that the call path cannot make, as of arrays without memory: of each framework that has such,
    set by its module (`fp8core.torch`, `fp8core.jax`)."""
    stand_ins_of: ClassVar[dict[type, StandIn]] = {}
    """The one to ask, by the type of the first operand, where that alone says so: no guard recognizes such calls."""
    traced: Callable[[tuple[Any, ...], Any, object], tuple[Sequence[Any], Any]] | None = None
    """What torch traces in the place of a call: it takes operands, options and stream."""

    def __init__(
        self,
        operands: tuple[str, ...],
        describe: Callable[[Sequence[TensorSpec | None], Any], Described],
        *,
        scratch: bool = False,
        in_place: tuple[tuple[int, int], ...] = (),
        numbers: tuple[int, ...] = (),
        returned: tuple[int, ...] = (),
    ) -> None:
        self.operands, self.describe, self.scratch = operands, describe, scratch
        self.in_place, self.numbers, self.returned = in_place, numbers, returned
        self.cache = CallCache()
        self._interned: dict[Hashable, Interned] = {}
        _ALL.add(self)

    def interned(self, options: Hashable) -> Interned:
        """Return options to be given in place of ``options``, call after call."""
        return self._interned.setdefault(options, Interned(options))

    @eager_only
    def __call__(
        self,
        operands: tuple[Any, ...],
        options: Any,
        stream: object = None,
        weights: prefetch.WeightHistory | None = None,
    ) -> tuple[Sequence[Any], Any]:
        """Run the operation: return its operands with the results in their places, and the description's note.

        Args:
            operands: arrays, or None where one is left out; a result that is left out is allocated.
            options: everything else that the call depends on.
            stream: the stream to launch on; by default the one that the first operand's framework works on.
            weights: what is known of the weight of the layer that calls, so that it can be read early.
        """
        if stream is not None:
            return self._general(operands, options, stream, weights)
        cache = self.cache
        try:
            shortcuts = cache.shortcuts.get(options, NO_SHORTCUTS).get(operands[0].nbytes, ())
        except (AttributeError, TypeError, RuntimeError):  # no array, or options that cannot be hashed
            shortcuts = ()
        for run in shortcuts:
            made = run(operands, weights)
            if made is not None:
                return made
        found = None if type(operands[0]) in self.stand_ins_of else cache.of_signature(operands)
        if found is None:
            return self._general(operands, options, None, weights)
        addresses, calls, guarding = found
        key = options, offsets(addresses)
        try:
            call, repeated = calls[key]
        except (KeyError, TypeError):  # a call of a new kind, or options that cannot be hashed
            unknown = calls, key
        else:
            if guarding is not None:
                make = partial(shortcut, operands, tuple(addresses), call, guarding)
                cache.shorten(options, operands[0].nbytes, make)
            return repeated(operands, addresses, weights)
        return self._general(operands, options, None, weights, unknown)  # outside of except: no KeyError in tracebacks

    def forget(self) -> None:
        """Let every call be planned anew, as what runs a problem has changed."""
        self.cache = CallCache()

    def __len__(self) -> int:
        return len(self.cache)

    def _general(
        self,
        operands: tuple[Any, ...],
        options: Any,
        stream: object,
        weights: prefetch.WeightHistory | None,
        among: tuple[Calls, Hashable] | None = None,
    ) -> tuple[Sequence[Any], Any]:
        """Run a call whose operands are viewed: the first of a kind, of several frameworks, or on a given stream."""
        cache = self.cache
        instead = self._made_instead(operands, options, stream)
        if instead is not None:
            return instead
        plain = options.options if type(options) is Interned else options
        if isinstance(stream, ExplainRequest):
            raise stream.explained(*self._viewed(operands, stream), lambda specs: self.describe(specs, plain))
        views, specs = self._viewed(operands)
        first = views[0]
        assert first is not None
        framework = first.framework
        call = self._planned(cache, specs, plain, framework)
        for at in call.given:
            interop.check_writable(operands[at], self.operands[at])
        present = [view for view in views if view is not None]
        work = interop.stream_of(first, stream)
        pool = None if stream is None else work
        arrays, addresses = list(operands), [0 if view is None else view.pointer for view in views]
        call.regions.refuse_overlaps(addresses)
        held = []  # until the launch has been made
        for at in self.numbers:
            if specs[at] is not None and views[at] is None:
                value = float32_number(operands[at], self.operands[at])
                assert value is not None
                if at in self.returned:
                    addresses[at], arrays[at] = allocated = framework.empty((1,), "float32", first.target, None, pool)
                    fill_number(allocated.pointer, value, first.target, work)
                else:
                    number = framework.number(value, first.target, work)
                    addresses[at] = number.pointer
                    held.append(number)
        for at, allocate in call.new:
            addresses[at], arrays[at] = allocate(pool)
        overwritten = prefetch.NOTHING
        try:
            overwritten = call.regions.overwritten(addresses, work)
            interop.order_before(work, present, stream)
            call.run(work, addresses, pool, weights)
        finally:
            overwritten.end()
        interop.order_after(work, present, stream)
        interop.wrote(operands[at] for at in call.given)
        if framework.wraps:
            for at in range(len(arrays)):
                if arrays[at] is not operands[at]:
                    arrays[at] = framework.wrap(arrays[at], work)
        if among is not None:
            cache.keep(call, repeat(operands, call), *among)
        return arrays, call.note

    def _made_instead(
        self, operands: tuple[Any, ...], options: Any, stream: object
    ) -> tuple[Sequence[Any], Any] | None:
        """Return what a framework's stand-in returns of a call that it makes."""
        first = self.stand_ins_of.get(type(operands[0]))
        for stand_in in self.stand_ins.values() if first is None else (first,):
            made = stand_in(self, operands, options, stream)
            if made is not None:
                return made
        return None

    def _viewed(
        self, operands: tuple[Any, ...], request: ExplainRequest | None = None
    ) -> tuple[list[TensorView | None], tuple[TensorSpec | None, ...]]:
        """Return the views and the specs of operands; a number has a spec and no memory yet, an `ArraySpec` no view."""
        if operands[0] is None:
            raise DTypeError(f"{self.operands[0]} needs an array, got None")
        views: list[TensorView | None] = []
        specs: list[TensorSpec | None] = []
        for at, (x, name) in enumerate(zip(operands, self.operands, strict=True)):
            number = x is not None and at in self.numbers and interop.scalar(x) is not None
            known = None if request is None else request.spec(x, name)
            view = None if x is None or number or known is not None else interop.view(x, name)
            views.append(view)
            if number and specs[0] is not None:
                specs.append(TensorSpec(name, "float32", (1,), (1,), specs[0].target))
            else:
                specs.append(known if view is None else spec_of(view, name))
        return views, tuple(specs)

    def _planned(
        self, cache: CallCache, specs: tuple[TensorSpec | None, ...], options: Any, framework: Framework
    ) -> Call:
        if cache.full:
            self.forget()
        key: Hashable = specs, options, id(framework)  # frameworks live as long as the process
        try:
            call = cache.by_specs.get(key)
        except TypeError:  # options that cannot be hashed
            call = key = None
        if call is None:
            described = self.describe(specs, options)
            call = Call(self.operands, described, specs, framework, self.in_place, self.scratch)
            if key is not None:
                cache.by_specs[key] = call
        return call


def _given_to(variables: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield where the caller's arrays are that `Operation._general` writes, by its variables."""
    call: Call = variables["call"]
    return call.written(dict(enumerate(variables["addresses"])))


under_way.makes_calls(Operation._general.__code__, _given_to)
_ALL: Final[WeakSet[Operation]] = WeakSet()
_forgotten = 0


def forget() -> None:
    """Let every call of every operation be planned anew, as what runs a problem has changed."""
    global _forgotten  # noqa: PLW0603 - programs that others keep are told apart by it
    _forgotten += 1
    for operation in list(_ALL):
        operation.forget()


def times_forgotten() -> int:
    """Return how often what runs a problem has changed."""
    return _forgotten


def float32_number(number: Any, name: str) -> float | None:
    """Return a number in the place of an operand; None of what is no number.

    Raises:
        ScaleError: float32 does not hold it.
    """
    value = interop.scalar(number)
    if value is None:
        return None
    became = (abs(value) == math.inf and number not in (math.inf, -math.inf)) or (not value and number)
    if became or not in_float32(value):
        raise ScaleError(f"{name} needs a number that float32 holds, got {number}")
    return value
