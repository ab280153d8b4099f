"""Compiles the kernels of a GPU suite before its first test, on all cores; the tests would compile them one by one.

Each core has its own process, since NVRTC serializes large parts of compilations in threads of one process.

docs/results/gpu-suite-kernels.txt lists the kernels of the last whole run, one per line: source, entry and constants.
Without the list, another process plans the problems of the compilation tests. The list need not be exact: a missing
kernel is compiled when a test needs it, and one that is not needed any more costs a moment. A whole run writes the list
again, beside the receipt; with ``$FP8CORE_RECEIPT_DIR`` it also appends each line at once, for a run that is stopped.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, jit, kernel_cache
from fp8core.target import Target
from support import plans, receipt

LIST = "gpu-suite-kernels.txt"
REPORT = "kernels"
"""Under this name a worker of ``-n`` reports what its tests asked for."""


def line_of(source: str, entry: str, constants: Mapping[str, Any]) -> str:
    """Return a kernel as a line of the list."""
    return " ".join([source, entry, *(f"{name}={value}" for name, value in constants.items())])


def compiled_ahead(target: Target, line: str) -> bool:
    """Compile the kernel of a line into the cache on disk, unless it is there; return whether that succeeded.

    A line of an older tree may name a source that no longer exists, or lack a constant.
    """
    try:
        source, entry, *defined = line.split()
        request = jit.compile_request(target, source, entry, dict(item.split("=", 1) for item in defined))
        name = compiler.file_name(target, request.text, request.options)
        kernel_cache.fetch(name, lambda: compiler.compile_text(request.text, request.options))
    except (BackendError, OSError, ValueError, KeyError):
        return False
    return True


def planned(target: Target) -> list[str]:
    """Return lines for the kernels of `support.plans`, which are planned but not compiled.

    The tables cache these plans, which launch nothing: the process cannot be used for anything else afterwards.
    """
    lines: dict[str, None] = {}

    def prepare(_: Target, source: str, entry: str, constants: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        lines[line_of(source, entry, constants)] = None
        return Nothing()

    jit.prepare = prepare
    for operation in plans.OPERATIONS.values():
        for plan in operation(target):
            plan()
    return list(lines)


def planned_elsewhere(target: Target) -> list[str]:
    """Return the result of `planned` in a new process; empty if that fails."""
    code = f"from support import warm; print(*warm.planned(warm.Target(*{tuple(target)!r})), sep='\\n')"
    paths = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


class Nothing(SimpleNamespace):
    """A launcher that launches nothing."""

    def __call__(self, *arguments: Any) -> None:
        return None

    def bind(self, *arguments: Any) -> "Nothing":
        return self

    bind_args = bind


def processes() -> Executor:
    """Return a pool with a process for each core, started by spawn, as a CUDA context does not survive a fork."""
    return ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn"))


class Asked:
    """A pytest plugin that records the kernels of a run; a worker of ``-n`` reports them to the process that `Warm` is in."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.lines: dict[str, None] = {}
        self._real = jit.compile_request

    def compile_request(
        self, target: Target, source: str, entry: str, constants: Mapping[str, int | float | str]
    ) -> jit.Request:
        """Record the requested kernel, and return its compile request."""
        line = line_of(source, entry, constants)
        if line not in self.lines:
            self.lines[line] = None
            self.note(line)
        return self._real(target, source, entry, constants)

    def note(self, line: str) -> None:
        """Take note of a kernel that no test asked for before."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        jit.compile_request = self.compile_request

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        jit.compile_request = self._real
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput[REPORT] = list(self.lines)


class Warm(Asked):
    """A pytest plugin that compiles kernels ahead, and writes the list of those that the run, or its workers, asked for."""

    def __init__(
        self, config: pytest.Config, written: receipt.Receipt, workers: Callable[[], Executor] = processes
    ) -> None:
        super().__init__(config)
        self.written, self.workers = written, workers
        folder = os.environ.get("FP8CORE_RECEIPT_DIR")
        self.journal = Path(folder) / LIST if folder else None

    def note(self, line: str) -> None:
        if self.journal is not None and self.written.asked_whole():
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with self.journal.open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if self.written.asked_whole() and session.items and device.count():
            began, target = time.monotonic(), device.target(0)
            lines = listed(self.written.root) or planned_elsewhere(target)
            good, bad = ahead(target, lines, self.workers)
            self.say(f"compiled ahead: {good} kernels in {time.monotonic() - began:.1f} s, {bad} refused")
        super().pytest_runtestloop(session)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.lines.update(dict.fromkeys(getattr(node, "workeroutput", {}).get(REPORT, ())))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        super().pytest_sessionfinish(session)
        whole = self.written.complete(session)
        path = self.written.destination(whole)
        if whole and path is not None and self.lines:
            path.with_name(LIST).parent.mkdir(parents=True, exist_ok=True)
            path.with_name(LIST).write_text("".join(f"{line}\n" for line in sorted(self.lines)), encoding="utf-8")

    def say(self, text: str) -> None:
        self.config.pluginmanager.getplugin("terminalreporter").write_line(text)


def listed(root: Path) -> list[str]:
    """Return the lines that the last whole run wrote; empty without a list."""
    try:
        return (root / receipt.RESULTS / LIST).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def ahead(target: Target, lines: Iterable[str], workers: Callable[[], Executor]) -> tuple[int, int]:
    """Compile the kernels of lines on all cores; return how many succeeded, and how many failed."""
    unique, good = list(dict.fromkeys(lines)), 0
    with workers() as pool, suppress(BrokenProcessPool):  # missing kernels are compiled when a test needs them
        for fine in pool.map(partial(compiled_ahead, target), unique):
            good += fine
    return good, len(unique) - good
