"""What a call of an operation is: described from the specs of its operands, planned, and cached.

Nothing here holds an address: a cached call serves all operands of the same specs.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from fp8core.core import prefetch
from fp8core.core.memory import Regions, scratch_allocator
from fp8core.core.signature import signature
from fp8core.core.specs import TensorSpec
from fp8core.interop import Allocator, Framework, framework_of
from fp8core.table import Explanation

Launch = Callable[..., None]
"""Called with the stream, the addresses of all operands in the operation's order (0 of None), and, where the operation
has one, that of the scratch."""

Repeat = Callable[[tuple[Any, ...], list[int], prefetch.WeightHistory | None], tuple[Sequence[Any], Any]]
"""Takes operands of a planned call's specs, their addresses (0 of None) and what is known of the weight, and returns
what a call of the operation does: it has been made."""
Shortcut = Callable[[tuple[Any, ...], prefetch.WeightHistory | None], tuple[Sequence[Any], Any] | None]
"""The same without addresses. None unless the operands have the signatures, and their addresses the alignments, that it
was written for."""

CALLS_KEPT: Final = 4096
"""Of one operation, a few kilobytes each: a server meets a new m with every batch, and past this many starts anew."""
SHORTCUTS_PER_SIZE: Final = 8
"""For equal options and one size of the first operand: a model's weights that take the same input."""


class NewArray(NamedTuple):
    """A result yet to be allocated."""

    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...] | None = None
    """In elements; row-major if left out."""


class Planned(NamedTuple):
    """What runs a described call."""

    launch: Launch | None
    """None where there is nothing to compute."""
    scratch_bytes: int = 0
    prefetching: Callable[[], Launch] | None = None
    """Makes the launch that reads the weight before its predecessor on the stream has ended, where there is one."""


class Described(NamedTuple):
    """A checked call: what it gives, and how to plan and explain it. Made from specs, without memory."""

    results: Mapping[int, NewArray]
    """By the place of the operand: what is written there, into the caller's array or a new one."""
    plan: Callable[[], Planned]
    explain: Callable[[], Explanation]
    note: Any = None
    """What the public function has to know of the result beside its arrays."""


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
        self.early: Launch | None = None
        """The launch that reads the weight early, once `prefetching` has made it."""
        self.can_prefetch = planned.prefetching is not None
        self.plain = None if scratch or self.can_prefetch else self.launch
        """The launch, where it takes the addresses of operands and nothing else."""
        self._scratch = scratch
        """Whether launches are given the address of a scratch."""

    def written(self, addresses: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """Yield where the caller's arrays are that a call writes, given the addresses of its operands."""
        for at, start, end in self.regions.spans_of_results:
            if at in self.given:
                yield addresses[at] + start, addresses[at] + end

    def prefetching(self) -> Launch:
        """Return the launch that reads the weight early, made when it is first wanted."""
        if self.early is None:
            assert self._make_prefetching is not None
            self.early = self._make_prefetching()
        return self.early

    def examine(self, addresses: list[int], work: int, weights: prefetch.WeightHistory | None) -> bool:
        """Look at where operands lie, and make the launch of a call that writes over a weight that is read early.

        Returns:
            Whether the launch has been made.

        Raises:
            LayoutError: a result of the caller shares memory with another operand.
        """
        self.regions.refuse_overlaps(addresses)
        found = self.regions.overwritten(addresses, work)
        if not found:
            return False
        try:
            self.run(work, addresses, None, weights)
        finally:
            found.end()
        return True

    def run(self, work: int, addresses: list[int], pool: int | None, weights: prefetch.WeightHistory | None) -> None:
        """Make the call's launch, which reads the weight early where that is safe, with a scratch where it needs one.

        Args:
            work: the stream.
            addresses: of all operands in the operation's order, 0 of None.
            pool: the stream once more where it is not the framework's own current one.
            weights: what is known of the weight.
        """
        launch = self.launch
        if launch is None:
            return
        waits, writes, early = weights if self.can_prefetch else None, 0, False
        if waits is not None:
            writes, early = waits.writes, waits.may_prefetch(work, addresses)
            if early:
                launch = self.early or self.prefetching()
            else:
                writes = waits.watch(work, addresses, self.regions.spans)
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
        if waits is not None:
            if not early:
                waits.waited(work, addresses, self.regions.spans, writes)
            elif (waits.writing or waits.writes != writes) and waits.overtaken(work):  # by a launch of another thread
                self.run(work, addresses, pool, None)  # once more, and late


Calls = dict[Hashable, tuple[Call, Repeat]]
"""Of one signature: by options and offsets."""


NO_SHORTCUTS: Final[Mapping[int, tuple[Shortcut, ...]]] = {}
"""The shortcuts of options that were not met before."""


class CallCache:
    """The calls of one operation: by shortcuts, else by signature and options, and all of them by specs."""

    def __init__(self) -> None:
        self.shortcuts: dict[Hashable, dict[int, tuple[Shortcut, ...]]] = {}
        """By options and the size in bytes of the first operand."""
        self.by_specs: dict[Hashable, Call] = {}
        self._by_number: dict[int, tuple[Calls, Framework | None]] = {}
        """With the framework of the operands if it has guards."""
        self._count = 0

    def __len__(self) -> int:
        return self._count + len(self.by_specs)

    def of_signature(self, operands: Sequence[Any]) -> tuple[list[int], Calls, Framework | None] | None:
        """Return the addresses of operands, the calls of their signature, and their framework if it has guards.

        None where operands have to be viewed each time.
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
        """Keep the shortcut that ``make`` gives before others, while there are few for these options and this size."""
        by_size = self.shortcuts.setdefault(options, {})
        known = by_size.get(size, ())
        if len(known) < SHORTCUTS_PER_SIZE:
            made = make()
            if made is not None:
                by_size[size] = made, *known

    def keep(self, call: Call, repeat: Repeat, calls: Calls, key: Hashable) -> None:
        """Keep a call and its repeat among those of its signature; with options without a hash each is described."""
        try:
            calls[key] = call, repeat
        except TypeError:
            return
        self._count += 1

    @property
    def full(self) -> bool:
        """Whether to start anew: with as many calls, or signatures of calls that were refused."""
        return max(len(self), len(self._by_number)) >= CALLS_KEPT
