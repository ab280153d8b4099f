"""From (source, entry, constants) to something that can be launched with plain numbers.

A launch writes one frame (the launch configuration and the arguments, packed by one call of `struct`)
and hands it to the driver. Frames are taken from a pool, so threads never share one in use.
"""

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

from fp8core import compiler, device, sources
from fp8core.errors import BackendError
from fp8core.problem import Platform, Target

CLUSTER_DIMENSION: Final = 4
PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
COOPERATIVE: Final = 2
ATTRIBUTE: Final = struct.Struct("=I4x3I52x")
"""CUlaunchAttribute: its id, and a value of 64 bytes of which at most three words are used."""
CONFIGURATION: Final = "7I4xPPI4x"
"""CUlaunchConfig: grid, block, bytes of shared memory, stream, attributes, their count."""

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
def _function(target: Target, source: str, entry: str, constants: Constants, shared_bytes: int) -> int:
    request = compile_request(target, source, entry, dict(constants))
    with device.on(target.device):
        return compiler.function(compiler.load(request.text, request.options), request.entry, shared_bytes)


@cache
def _launch_function(platform: Platform) -> Callable[..., int]:
    """Return the driver's launch: CUDA's and HIP's take the same configuration, kernel, parameters and extras."""
    name = "hipDrvLaunchKernelEx" if platform == "hip" else "cuLaunchKernelEx"
    try:
        launch: Any = getattr(device.driver(), name)
    except AttributeError as error:
        needed = "ROCm 7" if platform == "hip" else "CUDA 12"
        raise BackendError(f"the driver has no {name}: {needed} or later is needed ({error})") from error
    launch.argtypes = (ctypes.c_void_p,) * 4
    launch.restype = ctypes.c_int
    found: Callable[..., int] = launch
    return found


class Frame(NamedTuple):
    """The memory of one launch in flight on a thread."""

    memory: ctypes.Array[ctypes.c_char]
    offset: int
    """Where the configuration begins in the memory, at an address divisible by 64."""
    configuration: int
    """Its address."""
    parameters: int
    """The address of the array of the arguments' addresses."""
    pointers: ctypes.Array[ctypes.c_void_p]
    """That array."""


class Launcher:
    """A compiled kernel with its block, called with a stream, a grid and the kernel's arguments."""

    def __init__(
        self,
        target: Target,
        function: int,
        entry: str,
        signature: str,
        block: Grid,
        shared_bytes: int,
        attributes: bytes,
    ) -> None:
        self.entry = entry
        self._target = target
        self._device = target.device
        self._function = function
        self._attributes = ctypes.create_string_buffer(attributes, len(attributes)) if attributes else None
        where = ctypes.addressof(self._attributes) if self._attributes is not None else 0
        self._before_stream = (*block, shared_bytes)
        self._after_stream = (where, len(attributes) // ATTRIBUTE.size)
        layout, self._offsets = frame_layout(signature)
        self._size, self._pack = layout.size, layout.pack_into
        self._pool: list[Frame] = []
        self._launch = _launch_function(target.platform)
        self._current = device.asking_current()

    def _frame(self) -> Frame:
        memory = ctypes.create_string_buffer(self._size + 64)
        offset = -ctypes.addressof(memory) % 64
        address = ctypes.addressof(memory) + offset
        pointers = (ctypes.c_void_p * max(len(self._offsets), 1))(*(address + offset for offset in self._offsets))
        return Frame(memory, offset, address, ctypes.addressof(pointers), pointers)

    def __call__(self, stream: int, grid: Grid, *arguments: int | float | bytes) -> None:
        """Launch on ``stream``; raises BackendError with the driver's status and the kernel's name."""
        pool = self._pool
        try:
            frame = pool.pop()
        except IndexError:
            frame = self._frame()
        memory, offset, configuration, parameters, _ = frame
        self._pack(memory, offset, *grid, *self._before_stream, stream, *self._after_stream, *arguments)
        if self._current() == self._device:
            status = self._launch(configuration, self._function, parameters, None)
        else:
            with device.on(self._device):
                status = self._launch(configuration, self._function, parameters, None)
        if status:
            status = self._again(status, configuration, parameters)
        pool.append(frame)
        if status:
            name = device.status_name(status)
            raise BackendError(f"launching {self.entry} with grid {grid} on {self._target}: {name}")

    def _again(self, status: int, configuration: int, parameters: int) -> int:
        """Return the status of a second try, for a thread that never spoke to the device has no context yet."""
        if status != device.INVALID_CONTEXT:
            return status
        device.bind(self._device)
        return self._launch(configuration, self._function, parameters, None)


@cache
def frame_layout(signature: str) -> tuple[struct.Struct, tuple[int, ...]]:
    """Return how a configuration and the arguments of ``signature`` lie in a frame, and where each argument is.

    A letter is one argument, a number before a letter one array by value; strings of bytes are aligned to 64.
    """
    layout, offsets, count = CONFIGURATION, [], ""
    for letter in signature:
        if letter.isdigit():
            count += letter
            continue
        size = struct.calcsize(layout)
        alignment = 64 if letter == "s" else struct.calcsize(letter)
        padding = -size % alignment
        offsets.append(size + padding)
        layout += f"{padding}x{count}{letter}" if padding else f"{count}{letter}"
        count = ""
    return struct.Struct(layout), tuple(offsets)


def prepare(
    target: Target,
    source: str,
    entry: str,
    constants: Mapping[str, int | float | str],
    signature: str,
    *,
    block: Grid | int,
    shared_bytes: int = 0,
    cluster: int = 1,
    programmatic: bool = False,
    cooperative: bool = False,
) -> Launcher:
    """Return ``entry`` of ``source`` compiled for ``target`` with ``constants``, ready to launch.

    Args:
        target: the device; the kernel is compiled and loaded at once, and only once for equal arguments.
        source: the file's name in cuda_src or hip_src, without its suffix.
        entry: the name of the ``extern "C"`` kernel.
        constants: what becomes ``-DNAME=VALUE``.
        signature: one `struct` letter an argument: P pointer, i int32, q int64, f float32; ``512i`` an array
            and ``128s`` bytes aligned to 64, both by value.
        block: threads of a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks of a cluster along x.
        programmatic: let the kernel begin before its predecessor on the stream has ended.
        cooperative: all blocks are resident at once, or the launch fails.
    """
    function = _function(target, source, entry, tuple(constants.items()), shared_bytes)
    attributes = b""
    if cluster > 1:
        attributes += ATTRIBUTE.pack(CLUSTER_DIMENSION, cluster, 1, 1)
    if programmatic and target.arch >= 90 and target.platform == "cuda":
        attributes += ATTRIBUTE.pack(PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0)
    if cooperative:
        attributes += ATTRIBUTE.pack(COOPERATIVE, 1, 0, 0)
    shape = (block, 1, 1) if isinstance(block, int) else block
    return Launcher(target, function, entry, signature, shape, shared_bytes, attributes)
