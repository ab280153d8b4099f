"""Launches of compiled kernels: passes a kernel's address, launch configuration and arguments to the driver.

A frame holds the configuration and the arguments of a launch. A launch takes a frame from a pool, writes the stream and
the arguments that vary into it, and passes it to the driver. Threads never share a frame that is in use.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Final

from fp8core.errors import BackendError, DeviceError
from fp8core.runtime import args, compiler, device, limits
from fp8core.target import Platform, Target

ATTRIBUTE: Final = struct.Struct("=I4x3I52x")
"""CUlaunchAttribute: its id, and a value of 64 bytes of which at most three 32-bit words are used."""
CONFIGURATION: Final = struct.Struct("7I4xPPI4x")
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, number of attributes."""
WORD: Final = 8
STREAM: Final = 4
"""The index of the stream in the configuration, in units of `WORD` bytes."""
ALIGNMENT: Final = 64
"""The alignment in bytes of arguments that are byte strings."""
ADDRESS: Final = ctypes.c_void_p.from_param
"""Converts an address, once, to an object that `ctypes` passes as it is."""

NOT_CAPTURED: Final = -2
"""Used instead of a status: a cooperative launch on a captured stream, which not every ROCm release can record."""
TOO_LARGE: Final = (720, 912, NOT_CAPTURED)
"""The statuses after which another kernel replaces a cooperative grid or a cluster, as not all blocks fit at once:
CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE (hipErrorCooperativeLaunchTooLarge), CUDA_ERROR_INVALID_CLUSTER_SIZE and
`NOT_CAPTURED`."""

Dim3 = tuple[int, int, int]
"""The blocks of a grid, or the threads of a block, along x, y and z."""


class LaunchError(BackendError):
    """A launch that the driver refused; nothing ran."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle both arguments: a pool of processes waits for ever for an error that cannot be unpickled."""
        return type(self), (*self.args, self.status), self.__dict__


@cache
def _launch_function(platform: Platform, cooperative: bool = False) -> Callable[..., int]:
    """Return the driver's launch function.

    It has no argument types, so that `ctypes` passes objects made by `ADDRESS` without converting them again.
    hipDrvLaunchKernelEx, HIP's counterpart of cuLaunchKernelEx, is not used: up to about ROCm 7.13 its launches are
    missing from captures (ROCm/rocm-systems pull request 7309). Every release captures hipModuleLaunchKernel.
    """
    hip = "hipModuleLaunchCooperativeKernel" if cooperative else "hipModuleLaunchKernel"
    name, needed = (hip, "ROCm 5") if platform == "hip" else ("cuLaunchKernelEx", "CUDA 12")
    try:
        launch: Callable[..., int] = device.driver()[name]
    except AttributeError as error:
        raise BackendError(f"the driver has no {name}: {needed} or later is needed ({error})") from error
    return launch


class Frame:
    """The memory of one launch: the arguments that vary, the configuration, and the other arguments, in this order."""

    __slots__ = ("_pointers", "arguments", "configuration", "stream", "write")

    def __init__(self, bound: "Bound") -> None:
        room = ctypes.create_string_buffer(len(bound.image) + ALIGNMENT)
        start = -ctypes.addressof(room) % ALIGNMENT
        address = ctypes.addressof(room) + start
        memory = memoryview(room).cast("B")[start : start + len(bound.image)]
        memory[:] = bound.image
        self.configuration = memory[bound.middle : bound.middle + CONFIGURATION.size].cast("Q")
        """The launch configuration, as 64-bit integers."""
        self.stream = 0
        """The stream in the configuration."""
        self.write = partial(bound.variable.pack_into, memory, 0)
        """Writes the arguments that vary."""
        self._pointers = (ctypes.c_void_p * max(len(bound.offsets), 1))(*(address + at for at in bound.offsets))
        self.arguments = bound.handed_over(self.configuration, address + bound.middle, ctypes.addressof(self._pointers))
        """The arguments of the launch function."""


class Bound:
    """A kernel whose launches write their stream and some arguments into a frame; everything else is written once.

    Args:
        launcher: the kernel.
        given: the indices of the arguments that a launch takes.
        grid: the grid of all launches.
        numbers: the other arguments.
    """

    def __init__(
        self, launcher: "Launcher", given: Sequence[int], grid: Dim3, numbers: tuple[int | float, ...]
    ) -> None:
        items = launcher.items
        fixed = [i for i in range(len(items)) if i not in given]
        text, offsets, end = lay_out([items[i] for i in given], 0)
        self.middle = -(-end // WORD) * WORD
        fixed_text, fixed_offsets, size = lay_out([items[i] for i in fixed], self.middle + CONFIGURATION.size)
        self.offsets = [offset for _, offset in sorted(zip((*given, *fixed), (*offsets, *fixed_offsets), strict=True))]
        self.variable = struct.Struct(text)
        image = bytearray(size)
        shape = (*grid, *launcher.block, launcher.shared_bytes)
        CONFIGURATION.pack_into(image, self.middle, *shape, 0, *launcher.attributes)
        struct.pack_into(fixed_text, image, self.middle + CONFIGURATION.size, *numbers)
        self.image, self.function = bytes(image), launcher.function.address
        self._launcher, self._grid = launcher, grid
        self._launch = device.with_current(launcher.target.device, self._function())
        self._pool: list[Frame] = []

    def _function(self) -> Callable[..., int]:
        """Return the launch function: it takes the arguments of `handed_over` and returns the driver's status."""
        return _launch_function(self._launcher.target.platform)

    def handed_over(self, configuration: "memoryview[int]", address: int, pointers: int) -> tuple[object, ...]:
        """Return the arguments of `_function` for a frame.

        Args:
            configuration: the frame's configuration.
            address: the address of the configuration.
            pointers: the address of the array of pointers to the kernel's arguments.
        """
        del configuration
        return ADDRESS(address), ADDRESS(self.function), ADDRESS(pointers), None

    def launch(self, stream: int, *arguments: int | bytes) -> None:
        """Launch on ``stream``; raise LaunchError with the driver's status and the kernel's name if that fails."""
        try:
            frame = self._pool.pop()
        except IndexError:
            frame = Frame(self)
        if frame.stream != stream:
            frame.configuration[STREAM] = frame.stream = stream
        frame.write(*arguments)
        status = self._launch(*frame.arguments)
        if status:
            status = device.retry_with_context(status, self._launcher.target.device, self._launch, *frame.arguments)
        if status:
            raise self._refused(device.status_name(status), status)
        self._pool.append(frame)

    def _refused(self, reason: str, status: int) -> LaunchError:
        """Return the error of a launch that was not made."""
        message = f"launching {self._launcher.entry} with grid {self._grid} on {self._launcher.target}: {reason}"
        return LaunchError(message, status)


class HipBound(Bound):
    """A kernel launched by HIP's function, which takes the configuration as separate numbers."""

    def __init__(
        self, launcher: "Launcher", given: Sequence[int], grid: Dim3, numbers: tuple[int | float, ...]
    ) -> None:
        self._block = (*launcher.block, launcher.shared_bytes)
        self._cooperative = launcher.cooperative
        self._after = () if launcher.cooperative else (None,)
        self._drivers = _launch_function("hip", launcher.cooperative)
        super().__init__(launcher, given, grid, numbers)

    def _function(self) -> Callable[..., int]:
        return self._start

    def handed_over(self, configuration: "memoryview[int]", address: int, pointers: int) -> tuple[object, ...]:
        """Return the arguments of `_start` for a frame."""
        del address
        return configuration, ADDRESS(self.function), ADDRESS(pointers)

    def _start(self, configuration: "memoryview[int]", kernel: object, parameters: object) -> int:
        """Launch, and return the driver's status; raise LaunchError for a cooperative grid on a captured stream."""
        stream = configuration[STREAM]
        if self._cooperative and device.capturing(stream):
            raise self._refused("HIP needs a stream that is not captured for it", NOT_CAPTURED)
        where = ADDRESS(device.driver_stream(stream))
        status = self._drivers(kernel, *self._grid, *self._block, where, parameters, *self._after)
        if status:
            device.clear_error()
        return status


BOUND: Final[dict[Platform, type[Bound]]] = {"cuda": Bound, "hip": HipBound}


class Launcher:
    """A compiled kernel with its block shape. `bind` returns a launch of it.

    It keeps the kernel's module loaded. So does each function that `bind` returns, as it keeps the launcher.
    """

    def __init__(
        self,
        target: Target,
        function: compiler.Function,
        entry: str,
        items: Sequence[str],
        block: Dim3,
        shared_bytes: int,
        attributes: bytes,
        cooperative: bool = False,
    ) -> None:
        self.target, self.function, self.entry, self.items = target, function, entry, items
        self.block, self.shared_bytes, self.cooperative = block, shared_bytes, cooperative
        self._kept = ctypes.create_string_buffer(attributes, max(len(attributes), 1))
        self.attributes = (ctypes.addressof(self._kept) if attributes else 0, len(attributes) // ATTRIBUTE.size)

    def bind(self, grid: Dim3, *numbers: int | float) -> Callable[..., None]:
        """Return a launch with ``grid`` and the constant arguments ``numbers``; it takes the stream and the other ones.

        The other arguments are the addresses and byte strings, in their order. Half of the host time of a launch with
        many arguments would otherwise go into packing arguments that never change.

        Raises:
            UnsupportedProblemError: no launch can have so many blocks.
        """
        limits.check_grid(self.target, self.entry, grid, self.block[0])
        varying = [i for i, item in enumerate(self.items) if item[-1] in args.VARYING]
        return BOUND[self.target.platform](self, varying, grid, numbers).launch

    def bind_args(self, grid: Dim3, given: Any) -> Callable[..., None]:
        """Call `bind` with the numbers of ``given``, an instance of the kernel's declared arguments."""
        return self.bind(grid, *args.numbers(given))


class AbsentLauncher(Launcher):
    """The launcher of a kernel of a device that is not in this machine, for plans whose kernels are compiled ahead."""

    def __init__(self, target: Target, entry: str) -> None:
        super().__init__(target, compiler.Function(0, None), entry, (), (1, 1, 1), 0, b"")

    def bind(self, grid: Dim3, *numbers: int | float) -> Callable[..., None]:
        """Return a launch that is not made."""
        del grid, numbers

        def launch(_stream: int, *_arguments: int | bytes) -> None:
            raise DeviceError(f"{self.entry} cannot be launched: {self.target} is not in this machine")

        return launch


def lay_out(items: Sequence[str], start: int) -> tuple[str, tuple[int, ...], int]:
    """Return the layout of arguments from offset ``start`` on: a format of `struct`, the offsets, and the end.

    Byte strings are aligned to `ALIGNMENT`, all other arguments to their size.
    """
    text, offsets, end = "", [], start
    for item in items:
        alignment = ALIGNMENT if item[-1] == "s" else struct.calcsize(item[-1])
        padding = -end % alignment
        offsets.append(end + padding)
        text += f"{padding}x{item}"
        end = offsets[-1] + struct.calcsize(item)
    return text, tuple(offsets), end
