"""Launches among the streams of several frameworks: what they wait for, and what waits for them."""

import ctypes
import math
from contextlib import nullcontext
from fractions import Fraction
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from fp8core import interop
from fp8core.errors import DeviceError
from fp8core.interop import Framework, Result, TensorView, frameworks, order_after, order_before
from fp8core.runtime import device, graph_memory, streams
from fp8core.target import HOST
from support.targets import AMPERE

TARGET = AMPERE._replace(device=1)
LAUNCH = 0x100


class Kind(Framework):
    """A framework that works on a stream of its own."""

    def __init__(self, name, stream):
        self.name, self._stream = name, stream

    def view(self, x, name):
        return TensorView(0x1000, "float32", (1,), (1,), TARGET, self, x)

    def stream(self, target):
        return self._stream

    def empty(self, shape, dtype, target, strides=None, stream=None):
        self.allocated_for = stream
        memory = ctypes.create_string_buffer(math.prod(shape) * 4 + 1)
        return Result(ctypes.addressof(memory), memory)


class PerArray(Kind):
    """One that orders each of its arrays, as DLPack does."""

    def __init__(self, log):
        super().__init__("per array", 0x500)
        self.log = log

    def view(self, x, name):
        return super().view(x, name)._replace(held=object())

    def order_before(self, view, stream, owner=None):
        self.log.append(("export", view.owner, stream, owner))

    def release(self, view, stream):
        self.log.append(("released", view.owner, stream))

    def keep(self, view, stream):
        self.log.append(("keeps itself", view.owner))


@pytest.fixture
def log(monkeypatch):
    """Return what was done with streams, of which those from 0xC00 on are captured."""
    done = []

    def join(waiting, awaited, ordinal):
        assert ordinal == TARGET.device
        done.append((waiting, "after", awaited))

    queue = SimpleNamespace(keep=lambda owner, stream, ordinal: done.append(("keep", owner, stream, ordinal)))
    monkeypatch.setattr(streams, "join", join)
    monkeypatch.setattr(device, "capturing", lambda stream: stream >= 0xC00)
    monkeypatch.setattr(frameworks, "releases", lambda: queue)
    return done


def views(*kinds):
    return [kind.view(f"{kind.name} {position}", "x") for position, kind in enumerate(kinds)]


def test_a_launch_waits_for_every_other_framework_once(log):
    first, second, third = Kind("first", LAUNCH), Kind("second", 0x200), Kind("third", 0x300)
    order_before(LAUNCH, views(first, second, first, third, second))
    assert log == [(LAUNCH, "after", 0x200), (LAUNCH, "after", 0x300)]


def test_a_launch_on_a_given_stream_waits_for_the_producers_own_stream_too(log):
    first, second = Kind("first", 0x200), Kind("second", 0x300)
    order_before(LAUNCH, views(first, first, second), explicit=LAUNCH)
    assert log == [(LAUNCH, "after", 0x200), (LAUNCH, "after", 0x300)]


def test_arrays_that_are_ordered_one_by_one_are_all_ordered(log):
    first, one_by_one = Kind("first", LAUNCH), PerArray(log)
    order_before(LAUNCH, views(first, one_by_one, one_by_one), explicit="stream")
    assert log == [
        (LAUNCH, "after", LAUNCH),
        ("export", "per array 1", LAUNCH, "stream"),
        ("export", "per array 2", LAUNCH, "stream"),
    ]
    log.clear()
    order_before(0x500, views(one_by_one, one_by_one))
    assert [done[:2] for done in log] == [("export", "per array 0"), ("export", "per array 1")]


def test_all_other_frameworks_wait_for_the_launch(log):
    first, second, third = Kind("first", LAUNCH), Kind("second", 0x200), Kind("third", 0x300)
    order_after(LAUNCH, views(first, second, third, second, first))
    assert log == [(0x200, "after", LAUNCH), (0x300, "after", LAUNCH)]


def test_operands_of_a_launch_on_a_given_stream_are_kept_until_it_has_passed(log):
    first, second = Kind("first", 0x200), Kind("second", 0x300)
    order_after(LAUNCH, views(first, first, second), explicit=LAUNCH)
    assert log == [
        ("keep", "first 0", LAUNCH, TARGET.device),
        ("keep", "first 1", LAUNCH, TARGET.device),
        (0x300, "after", LAUNCH),
    ]
    log.clear()
    order_after(0x200, views(first, first), explicit=0x200)
    assert log == [], "it is the stream that their memory is ordered on"


def test_capsules_are_kept_by_their_views_which_are_told_of_the_launch(log):
    one_by_one = PerArray(log)
    order_after(LAUNCH, views(one_by_one), explicit=LAUNCH)
    assert log == [("released", "per array 0", LAUNCH), ("keeps itself", "per array 0")]
    log.clear()
    order_after(LAUNCH, views(Kind("first", LAUNCH), one_by_one, one_by_one))
    assert [done for done in log if done[0] == "released"] == [
        ("released", "per array 1", LAUNCH),
        ("released", "per array 2", LAUNCH),
    ]


def test_the_host_has_no_order(log):
    seen = [view._replace(target=HOST) for view in views(Kind("first", 1), Kind("second", 2))]
    order_before(0, seen, explicit=0)
    order_after(0, seen, explicit=0)
    assert log == []


def test_an_operand_that_is_captured_needs_a_launch_that_is(log):
    first, captured = Kind("first", LAUNCH), Kind("torch", 0xC00)
    with pytest.raises(
        DeviceError, match=r"stream needs to be the captured one .*got 0x100 while torch captures .*0xc00"
    ):
        order_before(LAUNCH, views(first, captured))
    assert log == []
    order_before(0xC00, views(first, captured), explicit=0xC00)
    assert log == [(0xC00, "after", LAUNCH), (0xC00, "after", 0xC00)]


def test_the_stream_is_that_of_the_first_or_the_given_one(log):
    first = Kind("first", 0x200)
    assert interop.stream_of(*views(first)) == 0x200
    assert interop.stream_of(*views(first), 0x400) == 0x400
    assert interop.stream_of(*views(first), device.LEGACY) == 0
    assert log == []


@pytest.mark.parametrize("stream", [device.PER_THREAD, SimpleNamespace(cuda_stream=device.PER_THREAD)])
def test_the_stream_of_each_thread_is_refused_where_their_memory_is_not_told_apart(log, stream):
    torch = pytest.importorskip("torch")
    seen = interop.view(torch.ones(2), "x")
    assert interop.stream_of(seen, stream) == 0, "the host has no streams"
    with pytest.raises(DeviceError, match=r"stream needs to be one stream in all threads for arrays of torch, .*\(2\)"):
        interop.stream_of(seen._replace(target=TARGET), stream)
    assert interop.stream_of(*views(Kind("cupy", 0x200)), stream) == device.PER_THREAD


def test_results_for_another_stream_come_from_its_pool(monkeypatch):
    torch = pytest.importorskip("torch")
    seen, entered = interop.view(torch.ones(2), "x"), []
    own = {0: "one of torch's own streams"}  # what torch makes of the address 0
    monkeypatch.setattr(seen.framework, "_raw_stream", lambda ordinal: 0x200)
    monkeypatch.setattr(seen.framework, "_on", lambda ordinal: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda at, device: own.get(at, at))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "the default stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(entered.append(stream)))
    for stream in (0, LAUNCH, 0x200):
        seen.framework.empty((4,), "float32", TARGET, None, stream)
    assert entered == ["the default stream", LAUNCH]


# torch


def test_memory_of_torch_is_kept_by_the_library_and_not_by_its_allocator(log, monkeypatch):
    torch = pytest.importorskip("torch")
    x, recorded = torch.tensor([1, 2], dtype=torch.uint8), []
    view, address = interop.view(x, "x")._replace(target=TARGET), x.data_ptr()
    monkeypatch.setattr(view.framework, "stream", lambda target: 0x200)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: recorded.append(x))
    order_after(LAUNCH, [view], explicit=LAUNCH)
    order_after(0x200, [view], explicit=0x200)  # its own stream
    x.data = torch.zeros(2, dtype=torch.uint8)  # as where a layer moves: the kernel may still read the old memory
    ((what, kept, stream, ordinal),) = log
    assert (what, kept.data_ptr(), kept.tolist(), stream, ordinal) == ("keep", address, [1, 2], LAUNCH, TARGET.device)
    assert not recorded


# numbers


@pytest.mark.parametrize(
    ("x", "want"),
    [
        (0.5, 0.5),
        (3, 3.0),
        (-0.0, -0.0),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.float64(0.5), 0.5),
        (np.float16(0.5), 0.5),
        (np.int64(7), 7.0),
        (np.longdouble(0.25), 0.25),
        (10**400, math.inf),
        (-(10**400), -math.inf),
        (math.nan, math.nan),
    ],
    ids=lambda value: repr(value)[:24],
)
def test_real_numbers_are_floats(x, want):
    found = interop.scalar(x)
    assert type(found) is float
    np.testing.assert_equal(found, want)


@pytest.mark.parametrize(
    "x",
    [True, np.True_, None, "0.5", 1j, np.complex64(1), [0.5], np.array(0.5), np.ones(1), b"1", Fraction(1, 2)],
    ids=repr,
)
def test_what_is_no_real_number_is_none(x):
    assert interop.scalar(x) is None


def test_arrays_without_axes_are_no_numbers():
    torch = pytest.importorskip("torch")
    assert interop.scalar(torch.tensor(0.5)) is None
    assert interop.scalar(ml_dtypes.bfloat16(0.5)) is None


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_a_number_becomes_an_array_on_the_host(framework):
    x = {
        "numpy": lambda: np.ones(2, np.float32),
        "torch": lambda: pytest.importorskip("torch").ones(2),
        "jax": lambda: pytest.importorskip("jax").numpy.ones(2),
    }[framework]()
    kind = interop.view(x, "x").framework
    numbers = [kind.number(value, HOST, 0) for value in (0.1, -2.5)]
    assert {(n.dtype, n.shape, n.strides, n.target, n.framework) for n in numbers} == {
        ("float32", (1,), (1,), HOST, kind)
    }
    assert [ctypes.c_float.from_address(n.pointer).value for n in numbers] == [np.float32(0.1), np.float32(-2.5)]


def test_a_number_on_a_device_is_written_by_its_stream_and_is_of_its_pool(log, monkeypatch):
    filled, kind = [], Kind("first", 0x200)
    monkeypatch.setattr(streams, "fill_float32", lambda *arguments: filled.append(arguments))
    number = kind.number(0.5, TARGET, LAUNCH)
    assert filled == [(number.pointer, 0.5, LAUNCH, TARGET.device)]
    assert kind.allocated_for == LAUNCH
    assert number.owner is not None


def test_a_number_in_a_capture_is_the_graphs(log, monkeypatch):
    filled = []
    monkeypatch.setattr(streams, "fill_float32", lambda *arguments: filled.append(arguments))
    monkeypatch.setattr(graph_memory, "allocate", lambda nbytes, target, stream: 0x4000 + nbytes)
    number = Kind("first", 0xC00).number(0.5, TARGET, 0xC00)
    assert (number.pointer, number.owner) == (0x4004, None)
    assert filled == [(0x4004, 0.5, 0xC00, TARGET.device)]
