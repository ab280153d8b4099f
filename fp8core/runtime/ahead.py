"""Compiles kernels into the cache on disk before a call needs them, on all cores; the device need not be here.

Each core has a process of its own, as NVRTC serializes large parts of compilations in threads of one process.
"""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple

from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, jit, kernel_cache
from fp8core.target import Target

Progress = Callable[[int, int], object]
"""Called with the number of kernels that are compiled, and the number of all."""


def check_compiler(target: Target) -> None:
    """Refuse a target that the compiler of this machine, which is that of CuPy, cannot compile for.

    Raises:
        DeviceError: CuPy is not installed.
        BackendError: the compiler cannot be loaded, or compiles for the other platform.
    """
    version = compiler.version()
    if device.platform() != target.platform:
        raise BackendError(f"{target} needs CuPy for {target.platform}, got one with {version}")


class Missing(NamedTuple):
    """A kernel that the cache does not have."""

    file: str
    request: jit.Request


def missing(kernels: Iterable[jit.Asked]) -> list[Missing]:
    """Return the kernels that the cache does not have."""
    found = []
    for kernel in kernels:
        request = jit.compile_request(kernel.target, kernel.source, kernel.entry, dict(kernel.constants))
        file = compiler.file_name(kernel.target, request.text, request.options)
        if not kernel_cache.has(file):
            found.append(Missing(file, request))
    return found


def compile_all(kernels: Iterable[Missing], jobs: int | None = None, progress: Progress | None = None) -> None:
    """Compile kernels into the cache, in ``jobs`` processes, by default one for each core that this one may use.

    Raises:
        BackendError: the compiler refuses a kernel, or a kernel cannot be written, or a process was killed. Those that
            were compiled before are kept.
    """
    wanted = list(kernels)
    count = min(jobs or _cores(), len(wanted))
    if not count:
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        try:
            with _interrupts_ignored():
                running = [pool.submit(_compile, kernel) for kernel in wanted]
            for done, one in enumerate(as_completed(running), 1):
                one.result()
                if progress is not None:
                    progress(done, len(wanted))
        except BrokenProcessPool as error:
            needed = "jobs needs memory for each process that compiles, got one that was killed: fewer need less"
            raise BackendError(needed) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _compile(kernel: Missing) -> None:
    kernel_cache.store(kernel.file, compiler.compile_text(kernel.request.text, kernel.request.options))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Leave Ctrl-C to this process, which cancels what has not begun: those that it starts here never see it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
