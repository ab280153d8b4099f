"""Graphs on ROCm by the driver's own calls: CuPy has none there."""

import ctypes
import weakref
from collections.abc import Callable

from fp8core.runtime import capture, device


class HipGraph:
    """What was launched on a stream while it was captured; it can be launched again and again.

    Args:
        stream: the address of a stream, not the default one.
        calls: launches on that stream; nothing runs meanwhile.

    Raises:
        BackendError: a call of the driver's failed. The stream is not captured any more, whatever happens.
    """

    def __init__(self, stream: int, calls: Callable[[], object]) -> None:
        where, graph, made = ctypes.c_void_p(stream), ctypes.c_void_p(), ctypes.c_void_p()
        _call("hipStreamBeginCapture", where, ctypes.c_int(capture.RELAXED))
        try:
            calls()
        except BaseException:
            # A capture that an error has made invalid ends with another one: the first is the one to report.
            if device.driver().hipStreamEndCapture(where, ctypes.byref(graph)):
                device.drain()
            _destroy("hipGraphDestroy", graph.value)
            raise
        _call("hipStreamEndCapture", where, ctypes.byref(graph))
        try:
            _call("hipGraphInstantiateWithFlags", ctypes.byref(made), graph, ctypes.c_ulonglong(0))
        finally:
            _destroy("hipGraphDestroy", graph.value)
        self._made = made
        weakref.finalize(self, _destroy, "hipGraphExecDestroy", made.value).atexit = False

    def launch(self, stream: int) -> None:
        """Launch all of it on a stream; raises BackendError with the driver's status."""
        _call("hipGraphLaunch", self._made, ctypes.c_void_p(stream))


def _call(name: str, *arguments: object) -> None:
    function: Callable[..., int] = getattr(device.driver(), name)
    device.check(function(*arguments), name)


def _destroy(name: str, address: int | None) -> None:
    if address:
        _call(name, ctypes.c_void_p(address))
