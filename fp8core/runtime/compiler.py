"""The run-time compiler: a flattened source in, a loaded module and the addresses of its kernels out."""

import threading
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any, Final, NamedTuple

from fp8core.errors import BackendError
from fp8core.problem import Target
from fp8core.runtime import device, kernel_cache

Module = Any
"""A ``cupy.cuda.Module``, which unloads its functions when it goes."""

_OPT_IN_ABOVE: Final = 48 * 1024
"""CUDA gives a block this much shared memory unasked; more has to be allowed function by function."""
_ALLOWING: Final = threading.RLock()  # a collection of garbage within may come back here, and to the locks of modules
_ALL: Final = 100
"""Of a multiprocessor's shared memory, in percent."""


class Function(NamedTuple):
    """A kernel's address together with the module that it is in: who keeps one keeps both."""

    address: int
    module: Module


@cache
def version() -> str:
    """Return the name and version of the run-time compiler, without loading it where a wheel's metadata tell.

    Of two wheels both are named: which one is loaded is CuPy's affair.
    """
    if device.platform() == "cuda":
        found = []
        for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
            with suppress(metadata.PackageNotFoundError):
                found.append(f"{wheel} {metadata.version(wheel)}")
        if found:
            return ", ".join(found)
    try:
        cuda = device.cupy().cuda
        named = f"{device.platform()}rtc {cuda.nvrtc.getVersion()}"
        # hipRTC tells two numbers, and its compiler may change with the third.
        return named if device.platform() == "cuda" else f"{named} of HIP {cuda.runtime.runtimeGetVersion()}"
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"the run-time compiler of {device.platform()} cannot be loaded: {error}") from error


def compile_text(text: str, options: tuple[str, ...], name: str = "fp8core") -> bytes:
    """Return the machine code of one flattened source; needs no device if ``options`` name the architecture.

    CuPy's compiler front ``cupy.cuda.nvrtc`` (NVRTC or hipRTC) is used and not ``RawModule(code=...)``, which
    keeps the machine code to itself, appends an ``-arch`` of its own and cannot be called without a device.
    The compiler gets ``options`` and nothing else (RawModule adds ``-ftz=true``); CUDA needs ``-arch=sm_...``.

    Raises:
        BackendError: with the compiler's log.
    """
    nvrtc = device.cupy().cuda.nvrtc
    try:
        program = nvrtc.createProgram(text, name, (), ())
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"{device.platform()}rtcCreateProgram failed for {name}: {error}") from error
    try:
        nvrtc.compileProgram(program, options)
        code: bytes = nvrtc.getCUBIN(program) if device.platform() == "cuda" else nvrtc.getPTX(program)
    except RuntimeError as error:
        log = nvrtc.getProgramLog(program)
        raise BackendError(f"{version()} refused {name}: {error}\noptions: {' '.join(options)}\n{log}") from error
    finally:
        nvrtc.destroyProgram(program)
    return code


class Modules:
    """Modules loaded once a device, by what they were compiled from; they stay loaded as long as this is there.

    The process has one, `MODULES`. It cannot be emptied: launches recorded in graphs hold addresses, and no module.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str, tuple[str, ...], str], Module] = {}
        self._turns: dict[tuple[int, str, tuple[str, ...], str], threading.RLock] = {}

    def __len__(self) -> int:
        return len(self._modules)

    def load(self, text: str, options: tuple[str, ...], name: str = "fp8core") -> Module:
        """Return the module of one flattened source, compiled or from the disk, loaded on the current device.

        It is loaded through CuPy's ``Module``, as RawModule does. With the machine code on disk no compiler is
        loaded. Threads that want the same module wait for one of them; others compile beside them. What fails is not
        kept, and is tried again by the next.

        Raises:
            BackendError: the compiler's log, or the driver's refusal to load what it made.
        """
        key = device.current(), text, options, name
        if key in self._modules:
            return self._modules[key]
        turn = self._turns.setdefault(key, threading.RLock())
        try:
            with turn:
                if key not in self._modules:
                    self._modules.setdefault(key, _load(*key))
        finally:
            self._turns.pop(key, None)
        return self._modules[key]


MODULES: Final = Modules()
load: Final = MODULES.load


def file_name(target: Target, text: str, options: tuple[str, ...], name: str = "fp8core") -> str:
    """Return what the machine code of one flattened source is called in the cache on disk."""
    return kernel_cache.name_of(text, "\0".join(options), version(), f"{target.platform} {target.arch}", name)


def _load(ordinal: int, text: str, options: tuple[str, ...], name: str) -> Module:
    here = device.target(ordinal)
    key = file_name(here, text, options, name)
    code, from_disk = kernel_cache.fetch(key, lambda: compile_text(text, options, name))
    try:
        return _placed(code, name, here)
    except BackendError as error:
        if not from_disk or (anew := compile_text(text, options, name)) == code:
            raise
        kernel_cache.replace(key, anew, str(error))
        return _placed(anew, name, here)


def _placed(code: bytes, name: str, where: Target) -> Module:
    module = device.cupy().cuda.Module()
    try:
        module.load(code)
    except RuntimeError as error:
        raise BackendError(f"the driver cannot load {name} for {where}: {error}") from error
    return module


def function(module: Module, entry: str, shared_bytes: int = 0, *, all_shared: bool = False) -> Function:
    """Return a module's kernel, allowed to ask for ``shared_bytes`` of dynamic shared memory.

    Args:
        module: what it is in.
        entry: its name.
        shared_bytes: of a block.
        all_shared: on CUDA, prefer multiprocessors with as much shared memory as there is. A multiprocessor divides its
            memory between shared memory and L1 anew only when it has no block; one that is set up for a kernel of
            little shared memory takes no block of the next kernel that needs more until it has ended all of its own.

    Raises:
        BackendError: the module has no such entry, or the device not so much shared memory.
    """
    driver = device.cupy().cuda.driver
    try:
        address = int(module.get_function(entry).ptr)
        if shared_bytes > _OPT_IN_ABOVE and device.platform() == "cuda":
            most = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with _ALLOWING:  # a plan with less must not take from one with more
                if driver.funcGetAttribute(most, address) < shared_bytes:
                    driver.funcSetAttribute(address, most, shared_bytes)
        if all_shared and device.platform() == "cuda":
            driver.funcSetAttribute(address, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _ALL)
    except RuntimeError as error:
        raise BackendError(f"kernel {entry} with {shared_bytes} bytes of shared memory: {error}") from error
    return Function(address, module)
