"""The one call path: every operation of the library goes through `Operation.__call__`.

A call has operands, each an array or None, and options. The first call of a kind views the operands, describes the call
from their specs (`fp8core.core.specs`, which hold no address), plans it, and caches it under those specs and options.
Later calls of the same signature find the cached call, query the stream, allocate the results, and launch with the
addresses of their own operands.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar, Final
from weakref import WeakSet

from fp8core import interop
from fp8core.core import prefetch, under_way
from fp8core.core.calls import NO_SHORTCUTS, Call, CallCache, Calls, Described
from fp8core.core.checks import became_infinite, in_float32
from fp8core.core.explaining import ExplainRequest
from fp8core.core.shortcuts import repeat, shortcut
from fp8core.core.signature import offsets
from fp8core.core.specs import TensorSpec, spec_of
from fp8core.errors import DTypeError, ScaleError
from fp8core.forks import ForkSafeLock
from fp8core.interop import Framework, LaunchStream, TensorView, eager_only
from fp8core.interop.tensor import fill_number


class Interned:
    """Options wrapped in an object that is hashed by identity; `Operation.interned` makes one for all equal options."""

    __slots__ = ("options",)

    def __init__(self, options: Any) -> None:
        self.options = options


StandIn = Callable[["Operation", tuple[Any, ...], Any, object], tuple[Sequence[Any], Any] | None]
"""Takes an operation, operands, options and stream. Makes the call and returns its result, or returns None if the call
is not for it."""


class Operation:
    """An operation of the library: the names of its operands in the order of its launches, and how to describe a call.

    Args:
        operands: the names of the operands in error messages; the first operand decides the device that the call runs
            on and the framework of its results.
        describe: checks a call, given the specs of its operands and its options.
        scratch: whether launches take the address of a scratch after those of the operands.
        in_place: pairs of a result and an operand that may be the same memory.
        numbers: the indices of operands that may be Python or NumPy numbers: scales, which become fp32 arrays of one
            element.
        returned: the indices, among ``numbers``, whose arrays are returned to the caller.
    """

    stand_ins: ClassVar[dict[str, StandIn]] = {}
    """By framework: makes the calls that the call path cannot make, such as those on arrays without memory. Set by
    `fp8core.torch` and `fp8core.jax`."""
    stand_ins_of: ClassVar[dict[type, StandIn]] = {}
    """By the type of the first operand, if that alone decides: the only stand-in to ask. No guard recognizes such
    calls."""
    traced: Callable[[tuple[Any, ...], Any, object], tuple[Sequence[Any], Any]] | None = None
    """What torch traces in place of a call. Takes operands, options and stream."""

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
        with _LISTING.held:
            _ALL.add(self)

    def interned(self, options: Hashable) -> Interned:
        """Return the object to pass instead of ``options`` in repeated calls: the same one for all equal options."""
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
            operands: arrays, or None for an operand that is left out; a result that is left out is allocated.
            options: everything else that the call depends on.
            stream: the stream to launch on; by default the current stream of the first operand's framework.
            weights: the history of the weight of the calling layer, which allows reading it early.
        """
        if stream is not None:
            return self._general(operands, options, stream, weights)
        cache = self.cache
        try:
            shortcuts = cache.shortcuts.get(options, NO_SHORTCUTS).get(operands[0].nbytes, ())
        except (AttributeError, TypeError, RuntimeError):  # not an array, or unhashable options
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
        except (KeyError, TypeError):  # a call of a new kind, or unhashable options
            unknown = calls, key
        else:
            if guarding is not None:
                make = partial(shortcut, operands, tuple(addresses), call, guarding)
                cache.shorten(options, operands[0].nbytes, make)
            return repeated(operands, addresses, weights)
        return self._general(operands, options, None, weights, unknown)  # outside of except: no KeyError in tracebacks

    def forget(self) -> None:
        """Drop all planned calls, because the choice of kernels has changed."""
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
        """View the operands of a call and run it: the first of a kind, of several frameworks, or on a given stream."""
        cache = self.cache
        instead = self._made_instead(operands, options, stream)
        if instead is not None:
            return instead
        plain = options.options if type(options) is Interned else options
        if isinstance(stream, ExplainRequest):
            seen = self._viewed(operands, LaunchStream(stream.stream), stream)
            raise stream.answered(*seen, lambda specs: self.describe(specs, plain))
        views, specs = self._viewed(operands, LaunchStream(stream))
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
        interop.order_before(work, present, stream)  # before memory is allocated, which may end a capture
        held = []  # until the launch has been made
        for at in self.numbers:
            if specs[at] is not None and views[at] is None:
                value = interop.scalar(operands[at])
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
        announced = prefetch.NO_WEIGHTS
        with _ordered_after(work, present, stream):
            try:
                announced = call.regions.announce_write(addresses, work)
                call.run(work, addresses, pool, weights)
            finally:
                announced.end()
        interop.wrote(operands[at] for at in call.given)
        if framework.wraps:
            for at in range(len(arrays)):
                if arrays[at] is not operands[at]:
                    arrays[at] = framework.wrap(arrays[at], work, operands[0])
        if among is not None and all(interop.always_writable(operands[at]) for at in call.given):
            cache.keep(call, repeat(operands, call), *among)
        return arrays, call.note

    def _made_instead(
        self, operands: tuple[Any, ...], options: Any, stream: object
    ) -> tuple[Sequence[Any], Any] | None:
        """Return the result of the call if a framework's stand-in makes it, otherwise None."""
        first = self.stand_ins_of.get(type(operands[0]))
        for stand_in in tuple(self.stand_ins.values()) if first is None else (first,):
            made = stand_in(self, operands, options, stream)
            if made is not None:
                return made
        return None

    def _viewed(
        self, operands: tuple[Any, ...], launch: LaunchStream, request: ExplainRequest | None = None
    ) -> tuple[list[TensorView | None], tuple[TensorSpec | None, ...]]:
        """Return the views and the specs of operands; a number or an `ArraySpec` has a spec and no view."""
        if operands[0] is None:
            raise DTypeError(f"{self.operands[0]} needs an array, got None")
        views: list[TensorView | None] = []
        specs: list[TensorSpec | None] = []
        for at, (x, name) in enumerate(zip(operands, self.operands, strict=True)):
            number = x is not None and at in self.numbers and float32_number(x, name) is not None
            known = None if request is None else request.spec(x, name)
            view = None if x is None or number or known is not None else interop.view(x, name, launch)
            views.append(view)
            if launch.first is None:
                launch.first = view
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
        except TypeError:  # unhashable options
            call = key = None
        if call is None:
            described = self.describe(specs, options)
            call = Call(self.operands, described, specs, framework, self.in_place, self.scratch)
            if key is not None:
                cache.by_specs[key] = call
        return call


@contextmanager
def _ordered_after(work: int, views: Sequence[TensorView], stream: object) -> Iterator[None]:
    """Order streams after the launches of a call, also of one that fails, whose first launches may be under way.

    The error of the call is raised, whether or not that succeeds.
    """
    try:
        yield
    except BaseException:
        with suppress(Exception):
            interop.order_after(work, views, stream)
        raise
    interop.order_after(work, views, stream)


def _given_to(variables: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield the address ranges of the caller's arrays that `Operation._general` writes, given its local variables."""
    call: Call = variables["call"]
    return call.written(dict(enumerate(variables["addresses"])))


under_way.register(Operation._general.__code__, _given_to)
_ALL: Final[WeakSet[Operation]] = WeakSet()
_LISTING: Final = ForkSafeLock()
"""Of `_ALL`."""
_forgotten = 0


def forget() -> None:
    """Drop the planned calls of every operation, because the choice of kernels has changed."""
    global _forgotten  # noqa: PLW0603 - programs that are kept elsewhere compare it
    with _LISTING.held:
        _forgotten += 1
        operations = list(_ALL)
    for operation in operations:
        operation.forget()


def times_forgotten() -> int:
    """Return how often `forget` has been called: how often the choice of kernels has changed."""
    return _forgotten


def float32_number(number: Any, name: str) -> float | None:
    """Return the value of a number that was given as an operand; None if it is not a number.

    Raises:
        ScaleError: the number is not representable in float32: it would become infinity or zero.
    """
    value = interop.scalar(number)
    if value is None:
        return None
    if became_infinite(number, value) or (not value and number) or not in_float32(value):
        raise ScaleError(f"{name} needs a number that float32 holds, got {number}")
    return value
