"""Holds back Ctrl-C while something is registered that cannot be registered again."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold back SIGINT during a block. Only the main thread gets it, and only it may set handlers."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is None or current_thread() is not main_thread():  # None is a handler in C, which cannot be restored
        yield
        return
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append(True))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)
