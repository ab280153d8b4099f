"""Keeps the owners of memory that the device still uses, and drops them on a thread once the device is done."""

import atexit
import ctypes
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

from fp8core.interrupts import interrupts_wait
from fp8core.runtime import capture, device, streams

_LOG: Final = logging.getLogger("fp8core")
FIRST_PAUSE: Final = 50e-6
"""Seconds until the thread polls again. Each pause is 1.5 times the one before, so that the thread is late by at most
half of the time waited."""
LONGEST_PAUSE: Final = 2e-3
STOP_SECONDS: Final = 5.0
_LEAKED: Final[list[object]] = []
"""Objects that must never be freed: their destructors would call a driver that cannot be used in a forked child."""


class _Item(NamedTuple):
    owner: object
    passed: Callable[[], bool] | None
    begin: Callable[[], Callable[[], bool]] | None
    ordinal: int | None
    key: object


class Releases:
    """A queue of owners, each kept until a query returns true.

    `add` and `after` may be called in destructors, on any thread, and may interrupt each other: ``queue.SimpleQueue``
    allows that. Everything else happens on one thread and needs no locks. The thread starts with `start`, sleeps while
    nothing is kept, and ends before the interpreter does. What is still kept then is never freed.
    """

    def __init__(self) -> None:
        self._ended = False
        self._new()
        os.register_at_fork(after_in_child=self._forked)  # in the constructor: a fork may come during `start`

    def _new(self) -> None:
        self._starting = threading.Lock()
        self._inbox: queue.SimpleQueue[_Item | threading.Event | None] = queue.SimpleQueue()
        self._keeper = _Keeper()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread if there is none. Not for destructors: a thread cannot be started everywhere.

        The caller that gets the lock starts the thread. Others do not wait for it: their owners wait in the queue. One
        of them may be a destructor that the garbage collector runs on this same thread during the start.

        Where no thread can be started, as there are too many or the interpreter is about to end (Python 3.12), owners
        wait in the queue, too: for the next start, or for good.
        """
        starting = self._starting  # a fork meanwhile replaces the attribute
        if not self._lacks_a_thread() or not starting.acquire(blocking=False):
            return
        try:
            if self._lacks_a_thread():
                arguments = (self._inbox, self._keeper)
                thread = threading.Thread(target=_run, args=arguments, name="fp8core releases", daemon=True)
                with interrupts_wait():  # between these steps, Ctrl-C would let the next call start a second thread
                    thread.start()
                    self._thread = thread
                    atexit.register(self._stop)
        except RuntimeError as error:
            _LOG.warning("operands are kept until a thread can be started: %s", error)
            _keep_beyond_teardown(self._inbox)
        finally:
            starting.release()

    def _lacks_a_thread(self) -> bool:
        return self._thread is None and not self._ended

    def keep(self, owner: object, stream: int, ordinal: int) -> None:
        """Keep ``owner`` until a stream of device ``ordinal`` has passed this point.

        A captured stream runs nothing now, and its graph may be launched at any time: then nothing is kept, and the
        caller has to keep the memory.
        """
        self.start()
        self.add(owner, passed_query(stream, ordinal), ordinal, (ordinal, stream))

    def add(
        self, owner: object, passed: Callable[[], bool] | None, ordinal: int | None = None, key: object = None
    ) -> None:
        """Keep ``owner`` until ``passed()`` returns true; without a query it is not kept.

        Args:
            owner: the object to keep; the thread drops it.
            passed: a query that the thread calls repeatedly.
            ordinal: the device that has to be current during the query.
            key: queries with the same key, such as those about one stream, become true in the order of their calls,
                so that only the first of them is called.
        """
        if passed is not None:
            self._inbox.put(_Item(owner, passed, None, ordinal, key))

    def after(self, owner: object, begin: Callable[[], Callable[[], bool]]) -> None:
        """Keep ``owner`` until an operation that starts after this call has ended.

        ``begin()`` starts an operation, on the thread, and returns a query whether it has ended. At most one operation
        is in flight for each ``begin``; it serves all owners that were added before it started.
        """
        self._inbox.put(_Item(owner, None, begin, None, begin))

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` until everything kept before this call is dropped; return whether it is."""
        self.start()
        empty = threading.Event()
        self._inbox.put(empty)
        return empty.wait(seconds)

    def _stop(self) -> None:
        self._ended = True  # first, so that no other thread is started
        thread, self._thread = self._thread, None
        if thread is not None:
            self._inbox.put(None)
            thread.join(STOP_SECONDS)
            _keep_beyond_teardown(self._inbox, self._keeper)

    def _forked(self) -> None:
        """Start with an empty queue in the child of a fork, where the thread does not exist and no owner can be freed.

        The parent may have been in any state: starting the thread, or with owners in the queue before a start.
        """
        _LEAKED.extend((self._inbox, self._keeper))
        self._new()
        atexit.unregister(self._stop)


def passed_query(stream: int, ordinal: int) -> Callable[[], bool] | None:
    """Return `streams.event_query`; if that fails, a query that fails, so that its owner is kept for good."""
    try:
        return streams.event_query(stream, ordinal)
    except Exception as error:  # noqa: BLE001 - whatever it is, the memory may be in use
        return partial(_raise, error)


def _raise(error: Exception) -> bool:
    raise error


def _keep_beyond_teardown(*objects: object) -> None:
    """Keep objects beyond the teardown of this module, at which they would free what they hold."""
    for one in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))


class _Keeper:
    """The owners that the thread keeps, and their queries."""

    def __init__(self) -> None:
        self._kept: dict[object, deque[tuple[_Item, list[object]]]] = {}
        self._beginning: dict[Callable[[], Callable[[], bool]], list[_Item]] = {}
        self._stuck: list[object] = []
        self._ordinal: int | None = None
        self._relaxed = False

    def add(self, item: _Item) -> None:
        if item.begin is not None:
            self._beginning.setdefault(item.begin, []).append(item)
        else:
            self._kept.setdefault(item.key, deque()).append((item, [item.owner]))

    def __len__(self) -> int:
        return len(self._kept) + len(self._beginning)

    def sweep(self) -> bool:
        """Drop owners that the device is done with, and start operations; return whether there was any."""
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
                self._relax()
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
        """Keep owners for good if their query fails: dropping them could free memory that is in use."""
        self._stuck.extend(owners)
        _LOG.error(  # not a warning: warnings turned into errors would end the thread
            "cannot tell whether the device still uses %d operands, so they are never freed: %s", len(owners), error
        )

    def _use(self, ordinal: int | None) -> None:
        """Make a device current."""
        if ordinal is not None and ordinal != self._ordinal:
            self._relax()
            device.make_current(ordinal)
            self._ordinal = ordinal

    def _relax(self) -> None:
        """Enter the relaxed capture mode: operations and queries would otherwise invalidate others' captures."""
        if not self._relaxed and device.count():
            capture.exchange(capture.RELAXED)
            self._relaxed = True


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
            del item  # or this variable would keep the last owner alive
            if not inbox.empty():
                continue
        if keeper.sweep():
            pause = FIRST_PAUSE
        if not len(keeper):
            while empty:
                empty.pop().set()


_OF_PROCESS: Final = Releases()  # made at import, so that concurrent threads cannot make two


def releases() -> Releases:
    """Return the queue of this process."""
    return _OF_PROCESS
