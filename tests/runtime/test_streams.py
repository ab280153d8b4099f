"""Waits, events and single numbers on streams, against a stand-in for CuPy and the driver."""

import ctypes
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from fp8core.errors import DeviceError
from fp8core.runtime import capture, device, streams
from fp8core.target import HOST
from support.targets import AMPERE

TARGET = AMPERE._replace(device=1)


class Event:
    done = 1

    def record(self, stream):
        self.recorded = Event.last = stream.ptr


class Runtime:
    """CuPy's functions that copy on a stream and wait for it."""

    memcpyDeviceToHost = 2

    def __init__(self, waits, current):
        self.waits, self.current = waits, current

    def memcpyAsync(self, there, here, nbytes, kind, stream):
        assert (kind, nbytes, self.current[-1]) == (self.memcpyDeviceToHost, 4, TARGET.device)
        self.waits.append(("copied", stream))
        self.copied = there, here

    def streamSynchronize(self, stream):
        assert self.current[-1] == TARGET.device
        self.waits.append(("waited", stream))
        ctypes.memmove(*self.copied, 4)  # only now is it there


@pytest.fixture
def joined(monkeypatch):
    """Return which streams have waited; 0xC.. and 0xD.. are captured, into two graphs."""
    waits, current = [], [0]

    @contextmanager
    def on(ordinal):
        current.append(ordinal)
        yield
        current.pop()

    def event(disable_timing):
        assert disable_timing
        assert current[-1] == TARGET.device
        return Event()

    class Stream(SimpleNamespace):
        def wait_event(self, event):
            waits.append((self.ptr, event.recorded))

    monkeypatch.setattr(device, "capturing", lambda stream: stream >= 0xC00)
    monkeypatch.setattr(device, "cupy_stream", lambda pointer: Stream(ptr=pointer))
    cuda = SimpleNamespace(Event=event, runtime=Runtime(waits, current))
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device, "driver_stream", lambda stream: stream)
    monkeypatch.setattr(device, "on", on)
    monkeypatch.setattr(capture, "info", lambda stream: capture.Capture(stream >> 8, stream >> 8))
    return waits


@pytest.mark.parametrize(
    ("waiting", "awaited", "waits"),
    [
        (0x100, 0x200, True),
        (0x100, 0x100, False),
        (0x100, 0, True),
        (0, 0x100, True),
        (0xC00, 0x100, False),
        (0xC00, 0, False),
        (0x100, 0xC00, False),
        (0, 0xC00, False),
        (0xC00, 0xC01, True),
        (0xC00, 0xD00, False),
    ],
)
def test_streams_wait_for_each_other_within_one_capture_or_outside_of_all(joined, waiting, awaited, waits):
    streams.join(waiting, awaited, TARGET.device)
    assert joined == ([(waiting, awaited)] if waits else [])


def test_the_event_that_a_stream_has_passed_is_its_own(joined):
    passed = streams.event_query(0x300, TARGET.device)
    assert passed() is True
    assert Event.last == 0x300
    assert streams.event_query(0xC00, TARGET.device) is None


def test_a_number_is_read_when_its_stream_has_written_it(joined):
    number = ctypes.c_int32(-7)
    assert streams.read_int32(ctypes.addressof(number), TARGET, 0x300) == -7
    assert joined == [("copied", 0x300), ("waited", 0x300)]
    assert streams.read_int32(ctypes.addressof(number), HOST, 0) == -7
    with pytest.raises(DeviceError, match=r"stream needs not to be captured into a graph, as .*, got 0xc00"):
        streams.read_int32(ctypes.addressof(number), TARGET, 0xC00)
    assert len(joined) == 2


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(("platform", "name"), [("cuda", "cuMemsetD32Async"), ("hip", "hipMemsetD32Async")])
def test_one_number_is_filled_by_the_driver(monkeypatch, platform, name, devices):
    """A thread that has used no device yet gets a context, and the call is made again."""
    calls, current = [], [devices - 1]

    def fill(address, bits, count, stream):
        assert current[-1] == 0
        calls.append((address.value, bits.value, count.value, stream.value))
        return 0 if len(calls) > 1 else 201

    def retry(status, ordinal, function, *arguments):
        assert (status, ordinal) == (201, 0)
        current.append(0)
        return function(*arguments)

    monkeypatch.setattr(device, "platform", lambda: platform)
    monkeypatch.setattr(device, "count", lambda: devices)
    monkeypatch.setattr(device, "current_getter", lambda: lambda: current[-1])
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext(current.append(ordinal)))
    monkeypatch.setattr(device, "retry_with_context", retry)
    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(**{name: fill}))
    streams.fill_float32(0x7F00_0000_1000, -0.5, 0x7000, 0)
    assert calls == [(0x7F00_0000_1000, 0xBF000000, 1, 0x7000)] * 2
