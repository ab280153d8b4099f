"""The handles of a BLASLt library: one per device for cuBLASLt, one per device and stream for hipBLASLt.

A handle of hipBLASLt has flags in device memory by which the blocks of a kernel wait for each other. Kernels of two
streams that share them wait forever or add each other's sums (ROCm/rocm-libraries pull request 10951). Making a handle
allocates and clears memory, which a capture cannot record.
"""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from threading import RLock, get_ident
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from fp8core.errors import BackendError
from fp8core.runtime import capture, device

if TYPE_CHECKING:
    from fp8core.kernels.gemm.blaslt.library import Library

MOST_STREAMS: Final = 64
"""Streams of a device that can have handles; each handle takes 26 MB of device memory."""

Key = tuple[int, int]


class HandleUse(NamedTuple):
    """The exclusive use of a handle: by one thread at a time, and one launch after the other."""

    lock: RLock
    """Held until the launch has ended. Reentrant: a garbage collection may come back to it in the same thread."""
    under_way: list[Any]
    """The streams of launches that the holder has begun, for which its next launch has to wait."""


class Handles:
    """The handles of a library, made when they are first needed.

    They live as long as the process: graphs use their memory, and at the end the driver may be gone before them.
    """

    def __init__(self, library: "Library") -> None:
        self._library = library
        self._of_device: dict[int, int] = {}
        self._of_stream: dict[int, dict[Key, int]] = {}
        self._spare: dict[int, int] = {}
        self._lock = RLock()  # reentrant: a garbage collection while it is held may come back here
        self._uses: dict[int, HandleUse] = {}

    def of_device(self, ordinal: int) -> int:
        """Return the handle of a device, for every launch of cuBLASLt and for queries."""
        with self._lock:
            if ordinal not in self._of_device:
                self._of_device[ordinal] = self._made(ordinal)
            return self._of_device[ordinal]

    def of_stream(self, ordinal: int, stream: int) -> int:
        """Return the handle of a stream; make it unless the stream is being captured.

        A stream that is captured before it has a handle takes the spare one, which is made together with others.

        Raises:
            BackendError: `MOST_STREAMS` streams have a handle; or a captured stream has none and there is no spare one.
        """
        key = stream, get_ident() if stream == device.PER_THREAD else 0
        with self._lock:
            known = self._of_stream.setdefault(ordinal, {})
            if key in known:
                return known[key]
            if len(known) >= MOST_STREAMS:
                raise BackendError(
                    f"{self._library.dialect.name} needs a handle for each stream, got more than {MOST_STREAMS}"
                    f" streams of device {ordinal}: use the same streams again"
                )
            captured = device.capturing(stream)
            found = self._spare.pop(ordinal, 0)
            if not found and captured:
                raise BackendError(
                    f"{self._library.dialect.name} needs a handle for each stream, made while it is not captured:"
                    f" multiply once on stream {stream:#x} before capturing it"
                )
            known[key] = found or self._made(ordinal)
            if not captured:
                self._spare[ordinal] = self._made(ordinal)
            return known[key]

    def use(self, ordinal: int) -> HandleUse:
        """Return the use of a device's handle, which a thread holds until its launch by the handle has ended."""
        with self._lock:
            return self._uses.setdefault(ordinal, HandleUse(RLock(), []))

    def keep_spare(self, ordinal: int) -> None:
        """Make the spare handle of a device if there is none; a captured stream may need it."""
        with self._lock:
            if ordinal not in self._spare:
                self._spare[ordinal] = self._made(ordinal)

    def _made(self, ordinal: int) -> int:
        out = ctypes.c_void_p()
        make: Callable[..., int] = self._library.function("Create")
        relaxed = capture.relaxed() if self._library.dialect.platform == "hip" else nullcontext()
        with device.on(ordinal), relaxed:
            status = make(ctypes.addressof(out))
        self._library.check("Create", status, f"device {ordinal}")
        return out.value or 0
