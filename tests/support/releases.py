"""Owners that say when they are dropped, and streams that pass when they are told to."""

import threading
import weakref

import pytest

from fp8core.runtime import releases

SECONDS = 30.0
"""Enough on any machine; no test waits so long unless it fails."""


class Owner:
    """Memory that notes when it is freed, and whether the device was done with it then."""

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


class Stream:
    """A stand-in for a stream: work is numbered, and has ended up to ``done``."""

    def __init__(self):
        self.lock = threading.Lock()
        self.submitted = self.done = 0
        self.asked = threading.Semaphore(0)

    def submit(self):
        with self.lock:
            self.submitted += 1
            return self.submitted

    def advance(self, behind):
        """End the work but for the last ``behind``."""
        with self.lock:
            self.done = max(self.done, self.submitted - behind)

    def query(self, ticket):
        """Return a question whether the work of a number has ended."""

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
