"""Files of tunings, and a stopwatch for which the second candidate is the fastest."""

from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.tuning import save_tunings, timed, values
from support.tuning_stub import PROBLEM, saying

SECOND = saying(9.0, 5.0)
"""A stopwatch for which the second candidate is the fastest."""


def forget_all(monkeypatch):
    """Simulate a new process: no tunings are made or loaded."""
    for name in ("_tuned", "_plans", "_expected"):
        monkeypatch.setattr(SCALED_MM, name, {})
    values.APPLIED.clear()


def written(path, count=3):
    found = [timed(PROBLEM._replace(m=96 + i), SECOND) for i in range(count)]
    save_tunings(path, found)
    return found
