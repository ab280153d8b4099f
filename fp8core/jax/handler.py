"""The handlers that XLA calls: one for each platform and stage, registered once per process."""

import ctypes
import math
from functools import cached_property
from threading import RLock
from typing import Any, Final, NamedTuple

import jax

from fp8core.errors import BackendError, DeviceError, Fp8Error
from fp8core.jax import frames
from fp8core.jax.programs import Prepared, Problem, parse
from fp8core.jax.subnormals import with_subnormals
from fp8core.runtime import device
from fp8core.runtime.limits import SCRATCH_ALIGNMENT
from fp8core.target import HOST, Target

TARGET: Final = "fp8core"
"""The name of the handlers in programs."""
PLATFORMS: Final = {"cpu": "cpu", "cuda": "CUDA", "rocm": "ROCM"}
"""By JAX's name of a platform in lowering: its name in the registration of handlers."""


class Extents(NamedTuple):
    """The shapes of a call's arguments and results when its program runs."""

    arguments: tuple[tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, count: int, arguments: int, result_count: int, results: int) -> "Extents":
        """Read the shapes from a frame's buffers."""
        return cls(tuple(frames.shapes(count, arguments)), tuple(frames.shapes(result_count, results)))

    def scratch(self, call: Prepared) -> int:
        """Return the bytes of scratch that the program gives a call, as one more result."""
        spare = self.results[call.results :]
        return spare[0][0] - (SCRATCH_ALIGNMENT - 1) if spare else 0

    def check(self, call: Prepared) -> None:
        """Refuse a call whose results need other memory than the program gives.

        Raises:
            BackendError: the program was made for results of other shapes.
        """
        for at, got in zip(sorted(call.described.results), self.results, strict=False):  # scratch is one more
            wanted = call.described.results[at].shape
            if math.prod(got) != math.prod(wanted):
                raise BackendError(f"the program needs room for a result of shape {wanted}, got {got}: trace it again")


class Platform:
    """The calls in programs for one platform, and the handlers that run them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready: dict[Any, Prepared] = {}
        """By the call's text, the device, and the shapes of the arguments if the text leaves some open. Plans are never
        dropped: if XLA records a program again, the launches must be the same."""
        self._texts: dict[Problem, tuple[str, int]] = {}
        self._parsed: dict[bytes, tuple[Problem, int | None]] = {}
        self._lock = RLock()  # reentrant, as a garbage collection under the lock may call back into this class
        self._instantiate = frames.HANDLER(self.instantiate)
        self._execute = frames.HANDLER(self.execute if name == "cpu" else self.launch)

    def register(self) -> None:
        """Register the handlers with XLA."""
        stages = {"instantiate": _capsule(self._instantiate), "execute": _capsule(self._execute)}
        jax.ffi.register_ffi_target(TARGET, stages, platform=PLATFORMS[self.name])

    @cached_property
    def ordinals(self) -> tuple[int, ...]:
        """The ordinals of the devices that a program may run on.

        Raises:
            DeviceError: this process has no device of the platform.
        """
        if self.name == "cpu":
            return (0,)
        try:
            here = jax.local_devices(backend=self.name)
        except RuntimeError as error:
            raise DeviceError(f"a program for {self.name} needs such a device to be planned for: {error}") from error
        return tuple(sorted({there.local_hardware_id for there in here}))

    @cached_property
    def here(self) -> bool:
        """Whether this process has a device of the platform."""
        try:
            return bool(self.ordinals)
        except DeviceError:
            return False

    def target(self, ordinal: int) -> Target:
        """Return the target of a device."""
        return HOST if self.name == "cpu" else device.target(ordinal)

    def plan(self, problem: Problem) -> tuple[str, int]:
        """Plan a problem for every device of the platform, which compiles and loads its kernels.

        Returns:
            The text to write into the program, and the bytes of the scratch.
        """
        with self._lock:
            known = self._texts.get(problem)
            if known is not None:
                return known
            planned = {ordinal: Prepared(problem, self.target(ordinal)) for ordinal in self.ordinals}
            scratch = max(call.scratch_bytes for call in planned.values())
            text = problem.text(scratch)
            for ordinal, call in planned.items():
                self.ready.setdefault((text.encode(), ordinal), call)
            return self._texts.setdefault(problem, (text, scratch))

    def prepared(self, text: bytes, ordinal: int, given: Extents | None = None) -> Prepared:
        """Return the prepared call of a text on a device. It is planned here if this process did not compile it.

        Args:
            text: the call, as the program has it.
            ordinal: the number of the device.
            given: the shapes of the call's arguments and results; required if the text leaves some open.

        Raises:
            BackendError: the program gives the call less scratch than it needs on this device, or other results.
        """
        problem, scratch = self._problem(text)
        key: tuple[Any, ...] = text, ordinal
        if not problem.fixed:
            if given is None:
                raise BackendError("a call of open shapes needs its operands to be planned")
            key, problem = (text, ordinal, given.arguments), problem.with_shapes(given.arguments)
        with self._lock:
            call = self.ready.get(key)
            if call is None:
                call = Prepared(problem, self.target(ordinal))
                room = scratch if given is None else given.scratch(call)
                if call.scratch_bytes > (room or 0):
                    raise BackendError(
                        f"the program needs {call.scratch_bytes} bytes of scratch on {call.target}, got {room}:"
                        " it was made for another device, by another release or with other tunings: compile it again"
                    )
                call = self.ready.setdefault(key, call)
        if given is not None:
            given.check(call)
        return call

    def _problem(self, text: bytes) -> tuple[Problem, int | None]:
        return self._parsed.get(text) or self._parsed.setdefault(text, parse(text))

    def instantiate(self, frame: int) -> int | None:
        """Plan a call when its program is loaded, possibly from another process, before any part of it runs."""
        extension, api, _, _, _, _, _, _, attributes = frames.read(frame)
        try:
            if extension and frames.answered(extension, api, 0):
                return None
            frames.check(frame)
            text = frames.text(attributes)
            if self._problem(text)[0].fixed:
                for ordinal in self.ordinals:
                    self.prepared(text, ordinal)
        except BaseException as error:  # noqa: BLE001 - no exception may leave a C callback
            return _error(api, error)
        return None

    def execute(self, frame: int) -> int | None:
        """Run a call on the host."""
        extension, api, _, _, count, arguments, result_count, results, attributes = frames.read(frame)
        try:
            if extension and frames.answered(extension, api, 0):
                return None
            text = frames.text(attributes)
            call = self.ready.get((text, 0))
            if call is None:
                call = self.prepared(text, 0, Extents.of(count, arguments, result_count, results))
            with_subnormals(call, 0, frames.addresses(count, arguments) + frames.addresses(result_count, results))
        except BaseException as error:  # noqa: BLE001 - nothing may leave a callback of C
            return _error(api, error)
        return None

    def launch(self, frame: int) -> int | None:
        """Launch a call on its stream, which XLA may be capturing."""
        extension, api, context, _, count, arguments, result_count, results, attributes = frames.read(frame)
        try:
            if extension and frames.answered(extension, api, frames.COMMAND_BUFFERS):
                return None
            text = frames.text(attributes)
            several = len(self.ordinals) > 1
            ordinal = frames.ordinal(api, context) if several else self.ordinals[0]
            call = self.ready.get((text, ordinal))
            if call is None:
                call = self.prepared(text, ordinal, Extents.of(count, arguments, result_count, results))
            addresses = frames.addresses(count, arguments) + frames.addresses(result_count, results)
            call(frames.stream(api, context), addresses)
        except BaseException as error:  # noqa: BLE001 - nothing may leave a callback of C
            return _error(api, error)
        return None


def scratch_extent(nbytes: Any) -> Any:
    """Return the bytes to request from XLA, so that a scratch of ``nbytes`` at a multiple of 256 fits."""
    return nbytes + SCRATCH_ALIGNMENT - 1


def _error(api: int, error: BaseException) -> int:
    code = frames.INVALID_ARGUMENT if isinstance(error, Fp8Error) else frames.INTERNAL
    return frames.error(api, f"{type(error).__name__}: {error}", code)


def _capsule(handler: Any) -> Any:
    return jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p).value)


ALL: Final = {name: Platform(name) for name in PLATFORMS}
"""By platform. They live as long as the process, as XLA holds the addresses of their handlers."""
