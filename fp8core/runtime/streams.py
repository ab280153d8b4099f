"""Work on streams other than kernels: waits for another stream, events, and writing or reading single numbers."""

import ctypes
from collections.abc import Callable

from fp8core.errors import DeviceError
from fp8core.runtime import capture, device
from fp8core.target import Target


def join(waiting: int, awaited: int, ordinal: int) -> None:
    """Make later work on stream ``waiting`` start after the work that is on stream ``awaited`` now.

    Does nothing if one stream is captured into a graph and the other is not, or is captured into another graph: the
    other stream would be drawn into the capture, and captured work does not run before the graph is launched.
    """
    if waiting == awaited:
        return
    captured = device.capturing(waiting)
    if captured != device.capturing(awaited):
        return
    if captured and capture.info(waiting) != capture.info(awaited):
        return
    with device.on(ordinal):
        event = device.cupy().cuda.Event(disable_timing=True)
        event.record(device.cupy_stream(awaited))
        device.cupy_stream(waiting).wait_event(event)


def event_query(pointer: int, ordinal: int) -> Callable[[], bool] | None:
    """Return a query whether stream ``pointer`` has passed this point; None if it is being captured into a graph."""
    if device.capturing(pointer):
        return None
    with device.on(ordinal):
        event = device.cupy().cuda.Event(disable_timing=True)
        event.record(device.cupy_stream(pointer))

    def answer() -> bool:
        return bool(event.done)

    return answer


def fill_float32(pointer: int, value: float, stream: int, ordinal: int) -> None:
    """Write a number to device memory on a stream, without waiting; on a captured stream this is part of the graph."""
    bits = ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value
    name = "cuMemsetD32Async" if device.platform() == "cuda" else "hipMemsetD32Async"
    function = getattr(device.driver(), name)
    where = ctypes.c_void_p(device.driver_stream(stream))
    arguments = (ctypes.c_uint64(pointer), ctypes.c_uint32(bits), ctypes.c_size_t(1), where)
    status = device.with_current(ordinal, function)(*arguments)
    if status:
        status = device.retry_with_context(status, ordinal, function, *arguments)
    device.check(status, name, f"one number at {pointer:#x} on stream {stream:#x}")


def read_int32(pointer: int, target: Target, stream: int) -> int:
    """Wait for the work on ``stream``, and return the int32 at ``pointer`` on a target.

    Raises:
        DeviceError: the stream is being captured into a graph: waiting would invalidate the capture.
    """
    value = ctypes.c_int32()
    if target.platform == "host":
        return ctypes.c_int32.from_address(pointer).value
    if device.capturing(stream):
        raise DeviceError(
            f"stream needs not to be captured into a graph, as the call waits for its result, got {stream:#x}"
        )
    runtime, stream = device.cupy().cuda.runtime, device.driver_stream(stream)
    with device.on(target.device):
        runtime.memcpyAsync(ctypes.addressof(value), pointer, ctypes.sizeof(value), runtime.memcpyDeviceToHost, stream)
        runtime.streamSynchronize(stream)
    return value.value
