"""What outlives a call: never dropped early, by many threads neither, and dropped as soon as the device is done."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from fp8core.runtime import capture, device, releases, streams
from support.releases import SECONDS, Owner, Stream, _freed, kept, owners  # noqa: F401


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
    before = len(owners())
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
    assert len(owners()) == before


def test_owners_may_come_from_destructors_within_a_collection(kept):
    """A collection may run anywhere, also within a call that hands over another owner."""
    before = len(owners())

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
    assert len(owners()) == before


def test_what_cannot_be_asked_about_is_kept_and_the_thread_goes_on(kept, monkeypatch):
    said = []  # text alone: a record would keep the error, and with its traceback the owner
    monkeypatch.setattr(releases._LOG, "error", lambda text, *given: said.append(text % given))

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
    gc.collect()
    assert not gone.is_set()
    assert len(said) == 1
    assert "still uses 1 operands" in said[0]
    assert "illegal memory access" in said[0]


def test_the_thread_asks_on_the_device_and_does_not_disturb_captures(kept, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "count", lambda: 2)
    monkeypatch.setattr(capture, "exchange", lambda mode: seen.append(("mode", mode)))
    monkeypatch.setattr(device, "make_current", lambda ordinal: seen.append(("device", ordinal)))
    for ordinal in (1, 1, 0):
        kept.add(None, lambda: True, ordinal)
        assert kept.wait(SECONDS)
    assert seen == [("mode", 2), ("device", 1), ("device", 0)]


def test_an_operation_begins_where_it_does_not_disturb_captures(kept, monkeypatch):
    seen = []
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(capture, "exchange", lambda mode: seen.append(mode))

    def begin():
        seen.append("begin")
        return lambda: True

    for _ in range(2):
        kept.after(None, begin)
        assert kept.wait(SECONDS)
    assert seen == [2, "begin", "begin"]


@pytest.mark.gpu
def test_an_operation_of_another_thread_does_not_invalidate_a_capture(kept):
    cupy = pytest.importorskip("cupy")
    runtime, stream, owner = cupy.cuda.runtime, cupy.cuda.Stream(non_blocking=True), Owner()
    freed, x = owner.freed, cupy.zeros(4, "f4")
    x += 1  # loads the kernel
    cupy.cuda.get_current_stream().synchronize()

    def begin():
        runtime.free(runtime.malloc(512))
        return lambda: True

    with stream:
        stream.begin_capture(runtime.streamCaptureModeGlobal)
        try:
            kept.after(owner, begin)
            del owner
            assert freed.wait(SECONDS)
            x += 1
        finally:
            graph = stream.end_capture()
        graph.launch()
    stream.synchronize()
    assert x.tolist() == [2, 2, 2, 2]


def test_a_kept_operand_gets_an_event_of_its_stream(monkeypatch):
    queue, seen = releases.Releases(), []
    monkeypatch.setattr(queue, "start", lambda: seen.append("start"))
    monkeypatch.setattr(queue, "add", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(streams, "event_query", lambda stream, ordinal: f"event on {stream} of {ordinal}")
    queue.keep("x", 0x7000, 1)
    assert seen == ["start", ("x", "event on 28672 of 1", 1, (1, 0x7000))]


def test_an_operand_whose_stream_cannot_be_asked_about_is_kept(kept, monkeypatch, caplog):
    def broken(stream, ordinal):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(streams, "event_query", broken)
    monkeypatch.setattr(capture, "exchange", lambda mode: None)
    monkeypatch.setattr(device, "make_current", lambda ordinal: None)
    owner = Owner()
    freed = owner.freed
    kept.keep(owner, 0x7000, 0)
    del owner
    assert kept.wait(SECONDS)
    assert not freed.is_set()
    assert "out of memory" in caplog.text


def test_stand_ins_are_not_needed_for_a_stream_that_is_captured(monkeypatch):
    monkeypatch.setattr(device, "capturing", lambda stream: True)
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace())
    assert streams.event_query(0x7000, 0) is None
