"""Graph captures: the capture that a stream is in, and the capture mode of a thread. Driver calls that CuPy lacks."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

from fp8core.errors import BackendError
from fp8core.runtime import device

RELAXED: Final = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: the thread may allocate, free and query while any thread captures."""
T = TypeVar("T")
_NONE: Final = 0
"""CU_STREAM_CAPTURE_STATUS_NONE."""


class Capture(NamedTuple):
    """A capture in progress."""

    id: int
    """Unique in the process: no later capture has the same."""
    graph: int
    """The handle of the graph that is being captured."""


def info(stream: int) -> Capture | None:
    """Return the capture that a stream is in, or None."""
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

    cuStreamGetCaptureInfo_v3 (CUDA 12.3 and later) has one argument more than _v2 (11.3 and later): the edge data,
    which programmatic launches have. HIP has a _v2 with the same arguments.
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
    """Run ``calls`` in a capture that has begun, end the capture even if they fail, and return the result of ``end``.

    Args:
        calls: launches on the captured stream.
        end: ends the capture, and returns the owner of its graph.
        refusal: what ``end`` raises if the driver refuses.
    """
    try:
        calls()
    except BaseException:
        # Ending a capture that an error has invalidated raises another error: report the first one.
        with suppress(refusal):
            end()
        raise
    return end()


def exchange(mode: int) -> int:
    """Set the capture mode of the calling thread (what it may call while any thread captures); return the old mode."""
    name = {"cuda": "cuThreadExchangeStreamCaptureMode", "hip": "hipThreadExchangeStreamCaptureMode"}[device.platform()]
    function: Callable[..., int] = getattr(device.driver(), name)
    value = ctypes.c_int(mode)
    device.check(function(ctypes.byref(value)), name, f"mode {mode}")
    return value.value


@contextmanager
def relaxed() -> Iterator[None]:
    """Let the calling thread allocate and free memory during captures, its own or others', and not invalidate them."""
    before = exchange(RELAXED)
    try:
        yield
    finally:
        exchange(before)
