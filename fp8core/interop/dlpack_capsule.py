"""Arrays that offer only DLPack: read through a capsule, and ordered by the streams of the protocol."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from fp8core.errors import DeviceError, LayoutError
from fp8core.forks import ForkSafeLock
from fp8core.interop import cupy_arrays, dlpack, numpy_arrays
from fp8core.interop.dlpack_views import EXPORTER, WRITABLE_EXPORTER, target_of, view_of
from fp8core.interop.frameworks import Framework, only_instance
from fp8core.interop.launch_streams import LaunchStream
from fp8core.interop.names import exported
from fp8core.interop.tensor import Result, TensorView
from fp8core.runtime import device
from fp8core.runtime.releases import passed_query, releases
from fp8core.target import HOST, Target

_EXPORTING: Final = ForkSafeLock()
"""Only one capsule of a GPU's memory is made or dropped at a time. XLA's GPU plug-ins keep the exports of an array in a
vector without a lock, and JAX releases the interpreter's lock while it makes a capsule: if another thread drops a
capsule meanwhile, an export is lost, and the process aborts when the array is freed."""


_ELSEWHERE: Final = {True: (dlpack.CUDA, dlpack.ROCM), False: (dlpack.CPU,)}
"""The devices whose memory the host (True), or a GPU (False), cannot access."""


UNORDERED: Final = -1
"""The protocol's number for an export that no stream has to wait for. (None stands for the default stream: a wait of it
would end the capture of another stream.)"""


class Export:
    """A capsule that nothing consumes, safe to read on a stream; versioned if its producer supports that.

    ``stream`` is None for memory of the host. There no lock is held: JAX waits for the program that writes the array,
    and a garbage collection in one of its handlers may drop capsules.
    """

    __slots__ = ("_capsule", "_on_gpu")

    def __init__(self, x: Any, stream: int | None) -> None:
        self._on_gpu = stream is not None
        with self._turn():
            try:
                self._capsule = x.__dlpack__(stream=stream, max_version=(1, 0))
            except TypeError:  # producers older than DLPack 1.0 do not take max_version
                self._capsule = x.__dlpack__(stream=stream)

    def read(self) -> dlpack.Content:
        """Return the fields of the tensor in the capsule."""
        return dlpack.read(self._capsule)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # names of modules may be gone then
        if hasattr(self, "_capsule") and not exiting():
            with self._turn():
                del self._capsule

    def _turn(self) -> AbstractContextManager[object]:
        return _EXPORTING.held if self._on_gpu else nullcontext()


class KeepAlive:
    """Keeps a capsule, or another owner of memory, that a kernel reads on a stream unknown to the producer.

    As soon as the capsule is freed, the producer may reuse the memory, in the order of its own streams. So after the
    call, the capsule is kept until the stream has passed the launch.
    """

    __slots__ = ("capsule", "ordinal", "passed", "releases", "stream", "stream_owner")
    passed: Callable[[], bool] | None
    """The query whether the stream has passed the launch, once there is one."""

    def __init__(self, capsule: Any, stream: int, ordinal: int, owner: object = None) -> None:
        self.capsule, self.stream, self.ordinal = capsule, stream, ordinal
        self.releases = releases()
        self.releases.start()  # cannot be done in a destructor
        self.read_on(stream, owner)

    def read_on(self, stream: int, owner: object) -> None:
        """Note which stream reads the memory, and keep its object: a destroyed stream cannot be queried."""
        self.stream = stream
        self.stream_owner = device.current_stream(self.ordinal) if owner is None else owner

    def launched(self) -> None:
        """Note that the launch has been made: on another thread, the per-thread default stream is another stream."""
        if self.stream == device.PER_THREAD:
            self.passed = passed_query(self.stream, self.ordinal)

    def __del__(self, exiting: Callable[[], bool] = sys.is_finalizing) -> None:  # names of modules may be gone then
        if exiting():
            return
        if not hasattr(self, "passed"):
            self.passed = passed_query(self.stream, self.ordinal)
        self.releases.add(self.capsule, self.passed, self.ordinal, (self.ordinal, self.stream))


class ExporterFramework(Framework):
    """A framework whose stream and allocator are unknown. Results are CuPy arrays, or NumPy arrays on the host.

    `TensorView.held` of its views is a `KeepAlive` if something has to be kept.
    """

    def stream(self, target: Target) -> int:
        """Return CuPy's current stream: that of this framework is unknown."""
        return 0 if target.platform == "host" else device.stream(target.device)

    def empty(
        self,
        shape: tuple[int, ...],
        dtype: str,
        target: Target,
        strides: tuple[int, ...] | None = None,
        stream: int | None = None,
    ) -> Result:
        """Return an array of CuPy, or of NumPy on the host."""
        native = numpy_arrays.framework() if target.platform == "host" else cupy_arrays.framework()
        return native.empty(shape, dtype, target, strides, stream)

    def keep(self, view: TensorView, stream: int) -> None:
        """Do nothing: ``view.held`` keeps the memory until the stream that it was ordered for has passed the launch."""
        del view, stream

    def release(self, view: TensorView, stream: int) -> None:
        """Note that the launch has been made on ``stream``, for which the view was ordered."""
        del stream
        if isinstance(view.held, KeepAlive):
            view.held.launched()


class DLPackExporters(ExporterFramework):
    """Any exporter of DLPack."""

    name = "dlpack"
    orders_in_view = True

    def view(self, x: Any, name: str, launch: LaunchStream | None = None) -> TensorView:
        """Return a view of ``x`` that work on the stream of a launch may read at once, by default CuPy's current one.

        No other stream waits: if that of the launch is being captured, a wait of the default one would end the capture.
        """
        with exported(x, name, EXPORTER):
            kind, ordinal = (int(part) for part in x.__dlpack_device__())
            target = target_of(kind, ordinal, name)
            held: Export | KeepAlive
            if target is HOST:
                held = made = Export(x, None)
            else:
                chosen = None if launch is None else launch.on(target)
                stream = self.stream(target) if chosen is None else chosen
                with device.on(ordinal):  # JAX does not restore the current device
                    made = Export(x, in_protocol(stream, target))
                held = KeepAlive(made, stream, ordinal, None if launch is None else launch.explicit)
            found = made.read()
            if found.device_type in _ELSEWHERE[target is HOST]:
                raise BufferError(
                    f"it reports {dlpack.DEVICES[kind]}, but exports memory of {dlpack.DEVICES[found.device_type]}"
                )
        return view_of(found, target, self, x, name, held)

    def order_before(self, view: TensorView, stream: int, owner: object = None) -> None:
        """Make ``stream`` wait by another export for that stream, as the protocol defines it."""
        if isinstance(view.held, KeepAlive) and view.held.stream != stream:
            with device.on(view.target.device):
                Export(view.owner, in_protocol(stream, view.target))
            view.held.read_on(stream, owner)

    def check_writable(self, x: Any, name: str) -> None:
        """Raise LayoutError if ``x`` is marked read-only, which only versioned capsules can be; no stream waits."""
        with exported(x, name, WRITABLE_EXPORTER):
            made = Export(x, None if x.__dlpack_device__()[0] in dlpack.HOST_DEVICES else UNORDERED)
            read_only = made.read().read_only
        if read_only:
            raise LayoutError(f"{name} needs to be writable, got a read-only {type(x).__name__}")


def in_protocol(stream: int, target: Target) -> int:
    """Return the DLPack number of ``stream``: the default stream is 1 on CUDA and 0 on ROCm, where 1 and 2 are invalid.

    Raises:
        DeviceError: the stream is the per-thread default stream (2) on ROCm, for which the protocol has no number.
    """
    if target.platform == "cuda":
        return stream or 1
    if stream == device.PER_THREAD:
        raise DeviceError(
            "stream needs a number that DLPack has, got the per-thread default stream (2), which it cannot name on ROCm"
        )
    return 0 if stream == device.LEGACY else stream


@only_instance
def framework() -> DLPackExporters:
    """Return the only instance of `DLPackExporters`."""
    return DLPackExporters()
