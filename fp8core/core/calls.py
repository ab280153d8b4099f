"""Calls seen before: what the facade has checked once it does not check again for arrays that look the same."""

from typing import Any, Final, Generic, TypeVar
from weakref import WeakSet

C = TypeVar("C")

CALLS_KEPT: Final = 8192
"""A server meets a new m with every batch: past this many calls the memory starts anew."""


class Calls(Generic[C]):
    """Prepared calls by everything that was checked for them: how operands look, and the other arguments."""

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...] | None, C] = {}
        _ALL.add(self)

    def forget(self) -> None:
        """Let every call be prepared anew."""
        self._calls.clear()

    def get(self, key: tuple[Any, ...] | None) -> C | None:
        """Return the call prepared for ``key``; None if there is none, or if the key cannot be hashed."""
        try:
            return self._calls.get(key)
        except TypeError:  # a list for a group shape, say: the long way takes it
            return None

    def keep(self, key: tuple[Any, ...] | None, call: C) -> None:
        """Keep ``call`` under ``key``, if there is one."""
        if key is None:
            return
        if len(self._calls) >= CALLS_KEPT:
            self._calls.clear()
        try:
            self._calls[key] = call
        except TypeError:
            return


_ALL: Final[WeakSet[Calls[Any]]] = WeakSet()


def forget() -> None:
    """Let every call of every operation be prepared anew, as what runs a problem has changed."""
    for calls in list(_ALL):
        calls.forget()
