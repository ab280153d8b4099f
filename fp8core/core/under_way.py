"""Which calls are under way: asked of the threads' frames where that is rare, so that calls need not note it."""

import sys
from threading import get_ident
from types import CodeType, FrameType
from typing import Final

_CALLS: Final[dict[int, tuple[CodeType, bool]]] = {}
"""By number: the code of functions that make calls, and whether these may write to memory of their callers'."""


def makes_calls(code: CodeType, writes: bool) -> None:
    """Let `amid_writes` know a function that looks for weights in what a call writes, and launches the call.

    Args:
        code: the function's.
        writes: whether it may write to what other threads know already, and not to new memory alone.
    """
    _CALLS[id(code)] = code, writes


def amid_writes() -> bool:
    """Return whether calls that may write to memory of their callers' are under way, but for that which asks."""
    own = get_ident()
    return any(_amid(frame, thread == own) for thread, frame in sys._current_frames().items())


def _amid(innermost: FrameType, asks: bool) -> bool:
    """Return whether a thread is amid a call that may write, of which the innermost may be the one that asks."""
    frame: FrameType | None = innermost
    del innermost  # a frame that had itself among its variables would keep all that its callers have
    while frame is not None:
        known = _CALLS.get(id(frame.f_code))
        if known is not None:
            if known[1] and not asks:
                return True
            asks = False
        frame = frame.f_back
    return False
