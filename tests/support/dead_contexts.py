"""Ends a run whose GPU is lost: after an illegal access every later call fails, and JAX even aborts the process."""

import sys

import pytest

from fp8core.runtime import device


def lost() -> str:
    """Return the error of a GPU that cannot be used any more in this process, or an empty string."""
    if "cupy" not in sys.modules:
        return ""
    runtime = device.cupy().cuda.runtime
    error = ""
    for _ in range(2):  # an error that does not stay is reported once
        try:
            runtime.deviceSynchronize()
        except runtime.CUDARuntimeError as raised:
            error = str(raised)
        else:
            return ""
    return error


class DeadContexts:
    """A pytest plugin: a run ends with the first test that fails and leaves a GPU that cannot be used."""

    @pytest.hookimpl(trylast=True)  # behind the plugins that write the report down
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and (error := lost()):
            pytest.exit(f"the GPU was lost in {report.nodeid}: {error}", returncode=1)
