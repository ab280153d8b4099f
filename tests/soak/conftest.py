"""The options of the soak, and the profile of the long fuzz."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("long", max_examples=10_000, deadline=None, derandomize=False)
LONG = 60.0
"""A soak of so many seconds fuzzes long, too."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--soak-seconds", type=float, help="soak each engine for so long (or FP8CORE_SOAK_SECONDS)")
    group.addoption("--soak-seed", type=int, help="as a failure printed it")
    group.addoption("--soak-report", type=Path, help="where the counts go, as JSON")


def seconds(config: pytest.Config) -> float:
    """Return how long an engine is soaked; 0 for the few steps of an ordinary run."""
    return config.getoption("soak_seconds", None) or float(os.environ.get("FP8CORE_SOAK_SECONDS", "0"))


def pytest_configure(config: pytest.Config) -> None:
    if seconds(config) >= LONG and config.getoption("hypothesis_profile", None) is None:
        settings.load_profile("long")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.getreports("passed"):
        for name, lines in report.user_properties:
            if name == "soak":
                terminalreporter.write_line(lines)
