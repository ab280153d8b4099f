"""A library with two algorithms in place of cuBLASLt, and stopwatches with made-up times."""

from unittest.mock import Mock

import pytest

from fp8core import tuning
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import device, jit
from fp8core.tuning import files, values
from support.blaslt_fixtures import built  # noqa: F401
from support.blaslt_tools import forget, pretend, problem
from support.targets import H200

FAR = float("inf")
PROBLEM = problem(m=96)
"""A product with more rows than the hand-written kernels are preferred for; they are candidates, but after others."""


ROWS = ("sm90_decode", "cublaslt", "cublaslt_relayout", "cublaslt_epilogue")
"""The rows of the table in these tests, which do not depend on the preferences of other rows."""


@pytest.fixture
def stub(built, monkeypatch):
    """Pretend that there are two H200 with the recording library, kernels that do nothing, and no tunings."""
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
    """Return a stopwatch that reports ``us`` for the first launches, and infinity for the others."""
    return lambda p, launches: [*us, *[FAR] * (len(launches) - len(us))]
