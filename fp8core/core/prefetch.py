"""Which weights may be read early: before the preceding launch on the stream has ended.

Kernels on sm_90 and later may let the next kernel on the stream begin while they still run (programmatic dependent
launch). A product may then read its weight, the weight's scale and the bias before it waits for the preceding kernels,
provided that every kernel that wrote these has ended. Ordinary kernels (torch's, CuPy's, copies) never let the next
kernel begin early. A product that waits before it reads its weight lets the next kernel begin only after that wait.
(This module cannot see a kernel of another library that writes a weight and lets the next kernel begin before it has
ended: concepts/safety.md.) So a weight may be read early on a stream

- after a launch on that stream, with the same addresses, that waited before it read the weight
  (`WeightHistory.waited`),
- unless a kernel of this library has written to that memory since (`announce_write`) and may still be running, or
  another thread is about to launch such a kernel (a launch that has read early and then finds this out is made again,
  without reading early),
- and unless a call that writes there was under way before that launch: it may have looked for watched weights before
  this one was watched, and may launch its kernel later (`under_way`).

Inside a graph capture nothing has run yet, and a replay waits for what precedes it: a weight may be read early there,
unless it became known, or was written, within the same capture.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from fp8core.core.under_way import Range, is_write_under_way, overlap
from fp8core.core.watched import Watched
from fp8core.runtime import capture, device
from fp8core.target import Target

WEIGHT, SCALE, BIAS = 1, 2, 3
"""The indices, among the operands of a linear layer, of those that are read early."""
CAPTURES_KEPT: Final = 16
"""Captures that the history of a weight remembers: the most that may be under way at a time."""
UNCOUNTED: Final = -1
"""Returned instead of a count of writes while a write that is not announced, and so not counted, is possible."""


class WeightHistory:
    """What a layer knows about the memory of its weight: where it is, and on which streams it may be read early."""

    def __init__(self) -> None:
        self.ranges: tuple[Range, ...] = ()
        self._places: tuple[int, ...] = ()
        """The addresses whose memory is watched."""
        self._waited_with: dict[int, tuple[int, ...]] = {}
        """By stream: the addresses with which a launch on that stream waited, and `writes` before that launch."""
        self._moved_in = 0
        """The capture in which the memory came to be watched; 0 if in none."""
        self._written_in: deque[int] = deque(maxlen=CAPTURES_KEPT)
        """The captures in which kernels of the library wrote to this memory."""
        self.writing: set[int] = set()
        """Calls of the library that are about to launch a kernel that writes to this memory. A launch that waits may be
        made before that kernel."""
        self.writes = 0
        """Counts the beginnings and the ends of such calls."""
        self._announced = False
        """Whether every call that writes to this memory from now on announces it: none began before it was watched."""

    def may_prefetch(self, stream: int, addresses: Sequence[int]) -> bool:
        """Return whether a launch on ``stream`` may read the weight early, given the addresses of its operands."""
        weight, scale, bias = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        if self._waited_with.get(stream) == (weight, scale, bias, self.writes):
            return True
        number = capture_of(stream)
        if not number or self._places != (weight, scale, bias):
            return False
        return number != self._moved_in and number not in self._written_in

    def overtaken(self, stream: int) -> bool:
        """Return whether a launch that read early may follow one that writes, given that a write began meanwhile.

        A launch in a capture follows only launches of the same capture; other launches do not affect its replays.
        """
        number = capture_of(stream)
        return not number or number in self._written_in

    def about_to_wait(self, stream: int, addresses: Sequence[int], spans: Sequence[Range]) -> int:
        """Watch the memory at these addresses before a launch that waits, so that later writes there are announced.

        Returns:
            The count of writes before the launch, to be passed to `waited`; `UNCOUNTED` if a call that is under way may
            still write there without announcing it.
        """
        if self._places != (addresses[WEIGHT], addresses[SCALE], addresses[BIAS]):
            self.move_to(addresses, spans, capture_of(stream))
        writes = self.writes
        if not self._announced:
            with WATCHED.lock.held:
                self._announced = not is_write_under_way(self.ranges)
                if not self._announced:
                    return UNCOUNTED
        return writes

    def waited(self, stream: int, addresses: Sequence[int], spans: Sequence[Range], writes: int) -> None:
        """Note that a launch on ``stream`` waits for everything that precedes it. A launch in a capture does not count.

        Args:
            stream: the stream of the launch.
            addresses: the addresses of a layer's operands.
            spans: where each operand begins and ends, in bytes from its address.
            writes: what `about_to_wait` returned before the launch. A kernel that another thread has launched since
                then may run after it.
        """
        self.about_to_wait(stream, addresses, spans)
        places = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        # PER_THREAD is one handle for the streams of all threads: the next call may be on another of them
        if stream == device.PER_THREAD or self.writing or capture_of(stream):
            return
        with WATCHED.lock.held:
            if self._places == places:  # otherwise another thread has moved the layer
                self._waited_with[stream] = *places, writes  # void once a write begins or ends

    def move_to(self, addresses: Sequence[int], spans: Sequence[Range], capturing: int) -> None:
        """Watch the memory at these addresses; ``capturing`` is the capture that the stream is in, or 0."""
        places = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        if self._places == places:
            return
        reached = [(addresses[at], *spans[at]) for at in (WEIGHT, SCALE, BIAS)]
        with WATCHED.lock.held:
            self._places = ()
            self._announced = False
            self._waited_with.clear()
            self.ranges = tuple((at + start, at + end) for at, start, end in reached if start < end)
            WATCHED.add(self)
            self._moved_in = capturing
            self._places = places  # last: whoever reads it relies on writes being announced

    def write_begins(self, by: int, capturing: int) -> None:
        """Forget the launches that waited, as call ``by`` is about to write here, in a capture or outside (0)."""
        with WATCHED.lock.held:
            self.writing.add(by)
            self.writes += 1
        self._waited_with.clear()
        if capturing and capturing not in self._written_in:
            self._written_in.append(capturing)

    def write_ends(self, by: int) -> None:
        """Note that the write of call ``by`` has been launched, or will not be. May be called twice."""
        with WATCHED.lock.held:
            if by in self.writing:
                self.writes += 1  # first: whoever sees an empty `writing` has to see this count
                self.writing.discard(by)


WATCHED: Final[Watched[WeightHistory]] = Watched()
"""The memory of all weights that may be read early."""


class WriteAnnouncement(list[WeightHistory]):
    """The weights that a call is about to overwrite. It ends with `end`, or when this object is freed.

    So if Ctrl-C ends a call anywhere between announcing and launching, no weight stays announced, which would keep it
    from being read early for ever.
    """

    def end(self) -> None:
        """Note that the call has been launched, or will not be."""
        for history in self:
            history.write_ends(id(self))

    __del__ = end


NO_WEIGHTS: Final = WriteAnnouncement()
"""The announcement of a call that overwrites no weight."""


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is in, or 0."""
    found = capture.info(stream) if device.capturing(stream) else None
    return 0 if found is None else found.id


def applies(target: Target) -> bool:
    """Return whether kernels of a device can begin before their predecessor has ended."""
    return target.platform == "cuda" and target.arch >= 90


def announce_write(written: Sequence[Range], stream: int) -> WriteAnnouncement:
    """Announce a write: return the weights in the written memory that could be read early, and that now have to wait.

    The caller calls `end` of the returned object once the launch has been made, or has failed.

    Args:
        written: the memory that the launch writes.
        stream: the stream of the launch.
    """
    histories = WATCHED.owners_reached_by(written) if WATCHED.starts else []
    if not histories:
        return NO_WEIGHTS
    found, capturing = WriteAnnouncement(), capture_of(stream)
    for history in histories:
        if overlap(written, history.ranges):
            found.append(history)
            history.write_begins(id(found), capturing)
    return found
