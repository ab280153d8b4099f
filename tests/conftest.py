"""Which tests run, in which order, and what is written down of it: those marked gpu
or models need a GPU, multigpu two."""

import argparse
import ctypes
import gc
import os
import random
import re
import secrets
import sys
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
"""JAX would take three quarters of a GPU's memory, of which CuPy and torch may hold more than the rest by then."""
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
"""inductor would compile and load a program first, in a process with torch, for the processor's vector instructions."""
if WORKERS := int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0")):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // WORKERS)))
    """Each worker has its part of the cores: torch's threads wait for each other by spinning, in every small product."""

TERMINAL = "COLUMNS LINES TERM COLORTERM FORCE_COLOR NO_COLOR PY_COLORS GITHUB_ACTIONS TTY_COMPATIBLE TTY_INTERACTIVE"
for name in TERMINAL.split():  # of whoever runs the tests: rich and typer would write for it in place of the tests' own
    os.environ.pop(name, None)

from support.dead_contexts import DeadContexts  # noqa: E402
from support.engines import MAKERS  # noqa: E402 - NumPy and torch read the number when they are loaded
from support.receipt import Receipt  # noqa: E402
from support.warm import Asked, Warm  # noqa: E402

DRIVERS = (
    ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    ("libamdhip64.so.7", "hipInit", "hipGetDeviceCount"),
    ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
)
NEEDED = {"gpu": 1, "models": 1, "multigpu": 2}
"""How many GPUs the tests with a mark need."""


def gpus() -> int:
    """Return how many GPUs the drivers see, asked without CuPy: a GPU without CuPy must not look like no GPU."""
    for name, start, count in DRIVERS:
        try:
            driver = ctypes.CDLL(name)
        except OSError:
            continue
        found = ctypes.c_int(0)
        if getattr(driver, start)(0) == 0 and getattr(driver, count)(ctypes.byref(found)) == 0 and found.value:
            return found.value
    return 0


def order(text: str) -> str:
    """Return an order with its seed, a fresh one where none is given."""
    if not re.fullmatch(r"file|random(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"an order is file, random or random:<seed>, got {text!r}")
    return f"random:{secrets.randbelow(1 << 32)}" if text == "random" else text


class GpuRuns:
    """Counts the tests of GPUs that ran, and fails a run that asked for them and ran none."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += any(mark in report.keywords for mark in NEEDED) and report.when == "call" and not report.skipped

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        expression = self.config.option.markexpr
        asked = (
            any(mark in expression and f"not {mark}" not in expression for mark in NEEDED)
            and not self.config.option.collectonly
        )
        if asked and not self.ran:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.write_line(
                f"\nno gpu test ran, which is what -m {expression} asked for: this run fails", red=True, bold=True
            )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--order", type=order, default="file", metavar="file|random[:seed]", help="in which order tests run"
    )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(DeadContexts(), "dead-contexts")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuRuns(config), "gpu-runs")
        if config.option.markexpr.strip() in NEEDED and gpus():
            receipt = Receipt(config)
            config.pluginmanager.register(receipt, "receipt")
            if config.option.markexpr.strip() == "gpu":  # the list is of its kernels; two GPUs ask for a few of them
                config.pluginmanager.register(Warm(config, receipt), "warm")
    elif config.option.markexpr.strip() == "gpu":
        config.pluginmanager.register(Asked(config), "asked")


def pytest_report_header(config: pytest.Config) -> list[str]:
    return [] if config.option.order == "file" else [f"order: {config.option.order}"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let a worker of ``-n`` that has nothing left take tests from another one's queue.

    By itself ``-n`` hands out up to a quarter of the tests that are left, for good: hundreds of them could wait behind
    the kernels that one worker compiles, while another one has nothing to do.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    there = gpus()
    if config.option.markexpr.strip() == "gpu" and there < NEEDED["multigpu"]:  # they have a suite of their own
        left = [item for item in items if item.get_closest_marker("multigpu")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("multigpu")]
    for item in items:
        missing = [mark for mark, needed in NEEDED.items() if item.get_closest_marker(mark) and there < needed]
        if missing and not there:
            item.add_marker(pytest.mark.skip(reason="no GPU: neither libcuda nor libamdhip64 offers a device"))
        elif missing:
            item.add_marker(pytest.mark.skip(reason=f"needs {NEEDED[missing[-1]]} GPUs, here is {there}"))
    kind, _, seed = config.option.order.partition(":")
    if kind == "random":
        random.Random(int(seed)).shuffle(items)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collections of garbage: nearly all that is made by then lives to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def set_aside() -> None:
    """Set aside what lives to the end, as modules and tests do, from the collections of tests and of CuPy: each would walk
    a million objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_finish() -> None:
    set_aside()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Set aside what the tests of a file have loaded, once the last of them is over."""
    result = yield
    if nextitem is not None and nextitem.path != item.path:
        set_aside()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let each test draw the same numbers of torch whatever a worker has run before: that is another with each run."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(0)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Any:
    """Return the engine that `engines` names, or skip where its framework is not installed."""
    return MAKERS[request.param]()
