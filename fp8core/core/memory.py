"""The memory of a call: which operands may not overlap, and the scratch that the call needs for itself."""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from fp8core.core import prefetch
from fp8core.core.specs import TensorSpec
from fp8core.errors import LayoutError
from fp8core.interop import Framework
from fp8core.interop.overlap import share_memory
from fp8core.interop.tensor import bytes_reached, strides_or_contiguous
from fp8core.runtime import device, graph_memory
from fp8core.target import Target


class Regions:
    """The bytes that each operand of a call spans, and which of them the call writes."""

    def __init__(
        self,
        names: Sequence[str],
        specs: Sequence[TensorSpec | None],
        results: Mapping[int, Any],
        in_place: tuple[tuple[int, int], ...],
    ) -> None:
        arrays: list[Any] = [spec or results.get(at) for at, spec in enumerate(specs)]
        self._layouts = [
            None if x is None else (x.shape, strides_or_contiguous(x.shape, x.strides), x.dtype) for x in arrays
        ]
        self.spans = [(0, 0) if layout is None else bytes_reached(*layout) for layout in self._layouts]
        """For each operand the first byte and the one after the last, relative to its address."""
        self.spans_of_results = [(at, *self.spans[at]) for at in results if any(self.spans[at])]
        self._names, self._in_place = names, in_place
        self.given = tuple(at for at in results if specs[at] is not None)
        """The indices of the caller's arrays that are written."""
        self.places: Callable[[Sequence[int]], Any] = tuple if self.given else itemgetter(*results)
        """Returns the key in `examined` of the addresses of all operands: all of them if the caller gives results,
        otherwise those of the results."""
        self.examined: set[Any] = set()
        """Keys of addresses that passed the checks. Emptied when another weight is watched."""
        prefetch.WATCHED.clear_on_change(self)

    def refuse_overlaps(self, addresses: Sequence[int]) -> None:
        """Raise LayoutError if a result of the caller shares memory with another operand."""
        for at in self.given:
            for other in range(len(addresses)):
                if other != at and (other not in self.given or other > at) and self._share(at, other, addresses):
                    name, others = self._names[at], self._names[other]
                    raise LayoutError(f"{name} needs memory of its own, got an array that overlaps {others}")

    def announce_write(self, addresses: Sequence[int], stream: int) -> prefetch.WriteAnnouncement:
        """Announce what a launch on ``stream`` is about to write: return the weights there that may be read early.

        The caller calls `end` of the returned object once the launch has been made, or has failed.
        """
        version = prefetch.WATCHED.version
        written = [(addresses[at] + start, addresses[at] + end) for at, start, end in self.spans_of_results]
        found = prefetch.announce_write(written, stream)
        if not found:  # otherwise every such call has to announce its write
            prefetch.WATCHED.remember(self, self.places(addresses), version)
        return found

    def _share(self, at: int, other: int, addresses: Sequence[int]) -> bool:
        a, b = addresses[at], addresses[other]
        one, two = self._layouts[at], self._layouts[other]
        (start, end), (other_start, other_end) = self.spans[at], self.spans[other]
        if one is None or two is None or not (a + start < b + other_end and b + other_start < a + end):
            return False
        if a == b and (at, other) in self._in_place and one[:2] == two[:2]:
            return False
        return share_memory((a, *one), (b, *two))


def scratch_allocator(
    nbytes: int, framework: Framework, target: Target
) -> Callable[[int, int | None], tuple[int, Any]] | None:
    """Return a function that allocates a call's scratch; None if no scratch is needed.

    The function takes the call's stream, and the stream again (otherwise None) if it is not the framework's current
    one. It returns an address and the owner of the memory: an array, or, for memory that no array owns, a function that
    the caller calls with the address once the launch has been made. While the stream is being captured, the graph owns
    the memory, which has to live as long as the graph.
    """
    if not nbytes:
        return None
    allocate = framework.scratch_allocator(nbytes, target)
    if target.platform == "host":
        return lambda _stream, pool: allocate(pool)
    capturing, bare = device.capturing, framework.bare_memory(target)

    def scratch(stream: int, pool: int | None) -> tuple[int, Any]:
        if capturing(stream):
            return graph_memory.scratch(nbytes, target, stream), None
        return allocate(pool)

    if bare is None:
        return scratch
    take, give = bare

    def bare_scratch(stream: int, _pool: int | None) -> tuple[int, Any]:
        if capturing(stream):
            return graph_memory.scratch(nbytes, target, stream), None
        return take(nbytes, stream), give

    return bare_scratch
