"""Holds back Ctrl-C while something is registered that cannot be registered again."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Hold back SIGINT during a block. Only the main thread gets it, and only it may set handlers.

    A process that another thread forks meanwhile has no such block: there, SIGINT has its usual effect.
    """
    usual, process = signal.getsignal(signal.SIGINT), os.getpid()
    if usual is None or current_thread() is not main_thread():  # None is a handler in C, which cannot be restored
        yield
        return
    came = []

    def hold(*_: object) -> None:
        if os.getpid() == process:
            came.append(True)
        else:  # in a child of a fork, where nothing else restores the handler
            signal.signal(signal.SIGINT, usual)
            signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)
