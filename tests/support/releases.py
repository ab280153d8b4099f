"""Owners of memory that record when they are freed, and stand-ins for streams that advance on request."""

import gc
import threading
import weakref

import pytest

from fp8core.runtime import releases

SECONDS = 30.0
"""A timeout that suffices on any machine; only failing tests wait so long."""


class Owner:
    """Memory that records when it is freed, and whether the device still used it then."""

    def __init__(self, stream=None):
        self.stream = stream
        self.ticket = stream.submit() if stream else 0
        self.freed = threading.Event()
        self.early = []
        weakref.finalize(self, _freed, self.freed, self.early, stream, self.ticket)


def _freed(freed, early, stream, ticket):
    if stream is not None and stream.done < ticket:
        early.append(ticket)
    freed.set()


def owners():
    """Return all owners that are alive after a garbage collection, including those that other tests keep."""
    gc.collect()
    return [thing for thing in gc.get_objects() if type(thing) is Owner]


class Stream:
    """A stand-in for a stream: work is numbered, and has completed up to ``done``."""

    def __init__(self):
        self.lock = threading.Lock()
        self.submitted = self.done = 0
        self.asked = threading.Semaphore(0)

    def submit(self):
        with self.lock:
            self.submitted += 1
            return self.submitted

    def advance(self, behind):
        """Complete all work except the last ``behind``."""
        with self.lock:
            self.done = max(self.done, self.submitted - behind)

    def query(self, ticket):
        """Return a function that returns whether the work with this number has completed."""

        def passed():
            answer = self.done >= ticket
            self.asked.release()
            return answer

        return passed

    def was_asked(self, times):
        return all(self.asked.acquire(timeout=SECONDS) for _ in range(times))


@pytest.fixture
def kept():
    queue = releases.Releases()
    queue.start()
    yield queue
    queue._stop()
