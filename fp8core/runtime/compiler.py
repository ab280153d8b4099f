"""The run-time compiler: compiles a flattened source, loads the module and returns the addresses of its kernels."""

import os
import threading
from contextlib import suppress
from functools import cache
from importlib import metadata
from typing import Any, Final, NamedTuple

from fp8core.errors import BackendError
from fp8core.runtime import device, kernel_cache
from fp8core.target import Target

Module = Any
"""A ``cupy.cuda.Module``, which unloads its functions when it is freed."""

_ALLOWING: Final = threading.RLock()  # re-entrant, as are the locks of modules: garbage collection may take it again
_APPENDED: Final = "HIPRTC_COMPILE_OPTIONS_APPEND"
"""The environment variable by which hipRTC compiles with further options."""
_ALL: Final = 100
"""All shared memory of a multiprocessor, in percent."""


class Function(NamedTuple):
    """A kernel's address together with its module, which has to stay loaded as long as the address is used."""

    address: int
    module: Module


@cache
def version() -> str:
    """Return the name and version of the run-time compiler; from a wheel's metadata if possible, without loading it.

    CuPy loads NVRTC of the CUDA release that it was built for. PyTorch may have installed the wheel of another one.
    """
    cuda = device.cupy().cuda
    if device.platform() == "cuda":
        release = cuda.driver.get_build_version() // 1000
        for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
            with suppress(metadata.PackageNotFoundError):
                found = metadata.version(wheel)
                if found.split(".")[0] == str(release):
                    return f"{wheel} {found}"
    try:
        named = f"{device.platform()}rtc {cuda.nvrtc.getVersion()}"
        # hipRTC reports two numbers of its version, but its compiler may change with the third.
        return named if device.platform() == "cuda" else f"{named} of HIP {cuda.runtime.runtimeGetVersion()}"
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendError(f"the run-time compiler of {device.platform()} cannot be loaded: {error}") from error


def compile_text(text: str, options: tuple[str, ...], name: str = "fp8core") -> bytes:
    """Return the machine code of one flattened source; needs no device if ``options`` name the architecture.

    It calls ``cupy.cuda.nvrtc`` (NVRTC or hipRTC) and not ``RawModule(code=...)``, which does not give access to the
    machine code, appends its own ``-arch`` and needs a device. The compiler gets exactly ``options`` (RawModule adds
    ``-ftz=true``); CUDA needs ``-arch=sm_...`` among them.

    Raises:
        BackendError: the source does not compile; the message has the compiler's log.
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
        raise BackendError(
            f"{version()} cannot compile {name}: {error}\noptions: {' '.join(options)}\n{log}"
        ) from error
    finally:
        nvrtc.destroyProgram(program)
    return code


class Modules:
    """The loaded modules, one per device and compiled source; they stay loaded as long as this object lives.

    The process has one, `MODULES`. Modules are never unloaded: graphs hold the addresses of kernels, but no module.
    """

    def __init__(self) -> None:
        self._modules: dict[tuple[int, str, tuple[str, ...], str], Module] = {}
        self._turns: dict[tuple[int, str, tuple[str, ...], str], threading.RLock] = {}

    def __len__(self) -> int:
        return len(self._modules)

    def load(self, text: str, options: tuple[str, ...], name: str = "fp8core") -> Module:
        """Return the module of one flattened source, compiled or read from disk, loaded on the current device.

        It is loaded through CuPy's ``Module``, as RawModule does. If the machine code is on disk, the compiler is not
        loaded. Only one thread at a time compiles a given module, and others that want it wait; different modules
        compile in parallel. A failure is not remembered: the next call tries again.

        Raises:
            BackendError: the compiler fails, or the driver refuses to load the machine code.
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
    """Return the file name, in the cache on disk, of the machine code of one flattened source."""
    appended = os.environ.get(_APPENDED, "") if target.platform == "hip" else ""
    given = "\0".join((*options, appended) if appended else options)
    return kernel_cache.name_of(text, given, version(), f"{target.platform} {target.arch}", name)


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
    """Return a module's kernel, enabled for launches with ``shared_bytes`` of dynamic shared memory.

    Args:
        module: the module that has the kernel.
        entry: the kernel's name.
        shared_bytes: dynamic shared memory of a block.
        all_shared: on CUDA, set the kernel's preferred carveout to all shared memory. A multiprocessor can change the
            split between shared memory and L1 only while no block is resident. One that is configured for a kernel
            with little shared memory takes no block of a following kernel that needs more until all of its own blocks
            have ended.

    Raises:
        BackendError: the module has no such entry, or the device has less shared memory.
    """
    driver = device.cupy().cuda.driver
    try:
        address = int(module.get_function(entry).ptr)
        if shared_bytes and device.platform() == "cuda":
            # Until a function is told otherwise, its blocks have 48 KB, less what the function declares.
            most = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            with _ALLOWING:  # a plan that needs less must not lower the limit of one that needs more
                if driver.funcGetAttribute(most, address) < shared_bytes:
                    driver.funcSetAttribute(address, most, shared_bytes)
        if all_shared and device.platform() == "cuda":
            driver.funcSetAttribute(address, driver.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, _ALL)
    except RuntimeError as error:
        raise BackendError(f"kernel {entry} with {shared_bytes} bytes of shared memory: {error}") from error
    return Function(address, module)
