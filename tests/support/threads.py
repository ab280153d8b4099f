"""Runs functions that might wait forever on a thread that does not outlive the tests."""

from collections.abc import Callable
from threading import Thread
from typing import Any


def in_time(function: Callable[..., Any], *args: Any) -> None:
    """Call a function on its own thread; raises AssertionError if it has not returned after 30 seconds."""
    thread = Thread(target=function, args=args, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
