"""A library of two algorithms in the place of cuBLASLt, and stopwatches with made-up times."""

from unittest.mock import Mock

import pytest

from fp8core import tuning
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device, jit
from fp8core.tuning import files, values
from support.blaslt_fixtures import built  # noqa: F401
from support.blaslt_tools import H200, forget, pretend, problem

FAR = float("inf")
PROBLEM = problem(m=96)
"""Of more rows than the hand-written kernels are preferred for: they are candidates all the same, after the others."""


ROWS = ("sm90_decode", "cublaslt", "cublaslt_relayout", "cublaslt_epilogue")
"""What the table has in these tests: what other rows are preferred for is not their subject."""


@pytest.fixture
def stub(built, monkeypatch):
    """Two H200, the recording library, kernels that do nothing, and nothing preferred yet."""
    pretend(monkeypatch, built["cuda"], (H200, H200._replace(device=1)))
    monkeypatch.setattr(device, "name", lambda ordinal: "NVIDIA H200")
    monkeypatch.setattr(device, "driver_version", lambda: 13000)
    monkeypatch.setattr(jit, "prepare", lambda *_, **__: Mock())  # called or bound, it launches nothing
    monkeypatch.setattr(SCALED_MM, "_tuned", {})
    monkeypatch.setattr(SCALED_MM, "_plans", {})
    monkeypatch.setattr(SCALED_MM, "_expected", {})
    monkeypatch.setattr(SCALED_MM, "kernels", tuple(kernel for kernel in SCALED_MM.kernels if kernel.name in ROWS))
    monkeypatch.setattr(values, "APPLIED", {})
    monkeypatch.setattr(files, "APPLIED", values.APPLIED)
    tuning.machine.cache_clear()
    yield built["cuda"]
    forget()
    tuning.machine.cache_clear()


def saying(*us):
    """Return a stopwatch that reads ``us``, and then that a launch is out of the question."""
    return lambda p, launches: [*us, *[FAR] * (len(launches) - len(us))]
