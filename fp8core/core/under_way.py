"""What calls under way may write: asked of the threads' frames where that is rare, so that calls need not note it."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, Final

Range = tuple[int, int]
"""The first address, and the one behind the last."""
Written = Callable[[Mapping[str, Any]], Iterable[Range]]
"""Takes the variables of a function that makes a call, and returns the memory of its caller's that it writes. It raises
KeyError while the call has not yet got as far as to look for weights there."""

_CALLS: Final[dict[int, tuple[CodeType, Written]]] = {}
"""By number: the code of functions that make calls, and what these write."""


def makes_calls(code: CodeType, written: Written) -> None:
    """Let `amid_write` know a function that looks for weights in what a call writes, and launches the call."""
    _CALLS[id(code)] = code, written


def amid_write(ranges: Sequence[Range]) -> bool:
    """Return whether a call is under way that may write to memory of its caller's in one of some ranges.

    That which asks does not count.
    """
    own = get_ident()
    return any(_amid(frame, thread == own, ranges) for thread, frame in sys._current_frames().items())


def _amid(innermost: FrameType, asks: bool, ranges: Sequence[Range]) -> bool:
    """Return whether a thread is amid such a call; the innermost of its calls may be the one that asks."""
    frame: FrameType | None = innermost
    del innermost  # a frame that had itself among its variables would keep all that its callers have
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
