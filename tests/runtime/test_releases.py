"""What outlives a call: never dropped early, by many threads neither, and dropped as soon as the device is done."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fp8core.interop import dlpack_capsule, jax_arrays
from fp8core.runtime import capture, device, releases, streams

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


def test_an_owner_is_kept_until_its_stream_has_passed_and_dropped_then_without_another_call(kept):
    stream = Stream()
    owner = Owner(stream)
    freed, early = owner.freed, owner.early
    kept.add(owner, stream.query(owner.ticket))
    del owner
    assert stream.was_asked(5)
    gc.collect()
    assert not freed.is_set()
    stream.done = 1
    assert freed.wait(SECONDS)
    assert not early


def test_what_is_captured_is_not_kept(kept):
    owner = Owner()
    freed = owner.freed
    kept.add(owner, None)
    del owner
    assert freed.is_set()


def test_streams_are_asked_apart_and_each_in_its_order(kept):
    slow, fast = Stream(), Stream()
    first, other = Owner(slow), [Owner(fast) for _ in range(3)]
    signs = [owner.freed for owner in other]
    kept.add(first, slow.query(first.ticket), key="slow")
    for owner in other:
        kept.add(owner, fast.query(owner.ticket), key="fast")
    held = first.freed
    del first, owner
    other.clear()
    fast.done = 2
    assert signs[0].wait(SECONDS)
    assert signs[1].wait(SECONDS)
    assert slow.was_asked(2)
    assert not signs[2].is_set()
    assert not held.is_set()
    fast.done, slow.done = 3, 1
    assert signs[2].wait(SECONDS)
    assert held.wait(SECONDS)


def test_many_threads_lose_nothing_and_free_nothing_early(kept):
    streams = [Stream() for _ in range(3)]
    early, count = [], 300

    def work(number):
        stream = streams[number % 3]
        for _ in range(count):
            owner = Owner(stream)
            owner.early = early
            weakref.finalize(owner, _freed, threading.Event(), early, stream, owner.ticket)
            kept.add(owner, stream.query(owner.ticket), key=number)
            del owner
            if stream.submitted % 7 == 0:
                stream.advance(5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert not kept._keeper._stuck
    for stream in streams:
        stream.done = stream.submitted
    assert kept.wait(SECONDS)
    assert not early
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Owner]


def test_owners_may_come_from_destructors_within_a_collection(kept):
    """A collection may run anywhere, also within a call that hands over another owner."""

    class Cycle:
        def __init__(self, stream):
            self.me, self.owner = self, Owner(stream)
            self.stream = stream

        def __del__(self):
            kept.add(self.owner, self.stream.query(self.owner.ticket))

    stream = Stream()
    for _ in range(200):
        Cycle(stream)
        kept.add(None, stream.query(0))
        gc.collect(0)
    gc.collect()
    stream.done = stream.submitted
    assert kept.wait(SECONDS)
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) is Owner]


def test_what_cannot_be_asked_about_is_kept_and_the_thread_goes_on(kept, caplog):
    def broken():
        raise RuntimeError("an illegal memory access was encountered")

    lost, fine = Owner(), Owner()
    gone, freed = lost.freed, fine.freed
    kept.add(lost, broken)
    del lost
    kept.add(fine, lambda: True)
    del fine
    assert freed.wait(SECONDS)
    assert kept.wait(SECONDS)
    assert not gone.is_set()
    assert "illegal memory access" in caplog.text


def test_the_thread_asks_on_the_device_and_does_not_disturb_captures(kept, monkeypatch):
    seen = []
    monkeypatch.setattr(capture, "exchange", lambda mode: seen.append(("mode", mode)))
    monkeypatch.setattr(device, "bind", lambda ordinal: seen.append(("device", ordinal)))
    for ordinal in (1, 1, 0):
        kept.add(None, lambda: True, ordinal)
        assert kept.wait(SECONDS)
    assert seen == [("mode", 2), ("device", 1), ("device", 0)]


# memory of JAX


def test_memory_that_jax_gave_back_waits_for_an_operation_that_began_later(kept):
    fence = Stream()
    begun = threading.Semaphore(0)

    def begin():
        begun.release()
        return fence.query(fence.submit())

    first, second = Owner(), Owner()
    signs = first.freed, second.freed
    loan = jax_arrays.Loan(first, kept, begin)
    other = jax_arrays.Loan(second, kept, begin)
    del first, second
    assert fence.submitted == 0
    del loan
    assert begun.acquire(timeout=SECONDS)
    assert fence.was_asked(3)
    del other  # after the operation began: it needs another
    assert fence.was_asked(3)
    assert fence.submitted == 1
    assert not any(sign.is_set() for sign in signs)
    fence.done = 1
    assert signs[0].wait(SECONDS)
    assert begun.acquire(timeout=SECONDS)
    assert not signs[1].is_set()
    fence.done = 2
    assert signs[1].wait(SECONDS)


def test_an_operation_that_cannot_begin_keeps_the_memory(kept, caplog):
    def begin():
        raise RuntimeError("backend is gone")

    owner = Owner()
    freed = owner.freed
    kept.after(owner, begin)
    del owner
    assert kept.wait(SECONDS)
    assert not freed.is_set()
    assert "backend is gone" in caplog.text


def test_threads_that_take_and_give_back_memory_free_nothing_early(kept):
    """What a pool hands out is in use on a compute stream that runs behind; what comes back must not be freed before."""
    compute, early = Stream(), []

    def begin():
        return compute.query(compute.submit())

    def work(_):
        for _ in range(200):
            memory = Owner(compute)  # an operation reads it
            weakref.finalize(memory, _freed, threading.Event(), early, compute, memory.ticket)
            loan = jax_arrays.Loan(memory, kept, begin)
            del memory, loan
            compute.advance(20)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    running = threading.Event()

    def run_on():
        while not running.wait(0.0005):
            compute.advance(0)

    thread = threading.Thread(target=run_on)
    thread.start()
    try:
        assert kept.wait(SECONDS)
    finally:
        running.set()
        thread.join()
    assert not early


# capsules


def test_a_capsule_is_kept_from_the_end_of_its_view_until_the_stream_has_passed(kept, monkeypatch):
    stream = Stream()
    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    monkeypatch.setattr(device, "current_stream", lambda ordinal: object())
    monkeypatch.setattr(streams, "event_query", lambda pointer, ordinal: stream.query(stream.submit()))
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "bind", lambda ordinal: None)
    capsule = Owner()
    freed = capsule.freed
    held = dlpack_capsule.KeepAlive(capsule, 0x7000, 0)
    del capsule
    assert stream.submitted == 0
    del held
    assert stream.was_asked(3)
    assert not freed.is_set()
    stream.done = 1
    assert freed.wait(SECONDS)


def test_a_capsule_whose_stream_cannot_be_asked_about_is_kept(kept, monkeypatch, caplog):
    def broken(pointer, ordinal):
        raise RuntimeError("cudaErrorStreamCaptureImplicit")

    monkeypatch.setattr(dlpack_capsule, "releases", lambda: kept)
    monkeypatch.setattr(device, "current_stream", lambda ordinal: object())
    monkeypatch.setattr(streams, "event_query", broken)
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "bind", lambda ordinal: None)
    capsule = Owner()
    freed = capsule.freed
    held = dlpack_capsule.KeepAlive(capsule, 0x7000, 0)
    del capsule, held
    assert kept.wait(SECONDS)
    assert not freed.is_set()
    assert "cudaErrorStreamCaptureImplicit" in caplog.text


# the end


def run(program):
    done = subprocess.run(
        (sys.executable, "-c", textwrap.dedent(program)), capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_the_interpreter_ends_while_something_is_kept_and_does_not_free_it():
    program = """
        from fp8core.runtime.releases import releases
        class Memory:
            def __del__(self):
                print("freed", flush=True)
        queue = releases()
        queue.start()
        queue.add(Memory(), lambda: False)
        queue.after(Memory(), lambda: (lambda: False))
        print("end")
    """
    assert run(program) == ["end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_child_begins_anew_and_leaves_alone_what_the_parent_keeps():
    program = """
        import os, sys, threading
        from fp8core.runtime.releases import releases
        class Memory:
            def __init__(self, name): self.name = name
            def __del__(self): print("freed", self.name, flush=True)
        queue = releases()
        done = threading.Event()
        queue.start()
        queue.add(Memory("parents"), done.is_set)
        child = os.fork()
        if child == 0:
            queue.start()
            queue.add(Memory("childs"), lambda: True)
            print("child", queue.wait(30), flush=True)
            sys.exit(0)
        os.waitpid(child, 0)
        done.set()
        print("parent", queue.wait(30), flush=True)
    """
    assert run(program) == ["freed", "childs", "child", "True", "freed", "parents", "parent", "True"]


def test_nothing_runs_until_something_is_kept():
    program = """
        import threading
        from fp8core.runtime.releases import releases
        import fp8core
        releases()
        print(threading.active_count())
        releases().start()
        releases().start()
        print(threading.active_count())
    """
    assert run(program) == ["1", "2"]


def test_a_kept_operand_gets_an_event_of_its_stream(monkeypatch):
    queue, seen = releases.Releases(), []
    monkeypatch.setattr(queue, "start", lambda: seen.append("start"))
    monkeypatch.setattr(queue, "add", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(streams, "event_query", lambda stream, ordinal: f"event on {stream} of {ordinal}")
    queue.keep("x", 0x7000, 1)
    assert seen == ["start", ("x", "event on 28672 of 1", 1, (1, 0x7000))]


def test_stand_ins_are_not_needed_for_a_stream_that_is_captured(monkeypatch):
    monkeypatch.setattr(device, "capturing", lambda stream: True)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace())
    assert streams.event_query(0x7000, 0) is None
