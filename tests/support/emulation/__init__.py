"""Runs kernels on the CPU: their source is compiled as C++, and threads are fibers (engine.cpp says what is checked).

`Emulator.prepare` replaces `jit.prepare`, so the plans of `fp8core.kernels` run unchanged: with the same
source, constants and grids, and with addresses of NumPy arrays.
"""

import ctypes
import hashlib
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fp8core.runtime import args, jit
from fp8core.target import Target
from support.emulation.abi import Array, Launch, Schedule
from support.emulation.memory import Memory
from support.emulation.translating import as_cpp

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
UNDEFINED = "alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero"
FLAGS = (
    *("-std=c++17", "-Og", "-gdwarf-4", "-g1", "-w", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    *("-fsanitize=kernel-address", "--param=asan-instrumentation-with-call-threshold=0"),
    *("--param=asan-stack=0", "--param=asan-globals=1"),
    # GCC compiles less where nothing follows a report.
    *(f"-fsanitize={UNDEFINED}", f"-fno-sanitize-recover={UNDEFINED}"),
)
LINKED = ("-shared", "-nostdlib", "-lgcc")
"""Linker flags of a kernel's library: the engine defines libubsan's hooks, and links the system's libraries."""
ENGINE_LINKED = ("-Wl,--no-as-needed", "-lm", "-lc")
CUDA = Target("cuda", 90, 0, 4, 32, 200_000)
CUDA_80 = CUDA._replace(arch=80)
HIP_64 = Target("hip", 0x942, 0, 4, 64, 65_536)
HIP_32 = Target("hip", 0x1201, 0, 4, 32, 65_536)
"""Invented devices with few multiprocessors, so that grids stay small."""


class EmulationError(Exception):
    """An error that the engine reports: a wrong access, race or barrier, with its place in the kernel."""


class Kernel(NamedTuple):
    """A compiled kernel."""

    path: Path
    library: ctypes.CDLL
    call: int
    parameters: tuple[tuple[str, int], ...]
    """The kind (P pointer, i integer, f float, s struct) and the size in bytes of each parameter."""


class Emulator:
    """Compiles kernels into a folder, each once, and launches them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flush_subnormals: bool | None = None
        """Whether fp32 subnormals become zero; None to follow the platform's compile options."""
        self.schedule = Schedule()
        self.reads_need_fences = True
        """Whether threads that have read memory need a ``fence.proxy.async`` before TMA may write there."""
        self.watched: Memory | None = None
        self.launches: list[str] = []
        """The names of the kernels launched so far."""
        self._kernels: dict[tuple[str, tuple[str, ...], str, Target], Kernel] = {}
        self._includes: dict[str, str] = {}
        engine = self._build(
            "engine",
            (HERE / "engine.cpp").read_text(),
            ("-O2", "-std=c++17", "-shared", "-fPIC", f"-I{HERE}"),
            ENGINE_LINKED,
        )
        self._engine_path = engine
        self._engine = ctypes.CDLL(str(engine))
        self._engine.emulation_launch.argtypes = (ctypes.POINTER(Launch),)

    @contextmanager
    def watch(self) -> Iterator[Memory]:
        """Give a `Memory`: within the block launches may touch only its arrays; at the end its guards are checked."""
        self.watched = Memory()
        try:
            yield self.watched
            self.watched.check()
        finally:
            self.watched = None

    def prepare(
        self,
        target: Target,
        source: str,
        entry: str,
        constants: Mapping[str, int | float | str],
        arguments: type,
        *,
        block: tuple[int, int, int] | int,
        shared_bytes: int = 0,
        cluster: int = 1,
        programmatic: bool = False,
        cooperative: bool = False,
        all_shared: bool = False,
        **extents: int,
    ) -> "Launcher":
        """Return a launcher as `jit.prepare` does, but for addresses of host memory."""
        request = jit.compile_request(target, source, entry, constants)
        kernel = self.compile(
            request.text, tuple(o for o in request.options if o.startswith("-D")), request.entry, target
        )
        flush = self.flush_subnormals
        if flush is None:
            flush = any(o in request.options for o in ("-ftz=true", "-fgpu-flush-denormals-to-zero"))
        shape = (block, 1, 1) if isinstance(block, int) else block
        together = 0 if cooperative else cluster
        items = args.items(arguments, **extents)
        hip = target.platform == "hip"
        return Launcher(self, kernel, entry, items, shape, shared_bytes, target.warp, together, flush, hip)

    def compile(self, text: str, defines: tuple[str, ...], entry: str, target: Target = CUDA) -> Kernel:
        """Return the kernel ``entry`` of a flat source; raises EmulationError with the compiler's output."""
        asked = text, defines, entry, target
        if asked not in self._kernels:
            whole = as_cpp(text, defines, entry, self._words(target))
            path = self._build(entry, whole, (*FLAGS, *LINKED, f"-I{HERE}"), (str(self._engine_path),))
            library = ctypes.CDLL(str(path))
            kinds, sizes = ctypes.create_string_buffer(64), (ctypes.c_uint32 * 64)()
            count = library.emulated_signature(kinds, sizes)
            call = ctypes.cast(library.emulated_entry, ctypes.c_void_p).value or 0
            parameters = tuple(zip(kinds.value.decode(), sizes[:count], strict=True))
            self._kernels[asked] = Kernel(path, library, call, parameters)
        return self._kernels[asked]

    def _words(self, target: Target) -> str:
        """Return the name of the header that every kernel of a target includes. It is precompiled, since parsing it
        takes half of the time of a kernel's compilation."""
        define = f"#define __gfx{target.arch:x}__ 1\n" if target.platform == "hip" else ""
        if define not in self._includes:
            text = f'{define}#include "words.h"\n'
            self._includes[define] = self._build("words", text, (*FLAGS, f"-I{HERE}"), suffix=".h.gch").stem
        return self._includes[define]

    def _build(
        self, name: str, text: str, flags: tuple[str, ...], libraries: tuple[str, ...] = (), suffix: str = ".so"
    ) -> Path:
        """Return the path of the library or precompiled header compiled from a text; compile it if it is missing."""
        if COMPILER is None:
            raise EmulationError("the emulation needs g++")
        key = hashlib.sha256("\0".join((text, *flags, *libraries)).encode())
        for header in sorted(HERE.glob("*.h")):
            key.update(header.read_bytes())
        path = self.folder / f"{name}-{key.hexdigest()[:24]}{suffix}"
        if not path.exists():
            own = f"{path.stem}-{os.getpid()}"  # other processes may be compiling the same
            made, source = self.folder / own, self.folder / f"{own}.{'cpp' if suffix == '.so' else 'hpp'}"
            source.write_text(text)
            command = [COMPILER, str(source), *flags, "-o", str(made), *libraries]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise EmulationError(f"{name} does not compile as C++:\n{done.stderr[:8000]}")
            if suffix == ".so":
                source.unlink()
            else:
                source.rename(path.with_suffix(""))  # the compiler looks for the .gch beside this header
            made.rename(path)
        return path

    def launch(self, kernel: Kernel, name: str, launch: Launch) -> None:
        """Run one launch; raises EmulationError with the engine's report and the place in the kernel."""
        self.launches.append(name)
        report = ctypes.create_string_buffer(2048)
        watched = self.watched.arrays() if self.watched else []
        arrays = (Array * max(len(watched), 1))(*watched)
        launch.call, launch.report, launch.report_bytes = kernel.call, ctypes.addressof(report), len(report)
        launch.schedule, launch.reads_need_fences = self.schedule.numbers(), self.reads_need_fences
        launch.arrays, launch.array_count = ctypes.addressof(arrays), len(watched)
        if self._engine.emulation_launch(launch):
            under = f" [schedule: {self.schedule}]" if self.schedule != Schedule() else ""
            raise EmulationError(f"{name}: {report.value.decode()}{under}{self._place(kernel, launch.site)}")

    def _place(self, kernel: Kernel, site: int) -> str:
        base = next(
            (
                int(line.split("-")[0], 16)
                for line in Path("/proc/self/maps").read_text().splitlines()
                if str(kernel.path) in line
            ),
            0,
        )
        tool = shutil.which("addr2line")
        if not site or not base or tool is None:
            return ""
        command = [tool, "-i", "-e", str(kernel.path), hex(site - base - 1)]
        lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        places = [line.split(" (")[0] for line in lines if line and "words.h" not in line]
        return "\n  at " + "\n  from ".join(re.sub(r"^.*/((?:cuda|hip)_src/)", r"\1", place) for place in places)


class Launcher:
    """A kernel with its block size, with the interface of `launches.Launcher`."""

    def __init__(
        self,
        emulator: Emulator,
        kernel: Kernel,
        entry: str,
        items: Sequence[str],
        block: tuple[int, int, int],
        shared_bytes: int,
        warp: int,
        together: int,
        flush: bool,
        hip: bool = False,
    ) -> None:
        self.entry = entry
        self._emulator, self._kernel = emulator, kernel
        self._items = items
        self._fixed = (block, shared_bytes, warp, together, flush)
        self._hip = hip
        wanted = tuple((_kind(item), struct.calcsize(f"={item}".replace("P", "Q"))) for item in self._items)
        if wanted != kernel.parameters:
            raise EmulationError(
                f"{entry}: the arguments {' '.join(items)} mean {wanted}, the kernel takes {kernel.parameters}"
            )

    def __call__(self, stream: int, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Run the kernel to its end; the stream is ignored."""
        (block, shared_bytes, warp, together, flush) = self._fixed
        pieces, values = [], list(arguments)
        for item in self._items:
            count = int(item[:-1] or 1) if item[-1] != "s" else 1
            pieces.append(struct.pack(f"={item}".replace("P", "Q"), *values[:count]))
            del values[:count]
        if values:
            raise EmulationError(f"{self.entry}: {len(values)} arguments too many for {self._items}")
        threads = max(count * side for count, side in zip(grid, block, strict=True))
        if min(grid) < 1 or grid[0] >= 1 << 31 or max(grid[1:]) > 65535 or (self._hip and threads >= 1 << 32):
            raise EmulationError(f"{self.entry}: no device takes the grid {grid} of {block}")
        buffers = [np.zeros(len(piece) + 64, np.uint8) for piece in pieces]
        addresses = (ctypes.c_void_p * max(len(pieces), 1))()
        for i, (buffer, piece) in enumerate(zip(buffers, pieces, strict=True)):
            start = -buffer.ctypes.data % 64
            buffer[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
            addresses[i] = buffer.ctypes.data + start
        launch = Launch(
            arguments=ctypes.addressof(addresses),
            grid=grid,
            block=block,
            shared_bytes=shared_bytes,
            warp=warp,
            together=together,
            flush_subnormals=flush,
        )
        self._emulator.launch(self._kernel, self.entry, launch)

    def bind(self, grid: tuple[int, int, int], *numbers: Any) -> Callable[..., None]:
        """Return a function that launches, given the stream and the addresses, as `launches.Launcher.bind` does."""

        def bound(stream: int, *addresses: Any) -> None:
            rest, given = list(numbers), list(addresses)
            values: list[Any] = []
            for item in self._items:
                source = given if item[-1] in args.VARYING else rest
                values += [source.pop(0) for _ in range(int(item[:-1] or 1) if item[-1] != "s" else 1)]
            self(stream, grid, *values)

        return bound

    def bind_args(self, grid: tuple[int, int, int], given: Any) -> Callable[..., None]:
        """Return `bind` with the numbers of ``given``, as `launches.Launcher.bind_args` does."""
        return self.bind(grid, *args.numbers(given))


def _kind(item: str) -> str:
    if item[:-1]:
        return "s"
    return "i" if item in "iIqQ" else item
