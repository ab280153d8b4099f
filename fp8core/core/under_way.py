"""Finds the memory that calls under way may write, from the stack frames of all threads.

This is needed rarely; reading the frames then saves every call from recording what it writes.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
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


def register(code: CodeType, written: Written) -> None:
    """Register a function that looks for watched weights in what a call writes, and then makes the launch."""
    _CALLS[id(code)] = code, written


def is_write_under_way(ranges: Sequence[Range]) -> bool:
    """Return whether another call is under way that may write to an array of its caller within ``ranges``.

    The call that asks, the innermost one of the current thread, does not count.
    """
    own = get_ident()
    return any(_is_in_write(frame, thread == own, ranges) for thread, frame in sys._current_frames().items())


def _is_in_write(innermost: FrameType, asks: bool, ranges: Sequence[Range]) -> bool:
    """Return whether a thread is in such a call; with ``asks`` the innermost of its calls is the one that asks."""
    frame: FrameType | None = innermost
    del innermost  # a frame that refers to itself would keep the variables of all its callers alive
    while frame is not None:
        known = _CALLS.get(id(frame.f_code))
        if known is not None:
            if not asks and _reaches(known[1], frame.f_locals, ranges):
                return True
            asks = False
        frame = frame.f_back
    return False


def _reaches(written: Written, variables: Mapping[str, Any], ranges: Sequence[Range]) -> bool:
    try:
        return any(a < end and start < b for a, b in written(variables) for start, end in ranges)
    except KeyError:
        return False
