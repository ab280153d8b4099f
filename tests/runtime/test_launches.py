"""Launches by cuLaunchKernelEx, against a stand-in for it: what the driver reads is what the call gave."""

import ctypes
from contextlib import nullcontext
from typing import NamedTuple

import pytest

from fp8core.runtime import args, compiler, device, jit, launches, sources
from support.targets import ADA, AMPERE, BLACKWELL, H200

TARGET = H200._replace(device=1)


class Driver:
    """What has been launched: the stream and the argument, as the driver reads them, and the device that was current."""

    def __init__(self):
        self.launched, self.statuses, self.current, self.amid = [], [], [TARGET.device], lambda: None
        kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 4)
        self.function = kind(self.launch)

    def launch(self, configuration, function, pointers, extra):
        amid, self.amid = self.amid, lambda: None
        amid()
        size = launches.CONFIGURATION.size
        *shape, stream, _, _ = launches.CONFIGURATION.unpack(ctypes.string_at(configuration, size))
        argument = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(pointers).value).value
        assert (function, extra, tuple(shape)) == (0xF00, None, (2, 3, 1, 128, 1, 1, 512))
        self.launched.append((stream or 0, argument, self.current[-1]))
        return self.statuses.pop() if self.statuses else 0


@pytest.fixture
def driver(monkeypatch):
    made = Driver()
    monkeypatch.setattr(launches, "_launch_function", lambda platform: made.function)
    monkeypatch.setattr(device, "count", lambda: 2)
    monkeypatch.setattr(device, "current_getter", lambda: lambda: made.current[-1])
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext(made.current.append(ordinal)))
    return made


@pytest.fixture
def launch(driver):
    function = compiler.Function(0xF00, None)
    return launches.Launcher(TARGET, function, "f", ["P"], (128, 1, 1), 512, b"").bind((2, 3, 1))


def test_each_launch_is_on_its_own_stream(driver, launch):
    """Also on the default one, which is 0, after another."""
    given = [(stream, 0x1000 + at) for at, stream in enumerate((0, 0x7000, 0x7000, 0, 0, 0x8000, 0))]
    for stream, address in given:
        launch(stream, address)
    assert driver.launched == [(*each, TARGET.device) for each in given]


def test_a_launch_amid_another_has_memory_of_its_own(driver, launch):
    """As in another thread, or in a destructor."""
    launch(0, 1)
    driver.amid = lambda: launch(0x8000, 3)
    launch(0x7000, 2)
    assert [each[:2] for each in driver.launched] == [(0, 1), (0x8000, 3), (0x7000, 2)]


def test_the_device_of_the_kernel_is_current(driver, launch):
    driver.current.append(0)
    launch(0x7000, 1)
    assert driver.launched == [(0x7000, 1, TARGET.device)]


def test_a_thread_without_a_context_gets_one(driver, launch, monkeypatch):
    def retry(status, ordinal, function, *arguments):
        assert (status, ordinal) == (201, TARGET.device)
        return function(*arguments)

    monkeypatch.setattr(device, "retry_with_context", retry)
    monkeypatch.setattr(device, "status_name", lambda status: f"status {status}")
    driver.statuses = [201]
    launch(0x7000, 1)
    assert [each[:2] for each in driver.launched] == [(0x7000, 1)] * 2
    driver.statuses = [700, 201]
    with pytest.raises(launches.LaunchError, match=r"launching f with grid \(2, 3, 1\) on .*: status 700"):
        launch(0x7000, 1)


class OneArgs(NamedTuple):
    x: args.Pointer


PROGRAMMATIC = (6, 1, 0, 0)


@pytest.mark.parametrize(
    ("target", "options", "wanted"),
    [
        (AMPERE, {"programmatic": True}, []),
        (ADA, {"programmatic": True, "cooperative": True}, [(2, 1, 0, 0)]),
        (H200, {"programmatic": True}, [PROGRAMMATIC]),
        (BLACKWELL, {"programmatic": True, "cluster": 2}, [(4, 2, 1, 1), PROGRAMMATIC]),
        (H200, {}, []),
    ],
)
def test_a_launch_has_the_attributes_that_were_asked_for_and_that_its_gpu_knows(monkeypatch, target, options, wanted):
    """Dependent launches begin with Hopper: older GPUs refuse a launch with that attribute."""
    monkeypatch.setattr(jit, "_function", lambda *given: compiler.Function(0xF00, None))
    made = jit.prepare(target, "source", "f", {}, OneArgs, block=128, **options)
    address, count = made.attributes
    text = ctypes.string_at(address, count * launches.ATTRIBUTE.size) if count else b""
    assert list(launches.ATTRIBUTE.iter_unpack(text)) == wanted


def test_a_kernel_is_loaded_on_its_device_and_told_what_shared_memory_it_leaves(driver, monkeypatch):
    def load(text, options):
        assert driver.current[-1] == TARGET.device
        return text

    monkeypatch.setattr(sources, "flatten", lambda platform, source: f"{source} of {platform}")
    monkeypatch.setattr(compiler, "load", load)
    monkeypatch.setattr(compiler, "function", lambda *given, **options: compiler.Function(0xF00, (given, options)))
    driver.current.append(0)
    monkeypatch.setattr(jit, "_function", jit._function.__wrapped__)
    for all_shared in (False, True):
        made = jit.prepare(TARGET, "x", "f", {}, OneArgs, block=128, shared_bytes=512, all_shared=all_shared)
        assert made.function.module == (("x of cuda", "f", 512), {"all_shared": all_shared})
