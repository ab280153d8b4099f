"""Locks that can be used after a fork: the child has only one thread, so nobody could release other threads' locks."""

import os
from threading import RLock


class ForkSafeLock:
    """A re-entrant lock that is free again in the child of a fork: ``with lock.held: ...``.

    It is re-entrant because garbage collection may run code in the same thread that takes it again. ``with`` enters
    the RLock and not this class: Ctrl-C could interrupt an ``__enter__`` written in Python after it has taken the lock
    and before it returns.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.held = RLock()
