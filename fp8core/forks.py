"""Locks that survive a fork: its child has one thread, and none that could release what others of the parent held."""

import os
from threading import RLock


class ForkSafeLock:
    """A re-entrant lock that is free again in the child of a fork: ``with lock.held: ...``.

    A collection of garbage within may come back to it, in the same thread. What enters ``with`` is the RLock and not
    this class: Ctrl-C may end a method written in Python after it has taken a lock and before it returns.
    """

    __slots__ = ("held",)

    def __init__(self) -> None:
        self._begin()
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self.held = RLock()
