"""The device module, as far as it goes without a GPU."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from fp8core.errors import BackendError, DeviceError
from fp8core.runtime import device, streams
from support.captures import captures  # noqa: F401
from support.targets import H200


def test_count_and_its_reason_agree():
    assert (device.why_none() is None) == (device.count() > 0)


@pytest.mark.parametrize(("devices", "entered"), [(1, []), (2, [1])])
def test_calls_are_made_with_their_device_current(monkeypatch, devices, entered):
    seen = []

    @contextmanager
    def on(ordinal):
        seen.append(ordinal)
        yield

    monkeypatch.setattr(device, "count", lambda: devices)
    monkeypatch.setattr(device, "current_getter", lambda: lambda: 0)
    monkeypatch.setattr(device, "on", on)
    assert device.with_current(0, lambda status: status)(7) == 7
    assert seen == []
    assert device.with_current(1, lambda status: status)(8) == 8
    assert seen == entered


@pytest.mark.parametrize(
    ("status", "number"), [(1, "(1)"), (901, "(901: what was called, or freed, before has ended the capture)")]
)
def test_a_status_has_its_name_and_what_that_does_not_say(monkeypatch, status, number):
    def name(_, into):
        into._obj.value = b"CUDA_ERROR_OF_SOME_KIND"

    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(cuGetErrorName=name))
    with pytest.raises(BackendError) as raised:
        device.check(status, "cuCall", "stream 0x100")
    assert str(raised.value) == f"cuCall failed with CUDA_ERROR_OF_SOME_KIND {number} for stream 0x100"


@pytest.mark.parametrize(("context", "bound", "status"), [(0, [1], 0), (0x7000, [], 201)])
def test_only_a_thread_without_a_context_gets_one_and_a_second_try(monkeypatch, context, bound, status):
    seen = []

    def current_context(where):
        where._obj.value = context
        return 0

    monkeypatch.setattr(device, "platform", lambda: "cuda")
    monkeypatch.setattr(device, "driver", lambda: SimpleNamespace(cuCtxGetCurrent=current_context))
    monkeypatch.setattr(device, "on", lambda ordinal: nullcontext())
    monkeypatch.setattr(device, "make_current", seen.append)
    assert device.retry_with_context(201, 1, lambda *arguments: len(arguments)) == status
    assert seen == bound


def test_a_device_that_is_not_there_is_refused_with_the_reason():
    pytest.importorskip("cupy")
    wrong = device.count()
    with pytest.raises(
        DeviceError,
        match=f"device needs (a GPU, but there is none .*|the ordinal of a GPU, below {wrong}), got {wrong}",
    ):
        device.target(wrong)
    with pytest.raises(DeviceError, match=r"device needs .*, got -1"):
        device.target(-1)


def test_without_cupy_there_is_no_device_and_a_reason():
    code = """
        import sys, types
        sys.modules["cupy"] = None
        from fp8core.runtime import device
        from fp8core.errors import DeviceError
        assert device.count() == 0
        assert "need CuPy" in device.why_none() and "extra cuda13" in device.why_none()
        try:
            device.target(0)
        except DeviceError as error:
            assert "need CuPy" in str(error)
        else:
            raise SystemExit("not refused")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_the_border_imports_no_framework():
    code = """
        import sys
        import fp8core.interop, fp8core.runtime.device, fp8core.interop.float8, fp8core.runtime.kernel_cache
        loaded = {"cupy", "torch", "jax", "jaxlib"} & set(sys.modules)
        raise SystemExit(f"imported {loaded}" if loaded else 0)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_number_is_read_on_a_captured_stream_as_waiting_would_end_the_capture(captures, monkeypatch):
    monkeypatch.setattr(device, "cupy", lambda: pytest.fail("the driver was called"))
    captures[0x70] = 1
    with pytest.raises(DeviceError, match=r"stream needs not to be captured .* got 0x70"):
        streams.read_int32(0x1000, H200, 0x70)
