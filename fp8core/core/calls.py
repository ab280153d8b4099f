"""Calls of an operation: described from the specs of their operands, planned, and cached.

Nothing here holds an address: a cached call serves all operands of the same specs.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fp8core.core import prefetch
from fp8core.core.memory import Regions, scratch_allocator
from fp8core.core.signature import signature
from fp8core.core.specs import TensorSpec
from fp8core.interop import Allocator, Framework, framework_of
from fp8core.table import Explanation, Launch

Repeat = Callable[[tuple[Any, ...], list[int], prefetch.WeightHistory | None], tuple[Sequence[Any], Any]]
"""Makes a planned call for operands of its specs. Takes the operands, their addresses (0 for None) and the history of
the weight, and returns what a call of the operation returns."""
Shortcut = Callable[[tuple[Any, ...], prefetch.WeightHistory | None], tuple[Sequence[Any], Any] | None]
"""A `Repeat` that reads the addresses itself. It makes no call and returns None unless the operands have the
signatures, and their addresses the alignments, that it was written for."""

CALLS_KEPT: Final = 4096
"""Calls that the cache of one operation holds before it is emptied, a few kilobytes each: a server meets a new m with
every batch."""
SHORTCUTS_PER_SIZE: Final = 8
"""Shortcuts kept for equal options and one size of the first operand, as for the weights of a model that take the same
input."""


class NewArray(NamedTuple):
    """A result yet to be allocated."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    """In elements; row-major if left out."""


class Planned(NamedTuple):
    """What runs a described call."""

    launch: Launch | None
    """Takes the addresses of all operands in the operation's order, and, for an operation with scratch, that of the
    scratch. None where there is nothing to compute."""
    scratch_bytes: int = 0
    prefetching: Callable[[], Launch] | None = None
    """Makes the launch that reads the weight before the preceding launch on the stream has ended; None if the plan has
    no such launch."""


class Described(NamedTuple):
    """A checked call: its results, and how to plan and explain it. Made from specs, without memory."""

    results: Mapping[int, NewArray]
    """The results by operand index; each is written into the caller's array, or into a new one."""
    plan: Callable[[], Planned]
    explain: Callable[[], Explanation]
    note: Any = None
    """What the public function needs to know about the result besides its arrays."""


class Call:
    """A described call that has been planned, for any operands of the same specs."""

    def __init__(
        self,
        names: Sequence[str],
        described: Described,
        specs: Sequence[TensorSpec | None],
        framework: Framework,
        in_place: tuple[tuple[int, int], ...],
        scratch: bool,
    ) -> None:
        planned = described.plan()
        first = specs[0]
        assert first is not None
        target = first.target
        self.launch, self.note = planned.launch, described.note
        self.new: tuple[tuple[int, Allocator], ...] = tuple(
            (at, framework.allocator(new.shape, new.dtype, target, new.strides))
            for at, new in described.results.items()
            if specs[at] is None
        )
        self.regions = Regions(names, specs, described.results, in_place)
        self.given, self.examined = self.regions.given, self.regions.examined
        self.stream = framework.stream_getter(target)
        self.wrote = framework.wrote if self.given else None
        self.allocate_scratch = scratch_allocator(planned.scratch_bytes, framework, target)
        self.may_overwrite = prefetch.applies(target)
        self._make_prefetching = planned.prefetching
        self.early_launch: Launch | None = None
        """The launch that reads the weight early; None until `prefetching` has made it."""
        self.can_prefetch = planned.prefetching is not None
        self.plain = None if scratch or self.can_prefetch else self.launch
        """The launch, if it takes the addresses of operands and nothing else; otherwise None."""
        self._scratch = scratch
        """Whether launches are given the address of a scratch."""

    def written(self, addresses: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yield the address ranges of the caller's arrays that a call writes, given the addresses of its operands."""
        for at, start, end in self.regions.spans_of_results:
            if at in self.given:
                yield addresses[at] + start, addresses[at] + end

    def prefetching(self) -> Launch:
        """Return the launch that reads the weight early; the first use makes it."""
        if self.early_launch is None:
            assert self._make_prefetching is not None
            self.early_launch = self._make_prefetching()
        return self.early_launch

    def examine(self, addresses: list[int], work: int, weights: prefetch.WeightHistory | None) -> bool:
        """Check the addresses of operands, and make the launch if it overwrites a weight that may be read early.

        Returns:
            Whether the launch has been made; if not, the caller makes it.

        Raises:
            LayoutError: a result of the caller shares memory with another operand.
        """
        self.regions.refuse_overlaps(addresses)
        found = self.regions.announce_write(addresses, work)
        if not found:
            return False
        try:
            self.run(work, addresses, None, weights)
        finally:
            found.end()
        return True

    def run(self, work: int, addresses: list[int], pool: int | None, weights: prefetch.WeightHistory | None) -> None:
        """Make the call's launch; it reads the weight early if that is safe, and gets a scratch if it needs one.

        Args:
            work: the stream.
            addresses: the addresses of all operands in the operation's order, 0 for None.
            pool: the stream again, to allocate on, if it is not the framework's current one; otherwise None.
            weights: the history of the weight.
        """
        launch = self.launch
        if launch is None:
            return
        history, writes, early = weights if self.can_prefetch else None, 0, False
        if history is not None:
            writes, early = history.writes, history.may_prefetch(work, addresses)
            if early:
                launch = self.early_launch or self.prefetching()
            else:
                writes = history.about_to_wait(work, addresses, self.regions.spans)
        if not self._scratch:
            launch(work, *addresses)
        elif self.allocate_scratch is None:
            launch(work, *addresses, 0)
        else:
            at, held = self.allocate_scratch(work, pool)  # held until the launch has been made
            try:
                launch(work, *addresses, at)
            finally:
                if callable(held):
                    held(at)
        if history is not None:
            if not early:
                history.waited(work, addresses, self.regions.spans, writes)
            elif (history.writing or history.writes != writes) and history.overtaken(work):
                # Another thread's write may precede this launch, which did not wait for it: launch again, and wait.
                self.run(work, addresses, pool, None)


Calls = dict[Hashable, tuple[Call, Repeat]]
"""The calls of one signature, by options and address offsets."""


NO_SHORTCUTS: Final[Mapping[int, tuple[Shortcut, ...]]] = {}
"""The shortcuts of options that were never used before."""


class CallCache:
    """The calls of one operation, found by shortcuts, else by signature and options, else by specs."""

    def __init__(self) -> None:
        self.shortcuts: dict[Hashable, dict[int, tuple[Shortcut, ...]]] = {}
        """By options, then by the size of the first operand in bytes."""
        self.by_specs: dict[Hashable, Call] = {}
        self._by_number: dict[int, tuple[Calls, Framework | None]] = {}
        """By the number of a signature: its calls, and the framework of its operands if that has guards."""
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self.by_specs)

    def of_signature(self, operands: Sequence[Any]) -> tuple[list[int], Calls, Framework | None] | None:
        """Return the addresses of operands, the calls of their signature, and their framework if it has guards.

        Return None if such operands have to be viewed in every call.
        """
        addresses, number = signature(operands)
        if number is None:
            return None
        known = self._by_number.get(number)
        if known is None:
            framework = framework_of(type(operands[0]))
            guarding = None if framework is None or framework.address is None else framework
            known = self._by_number.setdefault(number, ({}, guarding))
        return addresses, *known

    def shorten(self, options: Hashable, size: int, make: Callable[[], Shortcut | None]) -> None:
        """Put the shortcut that ``make`` returns in front, unless these options and this size have enough shortcuts."""
        by_size = self.shortcuts.setdefault(options, {})
        known = by_size.get(size, ())
        if len(known) < SHORTCUTS_PER_SIZE:
            made = make()
            if made is not None:
                by_size[size] = made, *known

    def keep(self, call: Call, repeat: Repeat, calls: Calls, key: Hashable) -> None:
        """Keep a call and its repeat among those of its signature; calls with unhashable options are not kept."""
        try:
            calls[key] = call, repeat
        except TypeError:
            return
        self._count += 1

    @property
    def full(self) -> bool:
        """Whether the cache has to be emptied: it has `CALLS_KEPT` calls or signatures (also of refused calls)."""
        return max(len(self), len(self._by_number)) >= CALLS_KEPT
