"""Which weights may be read early: before the launch's predecessor on its stream has ended.

Kernels of sm_90 and later let their successor on the stream begin while they still run (programmatic dependent launch).
A product may then read its weight, the weight's scale and the bias before it waits for its predecessors, if all that
wrote them has ended. Ordinary kernels (torch's, CuPy's, copies) never let the successor begin early, and neither does a
product that waits before it reads its weight: it does so only after that wait. (A kernel of another library that writes
a weight and lets its successor begin before it has ended cannot be seen from here: concepts/safety.md.) So a weight may
be read early on a stream

- after one launch there that did not (`WeightHistory.waited`), with the same addresses,
- unless the library's own kernels have written to that memory since (`overwrites`), which they may still be doing, or
  another thread is about to launch one that will (a launch that reads early and finds this out once it has been made
  is made again, late),
- and unless a call that writes there was under way before that launch: it may have looked for weights when this one was
  not watched yet, and be launched after it (`under_way`);

and inside a graph capture, where nothing has run yet and a replay waits for what precedes it, unless the weight became
known, or was written, within the same capture.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

from fp8core.core.under_way import Range, amid_write
from fp8core.core.watched import Watched
from fp8core.problem import Target
from fp8core.runtime import capture, device

WEIGHT, SCALE, BIAS = 1, 2, 3
"""The places of what is read early among the operands of a linear layer."""
CAPTURES_KEPT: Final = 16
"""Captures that are remembered of a weight; as many may be under way at a time."""
UNHEARD: Final = -1
"""In the place of a count of writes: not all of them are known to be counted."""


class WeightHistory:
    """What a layer knows of its weight's memory: where it is, and on which streams it may be read early."""

    def __init__(self) -> None:
        self.ranges: tuple[Range, ...] = ()
        self._places: tuple[int, ...] = ()
        """The addresses whose memory is watched."""
        self._waited_with: dict[int, tuple[int, ...]] = {}
        """By stream: the addresses with which a launch there waited, and the count of writes before it."""
        self._known_in = 0
        """The capture in which the addresses became known."""
        self._written_in: deque[int] = deque(maxlen=CAPTURES_KEPT)
        """The captures in which kernels of the library wrote there."""
        self.writing: set[int] = set()
        """Calls of the library that are about to launch what writes there: a launch that waits may come before it."""
        self.writes = 0
        """Counts the beginnings and the ends of such calls."""
        self._heard = False
        """Whether every call that writes there now finds it watched."""

    def may_prefetch(self, stream: int, addresses: Sequence[int]) -> bool:
        """Return whether a launch on ``stream`` may read the weight at these addresses of a layer's operands early."""
        weight, scale, bias = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        if self._waited_with.get(stream) == (weight, scale, bias, self.writes):
            return True
        number = capture_of(stream)
        if not number or self._places != (weight, scale, bias):
            return False
        return number != self._known_in and number not in self._written_in

    def overtaken(self, stream: int) -> bool:
        """Return whether a launch that reads early may follow one that writes, where a write began meanwhile.

        A launch in a capture follows those of the same capture only: others do not concern its replays.
        """
        number = capture_of(stream)
        return not number or number in self._written_in

    def watch(self, stream: int, addresses: Sequence[int], spans: Sequence[Range]) -> int:
        """Watch the memory at these addresses before a launch waits: what writes there later on is announced.

        Returns:
            The count of writes before the launch, for `waited`; `UNHEARD` if a call may still write unannounced.
        """
        if self._places != (addresses[WEIGHT], addresses[SCALE], addresses[BIAS]):
            self.know(addresses, spans, capture_of(stream))
        writes = self.writes
        if not self._heard:
            with WATCHED.lock.held:
                self._heard = not amid_write(self.ranges)
                if not self._heard:
                    return UNHEARD
        return writes

    def waited(self, stream: int, addresses: Sequence[int], spans: Sequence[Range], writes: int) -> None:
        """Note that a launch on ``stream`` has waited for all that precedes it; in a capture it has not run.

        Args:
            stream: its stream.
            addresses: of a layer's operands.
            spans: where each of them begins and ends, in bytes from its address.
            writes: what `watch` returned before the launch. What another thread launches meanwhile may be behind it.
        """
        self.watch(stream, addresses, spans)
        places = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        if stream == device.PER_THREAD or self.writing or capture_of(stream):  # the next call's may be another stream
            return
        with WATCHED.lock.held:
            if self._places == places:  # or else another thread has moved the layer
                self._waited_with[stream] = *places, writes  # which says nothing once a write has begun or ended

    def know(self, addresses: Sequence[int], spans: Sequence[Range], number: int) -> None:
        """Watch the memory at these addresses; ``number`` is that of the capture under way, or 0."""
        places = addresses[WEIGHT], addresses[SCALE], addresses[BIAS]
        if self._places == places:
            return
        reached = [(addresses[at], *spans[at]) for at in (WEIGHT, SCALE, BIAS)]
        with WATCHED.lock.held:
            self._places = ()
            self._heard = False
            self._waited_with.clear()
            self.ranges = tuple((at + start, at + end) for at, start, end in reached if start < end)
            WATCHED.add(self)
            self._known_in = number
            self._places = places  # at last: who finds these relies on being told of writes

    def reached_by(self, ranges: Sequence[Range]) -> bool:
        """Return whether one of ``ranges`` overlaps the layer's."""
        return any(a < end and start < b for a, b in ranges for start, end in self.ranges)

    def overwritten(self, number: int, by: int) -> None:
        """Forget what waited, as call ``by`` is about to write there in capture ``number``, or in none: 0."""
        with WATCHED.lock.held:
            self.writing.add(by)
            self.writes += 1
        self._waited_with.clear()
        if number and number not in self._written_in:
            self._written_in.append(number)

    def wrote(self, by: int) -> None:
        """Note that what `overwritten` announced has been launched, or will not be. Once more does no harm."""
        with WATCHED.lock.held:
            if by in self.writing:
                self.writes += 1  # first: who finds nobody writing has to find this count
                self.writing.discard(by)


WATCHED: Final[Watched[WeightHistory]] = Watched()
"""The memory of all weights that may be read early."""


class Announced(list[WeightHistory]):
    """The weights that a call is about to write over. It ends when that is told, or when nobody has it any more.

    So a call that Ctrl-C ends anywhere between announcing and launching leaves no weight that is waited for ever after.
    """

    def end(self) -> None:
        """Note that the call has been launched, or will not be."""
        for history in self:
            history.wrote(id(self))

    __del__ = end


NOTHING: Final = Announced()
"""What a call announces that writes over no weight."""


def capture_of(stream: int) -> int:
    """Return the number of the capture that a stream is in, or 0."""
    found = capture.info(stream) if device.capturing(stream) else None
    return 0 if found is None else found.id


def applies(target: Target) -> bool:
    """Return whether kernels of a device can begin before their predecessor has ended."""
    return target.platform == "cuda" and target.arch >= 90


def overwrites(written: Sequence[Range], stream: int) -> Announced:
    """Return the weights that may be read early and that a launch of the library writes to; they are read late now.

    What is returned is to be told its `end` once the launch has been made, or has failed.

    Args:
        written: the memory that the launch writes.
        stream: the stream that it is about to be made on.
    """
    histories = WATCHED.among(written) if WATCHED.starts else []
    if not histories:
        return NOTHING
    found, number = Announced(), capture_of(stream)
    for history in histories:
        if history.reached_by(written):
            found.append(history)
            history.overwritten(number, id(found))
    return found
