"""A run ends where the GPU is lost, and says so: no test after it can tell anything. No GPU takes part here."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fp8core.runtime import device
from support import dead_contexts, receipt

SUITE = """
import pytest
from support import dead_contexts

lost = []
dead_contexts.lost = lambda: "an illegal memory access" if lost else ""

@pytest.fixture(scope="session", autouse=True)
def plugin(pytestconfig):
    pytestconfig.pluginmanager.register(dead_contexts.DeadContexts())

def test_fails(): assert False, "a wrong number"
def test_passes(): pass
def test_kills(): lost.append(1); assert False, "the first error"
def test_after_it(): assert False, "of no use"
"""


class Runtime:
    CUDARuntimeError = OSError

    def __init__(self, errors):
        self.errors = errors

    def deviceSynchronize(self):
        if self.errors:
            raise OSError(self.errors.pop())


@pytest.mark.parametrize(("errors", "found"), [(0, ""), (1, ""), (2, "illegal access")])
def test_only_an_error_that_stays_is_a_lost_gpu(monkeypatch, errors, found):
    runtime = Runtime(["illegal access"] * errors)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setattr(device, "cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    assert dead_contexts.lost() == found


def test_without_cupy_there_is_no_gpu_to_lose(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert dead_contexts.lost() == ""


def test_a_run_ends_with_the_test_that_lost_the_gpu(tmp_path):
    (tmp_path / "test_suite.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    path = os.pathsep.join((str(receipt.ROOT), str(receipt.ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "the GPU was lost in test_suite.py::test_kills: an illegal memory access" in done.stdout
    assert "a wrong number" in done.stdout
    assert "the first error" in done.stdout
    assert "of no use" not in done.stdout
    assert "2 failed, 1 passed" in done.stdout
