"""Owners of memory that the device still uses: dropped by a thread of its own as soon as the device is done with it."""

import atexit
import ctypes
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from fp8core.runtime import capture, device, streams

_LOG: Final = logging.getLogger("fp8core")
FIRST_PAUSE: Final = 50e-6
"""Seconds until the thread asks again; each next pause is longer by half, so that it is late by half of the wait."""
LONGEST_PAUSE: Final = 2e-3
STOP_SECONDS: Final = 5.0
_LEAKED: Final[list[object]] = []
"""What must not be destroyed any more: its destructors would call a driver that is not there."""


class _Item(NamedTuple):
    owner: object
    passed: Callable[[], bool] | None
    begin: Callable[[], Callable[[], bool]] | None
    ordinal: int | None
    key: object


class Releases:
    """A queue of owners, each kept until a question is answered with yes.

    `add` and `after` may be called in destructors, on any thread and at any point of another call of them: a
    ``queue.SimpleQueue`` is made for that. All else happens on the one thread, which needs no locks then. It starts
    with `start`, sleeps while nothing is kept, and ends before the interpreter does; what is kept then stays.
    """

    def __init__(self) -> None:
        self._ended = False
        self._new()
        os.register_at_fork(after_in_child=self._forked)  # here: a fork may come while the thread is being started

    def _new(self) -> None:
        self._starting = threading.Lock()
        self._inbox: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._keeper = _Keeper()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if there is none: not in a destructor, as a thread cannot be started everywhere.

        Whoever takes the lock starts it. Others do not wait: what they hand over waits for the thread, and one of them
        may be a destructor that runs amid the start, by a collection of garbage in the same thread.
        """
        starting = self._starting  # a fork within makes another one
        if not self._lacks_a_thread() or not starting.acquire(blocking=False):
            return
        try:
            if self._lacks_a_thread():
                arguments = (self._inbox, self._keeper)
                thread = threading.Thread(target=_run, args=arguments, name="fp8core releases", daemon=True)
                thread.start()
                self._thread = thread
                atexit.register(self._stop)
        finally:
            starting.release()

    def _lacks_a_thread(self) -> bool:
        return self._thread is None and not self._ended

    def keep(self, owner: object, stream: int, ordinal: int) -> None:
        """Keep ``owner`` until a stream of device ``ordinal`` has come past this point.

        A stream that is captured into a graph does nothing now, and its graph may be launched at any time: then
        nothing is kept, and the memory has to be the caller's.
        """
        self.start()
        self.add(owner, streams.event_query(stream, ordinal), ordinal, (ordinal, stream))

    def add(
        self, owner: object, passed: Callable[[], bool] | None, ordinal: int | None = None, key: object = None
    ) -> None:
        """Keep ``owner`` until ``passed()`` says yes; without a question it is not kept.

        Args:
            owner: what is dropped then, on the thread.
            passed: asked on the thread, again and again.
            ordinal: the device that has to be current for it.
            key: questions of one key, as those about one stream, are answered in the order of their calls: only the
                first is asked.
        """
        if passed is not None:
            self._inbox.put(_Item(owner, passed, None, ordinal, key))

    def after(self, owner: object, begin: Callable[[], Callable[[], bool]]) -> None:
        """Keep ``owner`` until an operation that starts after this call has ended.

        ``begin()`` starts one, on the thread, and returns the question whether it has ended. One is in flight for
        equal ``begin``, and stands for all owners that came before it started.
        """
        self._inbox.put(_Item(owner, None, begin, None, begin))

    def wait(self, seconds: float) -> bool:
        """Return whether all that was kept before this call has been dropped, after at most so many seconds."""
        self.start()
        empty = threading.Event()
        self._inbox.put(empty)
        return empty.wait(seconds)

    def _stop(self) -> None:
        self._ended = True  # first: nobody is to start another one
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join(STOP_SECONDS)
            for kept in (self._inbox, self._keeper):  # beyond the teardown of this module
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _forked(self) -> None:
        """Begin anew in the child of a fork, where neither the thread nor what it keeps can be used.

        Whatever the parent was about to do: it may have been starting the thread, or have put owners into the queue
        before it.
        """
        _LEAKED.extend((self._inbox, self._keeper))
        self._new()
        atexit.unregister(self._stop)


class _Keeper:
    """What the thread keeps, and how it asks."""

    def __init__(self) -> None:
        self._kept: dict[object, deque[tuple[_Item, list[object]]]] = {}
        self._beginning: dict[Callable[[], Callable[[], bool]], list[_Item]] = {}
        self._stuck: list[object] = []
        self._ordinal: int | None = None

    def add(self, item: _Item) -> None:
        if item.begin is not None:
            self._beginning.setdefault(item.begin, []).append(item)
        else:
            self._kept.setdefault(item.key, deque()).append((item, [item.owner]))

    def __len__(self) -> int:
        return len(self._kept) + len(self._beginning)

    def sweep(self) -> bool:
        """Drop what the device is done with, and start what has to be; return whether anything moved."""
        moved = self._begin()
        for key, waiting in list(self._kept.items()):
            while waiting and self._answer(waiting[0]):
                waiting.popleft()
                moved = True
            if not waiting:
                del self._kept[key]
        return moved

    def _begin(self) -> bool:
        moved = False
        for begin in [begin for begin in self._beginning if begin not in self._kept]:
            items = self._beginning.pop(begin)
            try:
                passed = begin()
            except Exception as error:  # noqa: BLE001 - whatever it is, the memory may be in use
                self._stick(items, error)
                continue
            owners: list[object] = [item.owner for item in items]
            self._kept[begin] = deque([(items[0]._replace(owner=None, passed=passed), owners)])
            moved = True
        return moved

    def _answer(self, entry: tuple[_Item, list[object]]) -> bool:
        item, owners = entry
        assert item.passed is not None
        try:
            self._use(item.ordinal)
            return bool(item.passed())
        except Exception as error:  # noqa: BLE001 - whatever it is, the memory may be in use
            self._stick(owners, error)
            return True

    def _stick(self, owners: list[Any], error: Exception) -> None:
        """Keep for good what cannot be asked about: dropping it could give away memory that is in use."""
        self._stuck.extend(owners)
        _LOG.error(  # a warning that is made an error would end the thread
            "it is not known whether the device still uses %d operands, which are kept for good: %s", len(owners), error
        )

    def _use(self, ordinal: int | None) -> None:
        """Make a device current, and let this thread ask while others capture: it would end their captures."""
        if ordinal is not None and ordinal != self._ordinal:
            if self._ordinal is None:
                capture.exchange(capture.RELAXED)
            device.bind(ordinal)
            self._ordinal = ordinal


def _run(inbox: queue.SimpleQueue[Any], keeper: _Keeper) -> None:
    pause = FIRST_PAUSE
    empty: list[threading.Event] = []
    while True:
        try:
            item = inbox.get(timeout=pause if len(keeper) else None)
        except queue.Empty:
            pause = min(pause * 1.5, LONGEST_PAUSE)
        else:
            if item is None:
                return
            if isinstance(item, threading.Event):
                empty.append(item)
            else:
                keeper.add(item)
                pause = FIRST_PAUSE
            del item  # the last owner, too, is dropped when its turn comes
            if not inbox.empty():
                continue
        if keeper.sweep():
            pause = FIRST_PAUSE
        if not len(keeper):
            while empty:
                empty.pop().set()


_OF_PROCESS: Final = Releases()  # made here, as threads that ask for it at a time must not get one each


def releases() -> Releases:
    """Return the queue of this process."""
    return _OF_PROCESS
