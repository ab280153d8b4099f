"""Finds the memory that calls under way may write, from the stack frames of all threads.

This is needed rarely; reading the frames then saves every call from recording what it writes.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any, Final

Range = tuple[int, int]
"""The first address, and the one after the last."""
Written = Callable[[Mapping[str, Any]], Iterable[Range]]
"""Takes the local variables of a function that makes a call, and returns the address ranges of the caller's arrays that
it writes. Raises KeyError if the call has not yet looked for watched weights in them."""

_CALLS: Final[dict[int, tuple[CodeType, Written]]] = {}
"""By the id of the code object: the code of each function that makes calls, and the function that returns what it
writes. The code object is kept so that its id stays unique."""


def overlap(some: Iterable[Range], others: Sequence[Range]) -> bool:
    """Return whether one of ``some`` has a byte in common with one of ``others``."""
    return any(a < end and start < b for a, b in some for start, end in others)


def register(code: CodeType, written: Written) -> None:
    """Register a function that looks for watched weights in what a call writes, and then makes the launch."""
    _CALLS[id(code)] = code, written


def is_write_under_way(ranges: Sequence[Range]) -> bool:
    """Return whether a call is under way that may write to an array of its caller within ``ranges``."""
    return any(_is_in_write(frame, ranges) for frame in sys._current_frames().values())


def _is_in_write(innermost: FrameType, ranges: Sequence[Range]) -> bool:
    """Return whether a thread is in such a call."""
    frame: FrameType | None = innermost
    del innermost  # a frame that refers to itself would keep the variables of all its callers alive
    while frame is not None:
        known = _CALLS.get(id(frame.f_code))
        if known is not None and _reaches(known[1], frame.f_locals, ranges):
            return True
        frame = frame.f_back
    return False


def _reaches(written: Written, variables: Mapping[str, Any], ranges: Sequence[Range]) -> bool:
    try:
        return overlap(written(variables), ranges)
    except KeyError:
        return False
