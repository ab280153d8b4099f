"""The devices. The only module that imports CuPy, and it does so only when one of its functions is called."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final, NamedTuple

from fp8core.errors import BackendError, DeviceError
from fp8core.runtime import loaded
from fp8core.target import Platform, Target

_DRIVERS: Final[dict[str, tuple[str, ...]]] = {
    "cuda": ("libcuda.so.1",),
    "hip": ("libamdhip64.so.7", "libamdhip64.so", "libamdhip64.so.6"),
}

LEGACY: Final = 1
"""cudaStreamLegacy: the default stream, also called 0; it cannot be captured."""
PER_THREAD: Final = 2
"""cudaStreamPerThread and hipStreamPerThread: stands for a different stream in each thread."""


class _Survey(NamedTuple):
    devices: int
    reason: str | None


@cache
def cupy() -> Any:
    """Return the module cupy, imported on the first call.

    Raises:
        DeviceError: CuPy is not installed, or cannot be imported.
    """
    try:
        import cupy as module
    except ImportError as error:
        raise DeviceError(
            f"arrays on a GPU need CuPy, but import cupy failed: {error} "
            "(install fp8core with the extra cuda13, cuda12 or rocm7)"
        ) from error
    return module


@cache
def _survey() -> _Survey:
    try:
        devices = int(cupy().cuda.runtime.getDeviceCount())
    except Exception as error:  # noqa: BLE001 - why_none() reports it, whatever it is
        return _Survey(0, str(error) or type(error).__name__)
    return _Survey(devices, None if devices else "the driver reports no device")


def count() -> int:
    """Return the number of usable GPUs; 0 without CuPy or a driver. Never raises."""
    return _survey().devices


def why_none() -> str | None:
    """Return why there is no usable GPU; None if there is one."""
    return _survey().reason


@cache
def platform() -> Platform:
    """Return the platform that CuPy was built for, "cuda" or "hip"."""
    return "hip" if cupy().cuda.runtime.is_hip else "cuda"


def current() -> int:
    """Return the ordinal of the calling thread's current device."""
    return int(cupy().cuda.runtime.getDevice())


def current_getter() -> Callable[[], int]:
    """Return CuPy's function behind `current`, for use in every launch."""
    ask: Callable[[], int] = cupy().cuda.runtime.getDevice
    return ask


def on(ordinal: int) -> AbstractContextManager[object]:
    """Return a context in which device ``ordinal`` is the calling thread's current one."""
    context: AbstractContextManager[object] = cupy().cuda.Device(ordinal)
    return context


def stream(ordinal: int = -1) -> int:
    """Return the address of CuPy's current stream on device ``ordinal`` (-1: the current device); 0 is the default."""
    return int(current_stream(ordinal).ptr)


def current_stream(ordinal: int = -1) -> Any:
    """Return CuPy's current stream as an object."""
    return cupy().cuda.get_current_stream(ordinal)


class _Address:
    """Wraps a stream's address in the protocol by which CuPy accepts streams of other libraries."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


def driver_stream(stream: int) -> int:
    """Return the number of a stream that the driver accepts: on ROCm, not every release takes 1 for the default one."""
    return 0 if stream == LEGACY and platform() == "hip" else stream


def cupy_stream(pointer: int) -> Any:
    """Return the stream at an address, of any framework, as a stream of CuPy; 0 is the default one."""
    streams, pointer = cupy().cuda.Stream, driver_stream(pointer)
    return streams.from_external(_Address(pointer)) if pointer else streams.null


@contextmanager
def allocating(pointer: int, ordinal: int) -> Iterator[None]:
    """Make device ``ordinal`` current, and the stream at ``pointer`` CuPy's current one, which its allocator uses."""
    with on(ordinal), cupy_stream(pointer):
        yield


@cache
def target(ordinal: int) -> Target:
    """Return the properties of device ``ordinal`` that kernels depend on.

    Raises:
        DeviceError: there is no such device.
    """
    if not 0 <= ordinal < count():
        reason = why_none()
        needed = f"the ordinal of a GPU, below {count()}" if reason is None else f"a GPU, but there is none ({reason})"
        raise DeviceError(f"device needs {needed}, got {ordinal}")
    runtime = cupy().cuda.runtime
    if platform() == "hip":
        # The numbers of HIP's attributes differ between releases; its properties have names.
        properties = runtime.getDeviceProperties(ordinal)
        architecture = properties["gcnArchName"].decode().split(":")[0].removeprefix("gfx")
        return Target(
            platform="hip",
            arch=int(architecture, 16),
            device=ordinal,
            multiprocessors=int(properties["multiProcessorCount"]),
            warp=int(properties["warpSize"]),
            shared_bytes=int(properties["sharedMemPerBlock"]),
        )

    def attribute(name: str) -> int:
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), ordinal))

    capability = cupy().cuda.Device(ordinal).compute_capability  # "90", "103": major and one digit of minor
    return Target(
        platform="cuda",
        arch=int(capability),
        device=ordinal,
        multiprocessors=attribute("MultiProcessorCount"),
        warp=attribute("WarpSize"),
        shared_bytes=attribute("MaxSharedMemoryPerBlockOptin"),
    )


def name(ordinal: int) -> str:
    """Return the driver's name of device ``ordinal``, such as "NVIDIA H200"."""
    named: bytes = cupy().cuda.runtime.getDeviceProperties(ordinal)["name"]
    return named.decode()


def driver_version() -> int:
    """Return the version of CUDA or HIP that the driver supports, such as 13000 for CUDA 13.0."""
    return int(cupy().cuda.runtime.driverGetVersion())


def capturing(stream: int) -> bool:
    """Return whether the stream at an address is being captured into a graph; the default stream (0, 1) never is.

    The driver is not queried for the default stream: it returns an error while any blocking stream is captured.
    """
    return stream > LEGACY and _asking_capture()(stream)


@cache
def _asking_capture() -> Callable[[int], bool]:
    if platform() == "cuda":
        ask: Callable[[int], bool] = cupy().cuda.runtime.streamIsCapturing
        return ask
    asked = driver().hipStreamIsCapturing  # CuPy does not support this query on ROCm
    asked.argtypes = (ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))

    def ask_driver(stream: int) -> bool:
        state = ctypes.c_int()
        check(asked(stream, ctypes.byref(state)), "hipStreamIsCapturing", f"stream {stream:#x}")
        return state.value != 0

    return ask_driver


@cache
def driver() -> ctypes.CDLL:
    """Return the driver's library, libcuda or libamdhip64, for calls that CuPy does not have.

    On ROCm it is the library that is already mapped, which CuPy uses: handles of streams and kernels are only valid in
    that copy.

    Raises:
        DeviceError: the library cannot be loaded, or there are two HIP runtimes.
    """
    names: tuple[str, ...] = _DRIVERS[platform()]
    if platform() == "hip":
        here = loaded.hip_runtime()
        if isinstance(here, str):
            raise DeviceError(here)
        names = names if here is None else (str(here),)
    reasons = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            reasons.append(str(error))
    raise DeviceError(f"the driver cannot be loaded: {'; '.join(reasons)}")


def make_current(ordinal: int) -> None:
    """Make device ``ordinal`` and its context current on the calling thread; a new thread has no context."""
    runtime = cupy().cuda.runtime
    runtime.setDevice(ordinal)
    runtime.free(0)


def with_current(ordinal: int, function: Callable[..., int]) -> Callable[..., int]:
    """Return ``function``, which returns a status, wrapped to run with device ``ordinal`` current.

    With only one device, return the function itself.
    """
    if count() == 1:
        return function
    ask = current_getter()

    def call(*arguments: Any) -> int:
        if ask() == ordinal:
            return function(*arguments)
        with on(ordinal):
            return function(*arguments)

    return call


def retry_with_context(status: int, ordinal: int, function: Callable[..., int], *arguments: Any) -> int:
    """Call ``function`` again if its first call failed because the thread had no context, and return the new status.

    Otherwise return ``status``, that of the first call. The driver and cuBLASLt refuse calls of a thread that has used
    no device yet and so has no context; before the second call it gets the context of device ``ordinal``.
    """
    context = ctypes.c_void_p()
    if platform() != "cuda" or driver().cuCtxGetCurrent(ctypes.byref(context)) or context.value:
        return status
    with on(ordinal):
        make_current(ordinal)
        return function(*arguments)


def check(status: int, call: str, problem: object = "") -> None:
    """Raise BackendError with the name of the status, unless ``status`` is 0.

    Args:
        status: the result of the driver function (CUresult or hipError_t).
        call: the function's name.
        problem: a description of what it was called for.
    """
    if status:
        clear_error()
        suffix = f" for {problem}" if problem else ""
        raise BackendError(f"{call} failed with {status_name(status)}{suffix}")


def clear_error() -> None:
    """Clear HIP's sticky error of a failed call, which the thread's next launch, by any library, would report.

    Called wherever a status is not 0. CUDA's driver API has no such error.
    """
    if platform() == "hip":
        driver().hipGetLastError()


MEANINGS: Final = {901: ": what was called, or freed, before has ended the capture"}
"""What the name of a status does not say: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, hipErrorStreamCaptureInvalidated."""


def status_name(status: int) -> str:
    """Return the name and number of a driver's status, such as "CUDA_ERROR_INVALID_VALUE (1)"."""
    number = f"{status}{MEANINGS.get(status, '')}"
    if platform() == "hip":
        named = driver().hipGetErrorName
        named.restype = ctypes.c_char_p
        return f"{(named(status) or b'unknown').decode()} ({number})"
    name = ctypes.c_char_p()
    driver().cuGetErrorName(status, ctypes.byref(name))
    return f"{(name.value or b'unknown').decode()} ({number})"
