"""Which tests run: those marked gpu need a GPU, and a run of them in which nothing ran is a failure."""

import ctypes
from typing import Any

import pytest

from support.engines import MAKERS

DRIVERS = (
    ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),
    ("libamdhip64.so.7", "hipInit", "hipGetDeviceCount"),
    ("libamdhip64.so", "hipInit", "hipGetDeviceCount"),
)


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


class GpuRuns:
    """Counts the gpu tests that ran, and fails a run that asked for them and ran none."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.ran = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ran += "gpu" in report.keywords and report.when == "call" and not report.skipped

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        expression = self.config.option.markexpr
        asked = "gpu" in expression and "not gpu" not in expression and not self.config.option.collectonly
        if asked and not self.ran:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            reporter = self.config.pluginmanager.getplugin("terminalreporter")
            reporter.write_line(
                "\nno gpu test ran, which is what -m gpu asked for: this run fails", red=True, bold=True
            )


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(GpuRuns(config), "gpu-runs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not gpus():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no GPU: neither libcuda nor libamdhip64 offers a device"))


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Any:
    """Return the engine that `engines` names, or skip where its framework is not installed."""
    return MAKERS[request.param]()
