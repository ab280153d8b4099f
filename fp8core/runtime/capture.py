"""What a stream is captured into, and what a thread may call meanwhile: the driver's calls that CuPy does not have."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from fp8core.errors import BackendError
from fp8core.runtime import device

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: the thread may allocate, free and query whoever captures."""
T = TypeVar("T")
_NONE: Final = 0
"""CU_STREAM_CAPTURE_STATUS_NONE."""


class Capture(NamedTuple):
    """A capture in progress."""

    id: int
    """Unique in the process: a graph that is captured later has another."""
    graph: int
    """The handle of the graph that is being made."""


def info(stream: int) -> Capture | None:
    """Return what the stream at an address is captured into, or None."""
    name, function = _info()
    status, number, graph = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_void_p()
    unused = (None,) * (len(function.argtypes) - 4)
    device.check(
        function(stream, ctypes.byref(status), ctypes.byref(number), ctypes.byref(graph), *unused),
        name,
        f"stream {stream:#x}",
    )
    return None if status.value == _NONE else Capture(number.value, graph.value or 0)


@cache
def _info() -> tuple[str, Any]:
    """Return the driver's function and its name.

    cuStreamGetCaptureInfo_v3, of CUDA 12.3 and later, has one argument more than _v2, of 11.3 and later: the data of
    edges, as those of programmatic launches. HIP has _v2 of the same form.
    """
    names = {"cuda": ("cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo_v2"), "hip": ("hipStreamGetCaptureInfo_v2",)}
    for name in names[device.platform()]:
        function = getattr(device.driver(), name, None)
        if function is not None:
            outputs = (ctypes.c_void_p,) * (6 if name.endswith("_v3") else 5)
            function.argtypes = (ctypes.c_void_p, *outputs)
            return name, function
    raise BackendError(
        f"the driver has no {names[device.platform()][-1]}: captures need CUDA 11.3 or ROCm 5.3, or later"
    )


def record(calls: Callable[[], object], end: Callable[[], T], refusal: type[Exception] = BackendError) -> T:
    """Return what ``end`` makes of a capture that has begun and that ``calls`` fill; it ends whatever happens in them.

    Args:
        calls: launch on the captured stream.
        end: ends the capture, and returns what owns its graph.
        refusal: what ``end`` raises where the driver refuses.
    """
    try:
        calls()
    except BaseException:
        # A capture that an error has made invalid ends with another one: the first is the one to report.
        with suppress(refusal):
            end()
        raise
    return end()


def exchange(mode: int) -> int:
    """Set what the calling thread may call while anyone captures, its capture mode, and return the one before."""
    name = {"cuda": "cuThreadExchangeStreamCaptureMode", "hip": "hipThreadExchangeStreamCaptureMode"}[device.platform()]
    function: Callable[..., int] = getattr(device.driver(), name)
    value = ctypes.c_int(mode)
    device.check(function(ctypes.byref(value)), name, f"mode {mode}")
    return value.value


@contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread allocate and free while it, or another thread, captures: that does not end the capture."""
    before = exchange(RELAXED)
    try:
        yield
    finally:
        exchange(before)
