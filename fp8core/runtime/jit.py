"""From (source, entry, constants) to something that can be launched with plain numbers.

A launch writes into one frame (the launch configuration and the arguments) what differs from the launch before, the
stream and some arguments, and hands it to the driver. Frames are taken from a pool: threads never share one in use.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, NamedTuple

from fp8core.errors import BackendError
from fp8core.problem import Platform, Target
from fp8core.runtime import args, compiler, device, limits, partitions, sources

CLUSTER_DIMENSION: Final = 4
PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
COOPERATIVE: Final = 2
ATTRIBUTE: Final = struct.Struct("=I4x3I52x")
"""CUlaunchAttribute: its id, and a value of 64 bytes of which at most three words are used."""
CONFIGURATION: Final = struct.Struct("7I4xPPI4x")
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, their count."""
GRID: Final = struct.Struct("3I")
WORD: Final = 8
STREAM: Final = 4
"""Which of the configuration's words the stream is."""
ALIGNMENT: Final = 64
"""Of strings of bytes among the arguments."""
ADDRESS: Final = ctypes.c_void_p.from_param
"""Makes of an address what `ctypes` passes without converting it again."""

Constants = tuple[tuple[str, int | float | str], ...]
Grid = tuple[int, int, int]


class Request(NamedTuple):
    """What a compiler is given: one flat text, its options, and the name of the kernel in it."""

    text: str
    options: tuple[str, ...]
    entry: str


def compile_request(target: Target, source: str, entry: str, constants: Mapping[str, int | float | str]) -> Request:
    """Return what is compiled for ``entry`` of the device source ``source`` (a name without its suffix)."""
    defines = tuple(f"-D{name}={value}" for name, value in {"FP8CORE_WARP": target.warp, **constants}.items())
    return Request(sources.flatten(target.platform, source), (*standard_options(target), *defines), entry)


def standard_options(target: Target) -> tuple[str, ...]:
    """Return the options of every kernel: what is written is what is computed, subnormal fp32 numbers aside."""
    if target.platform == "hip":
        # An architecture without features suits all of its devices, whatever their xnack and sramecc say.
        architecture = f"--offload-arch=gfx{target.arch:x}"
        return ("-std=c++17", "-O3", architecture, "-ffp-contract=off", "-fgpu-flush-denormals-to-zero")
    suffix = "a" if target.arch in (90, 100, 103) else ""
    return ("-std=c++17", "-default-device", f"-arch=sm_{target.arch}{suffix}", "-fmad=false", "-ftz=true")


@cache
def _function(
    target: Target, source: str, entry: str, constants: Constants, shared_bytes: int, all_shared: bool
) -> compiler.Function:
    request = compile_request(target, source, entry, dict(constants))
    with device.on(target.device):
        module = compiler.load(request.text, request.options)
        return compiler.function(module, request.entry, shared_bytes, all_shared=all_shared)


@cache
def _launch_function(platform: Platform, cooperative: bool = False) -> Callable[..., int]:
    """Return the driver's launch.

    It has no argument types: `ctypes` passes what `ADDRESS` converted once as it is. HIP's counterpart of
    cuLaunchKernelEx, hipDrvLaunchKernelEx, is not used: up to about ROCm 7.13 a capture leaves its launches out
    (ROCm/rocm-systems pull request 7309). hipModuleLaunchKernel is captured by every release.
    """
    hip = "hipModuleLaunchCooperativeKernel" if cooperative else "hipModuleLaunchKernel"
    name, needed = (hip, "ROCm 5") if platform == "hip" else ("cuLaunchKernelEx", "CUDA 12")
    try:
        launch: Callable[..., int] = device.driver()[name]
    except AttributeError as error:
        raise BackendError(f"the driver has no {name}: {needed} or later is needed ({error})") from error
    return launch


class Frame:
    """The memory of one launch in flight on a thread: arguments that vary, the configuration, the other arguments."""

    __slots__ = ("_pointers", "arguments", "configuration", "stream", "write")

    def __init__(self, bound: "Bound") -> None:
        room = ctypes.create_string_buffer(len(bound.image) + ALIGNMENT)
        start = -ctypes.addressof(room) % ALIGNMENT
        address = ctypes.addressof(room) + start
        memory = memoryview(room).cast("B")[start : start + len(bound.image)]
        memory[:] = bound.image
        self.configuration = memory[bound.middle : bound.middle + CONFIGURATION.size].cast("Q")
        """As words."""
        self.stream = 0
        """The one in the configuration."""
        self.write = partial(bound.variable.pack_into, memory, 0)
        """Takes what each launch writes anew."""
        self._pointers = (ctypes.c_void_p * max(len(bound.offsets), 1))(*(address + at for at in bound.offsets))
        self.arguments = bound.handed_over(self.configuration, address + bound.middle, ctypes.addressof(self._pointers))
        """Of the launch."""


class Bound:
    """A kernel whose launches write their stream and some arguments into a frame; all else is written there once.

    With a grid it is that of every launch. Without, its three numbers are given after the arguments.
    """

    def __init__(
        self,
        launcher: "Launcher",
        given: Sequence[int],
        grid: Grid | None = None,
        numbers: tuple[int | float | bytes, ...] = (),
    ) -> None:
        items = launcher.items
        fixed = [i for i in range(len(items)) if i not in given]
        text, offsets, end = lay_out([items[i] for i in given], 0)
        self.middle = -(-end // WORD) * WORD
        fixed_text, fixed_offsets, size = lay_out([items[i] for i in fixed], self.middle + CONFIGURATION.size)
        self.offsets = [offset for _, offset in sorted(zip((*given, *fixed), (*offsets, *fixed_offsets), strict=True))]
        self.variable = struct.Struct(text if grid else f"{text}{self.middle - end}x3I")
        image = bytearray(size)
        shape = (*(grid or (0, 0, 0)), *launcher.block, launcher.shared_bytes)
        CONFIGURATION.pack_into(image, self.middle, *shape, 0, *launcher.attributes)
        struct.pack_into(fixed_text, image, self.middle + CONFIGURATION.size, *numbers)
        self.image, self.function = bytes(image), launcher.function.address
        self._launcher = launcher
        self._launch = device.calling(launcher.target.device, self._function())
        self._pool: list[Frame] = []

    def _function(self) -> Callable[..., int]:
        """Return what launches, given `handed_over`, and returns the driver's status."""
        return _launch_function(self._launcher.target.platform)

    def handed_over(self, configuration: "memoryview[int]", address: int, pointers: int) -> tuple[object, ...]:
        """Return a frame as `_function` takes it: its configuration and where that lies, and where its arguments do."""
        del configuration
        return ADDRESS(address), ADDRESS(self.function), ADDRESS(pointers), None

    def launch(self, stream: int, *arguments: int | float | bytes) -> None:
        """Launch on ``stream``; raises LaunchError with the driver's status and the kernel's name."""
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
            raise self._refused(GRID.unpack_from(frame.configuration), device.status_name(status), status)
        self._pool.append(frame)

    def _refused(self, grid: tuple[int, ...], reason: str, status: int) -> partitions.LaunchError:
        """Return the error of a launch that did not happen."""
        message = f"launching {self._launcher.entry} with grid {grid} on {self._launcher.target}: {reason}"
        return partitions.LaunchError(message, status)


class HipBound(Bound):
    """A kernel as HIP launches it: by a function that takes the configuration as numbers, one by one."""

    def __init__(
        self,
        launcher: "Launcher",
        given: Sequence[int],
        grid: Grid | None = None,
        numbers: tuple[int | float | bytes, ...] = (),
    ) -> None:
        self._grid = grid
        self._block = (*launcher.block, launcher.shared_bytes)
        self._cooperative = launcher.cooperative
        self._after = () if launcher.cooperative else (None,)
        self._drivers = _launch_function("hip", launcher.cooperative)
        super().__init__(launcher, given, grid, numbers)

    def _function(self) -> Callable[..., int]:
        return self._start

    def handed_over(self, configuration: "memoryview[int]", address: int, pointers: int) -> tuple[object, ...]:
        """Return a frame as `_start` takes it."""
        del address
        return configuration, ADDRESS(self.function), ADDRESS(pointers)

    def _start(self, configuration: "memoryview[int]", kernel: object, parameters: object) -> int:
        """Launch, and return the driver's status; raises LaunchError with why the driver was not asked."""
        stream, grid = configuration[STREAM], self._grid or GRID.unpack_from(configuration)
        if any(count * threads > limits.HIP_THREADS for count, threads in zip(grid, self._block, strict=False)):
            reason = f"HIP needs at most {limits.HIP_THREADS} threads along each axis, got blocks of {self._block[:3]}"
            raise self._refused(grid, reason, partitions.NOT_ASKED)
        if self._cooperative and device.capturing(stream):
            raise self._refused(grid, "HIP needs a stream that is not captured for it", partitions.NOT_CAPTURED)
        status = self._drivers(kernel, *grid, *self._block, ADDRESS(device.known(stream)), parameters, *self._after)
        if status:
            device.drain()
        return status


BOUND: Final[dict[Platform, type[Bound]]] = {"cuda": Bound, "hip": HipBound}


class Launcher:
    """A compiled kernel with its block, called with a stream, a grid and the kernel's arguments.

    It keeps the kernel's module loaded, as each of its launches does: `bind` returns a method that keeps the launcher.
    """

    def __init__(
        self,
        target: Target,
        function: compiler.Function,
        entry: str,
        items: Sequence[str],
        block: Grid,
        shared_bytes: int,
        attributes: bytes,
        cooperative: bool = False,
    ) -> None:
        self.target, self.function, self.entry, self.items = target, function, entry, items
        self.block, self.shared_bytes, self.cooperative = block, shared_bytes, cooperative
        self._kept = ctypes.create_string_buffer(attributes, max(len(attributes), 1))
        self.attributes = (ctypes.addressof(self._kept) if attributes else 0, len(attributes) // ATTRIBUTE.size)
        self._bound = BOUND[target.platform]
        self._all = self._bound(self, range(len(self.items))).launch

    def __call__(self, stream: int, grid: Grid, *arguments: int | float | bytes) -> None:
        """Launch on ``stream``; raises BackendError with the driver's status and the kernel's name."""
        self._all(stream, *arguments, *grid)

    def bind(self, grid: Grid, *numbers: int | float) -> Callable[..., None]:
        """Return the launch on ``grid`` with the arguments that are ``numbers``: it wants the stream and the others.

        Those are the addresses and strings of bytes, in their order: half of the host time of a launch with many
        arguments is packing what never changes.
        """
        varying = [i for i, item in enumerate(self.items) if item[-1] in args.VARYING]
        return self._bound(self, varying, grid, numbers).launch

    def bind_args(self, grid: Grid, given: Any) -> Callable[..., None]:
        """Return `bind` with the numbers of ``given``, an instance of the kernel's declared arguments."""
        return self.bind(grid, *args.numbers(given))


def lay_out(items: Sequence[str], start: int) -> tuple[str, tuple[int, ...], int]:
    """Return how arguments lie from the offset ``start`` on: a format of `struct`, their offsets, and their end.

    Strings of bytes are aligned to `ALIGNMENT`, all others to their own size.
    """
    text, offsets, end = "", [], start
    for item in items:
        alignment = ALIGNMENT if item[-1] == "s" else struct.calcsize(item[-1])
        padding = -end % alignment
        offsets.append(end + padding)
        text += f"{padding}x{item}"
        end = offsets[-1] + struct.calcsize(item)
    return text, tuple(offsets), end


def prepare(
    target: Target,
    source: str,
    entry: str,
    constants: Mapping[str, int | float | str],
    arguments: type,
    *,
    block: Grid | int,
    shared_bytes: int = 0,
    cluster: int = 1,
    programmatic: bool = False,
    cooperative: bool = False,
    all_shared: bool = False,
    **extents: int,
) -> Launcher:
    """Return ``entry`` of ``source`` compiled for ``target`` with ``constants``, ready to launch.

    Args:
        target: the device; the kernel is compiled and loaded at once, and only once for equal arguments.
        source: the file's name in cuda_src or hip_src, without its suffix.
        entry: the name of the ``extern "C"`` kernel.
        constants: what becomes ``-DNAME=VALUE``.
        arguments: the declaration of the kernel's arguments (`fp8core.runtime.args`).
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster along x.
        programmatic: let the kernel begin before its predecessor on the stream has ended.
        cooperative: all blocks are resident at once, or the launch fails.
        all_shared: leave multiprocessors ready for kernels that need all shared memory (`compiler.function`).
        **extents: how many numbers each array among the arguments holds.
    """
    function = _function(target, source, entry, tuple(constants.items()), shared_bytes, all_shared)
    attributes = b""
    if cluster > 1:
        attributes += ATTRIBUTE.pack(CLUSTER_DIMENSION, cluster, 1, 1)
    if programmatic and target.arch >= 90 and target.platform == "cuda":
        attributes += ATTRIBUTE.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)
    if cooperative and target.platform == "cuda":
        attributes += ATTRIBUTE.pack(COOPERATIVE, 1, 0, 0)
    shape = (block, 1, 1) if isinstance(block, int) else block
    items = args.items(arguments, **extents)
    return Launcher(target, function, entry, items, shape, shared_bytes, attributes, cooperative)
