"""Graphs on ROCm by calls of the driver, as CuPy has no graphs there."""

import ctypes
import weakref
from collections.abc import Callable

from fp8core.runtime import capture, device


class HipGraph:
    """A graph of the launches made on a stream while it was captured; it can be launched many times.

    Args:
        stream: the address of a stream, not the default one.
        calls: makes launches on that stream, which are recorded and do not run.

    Raises:
        BackendError: a driver call failed. In any case the capture of the stream has ended.
    """

    def __init__(self, stream: int, calls: Callable[[], object]) -> None:
        where, made = ctypes.c_void_p(stream), ctypes.c_void_p()
        _call("hipStreamBeginCapture", where, ctypes.c_int(capture.RELAXED))
        graph = capture.record(calls, lambda: _ended(where))
        try:
            _call("hipGraphInstantiateWithFlags", ctypes.byref(made), graph.address, ctypes.c_ulonglong(0))
        finally:
            graph.destroy()
        self._made = _Owner(made, "hipGraphExecDestroy")

    def launch(self, stream: int) -> None:
        """Launch the graph on a stream; raise BackendError with the driver's status if that fails."""
        _call("hipGraphLaunch", self._made.address, ctypes.c_void_p(stream))


class _Owner:
    """Owns a handle of the driver, which is destroyed with this object or earlier."""

    def __init__(self, address: ctypes.c_void_p, destroy: str) -> None:
        self.address = address
        self.destroy = weakref.finalize(self, _call, destroy, address)
        self.destroy.atexit = False


def _ended(stream: ctypes.c_void_p) -> _Owner:
    graph = ctypes.c_void_p()
    _call("hipStreamEndCapture", stream, ctypes.byref(graph))
    return _Owner(graph, "hipGraphDestroy")


def _call(name: str, *arguments: object) -> None:
    function: Callable[..., int] = getattr(device.driver(), name)
    device.check(function(*arguments), name)
