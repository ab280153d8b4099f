"""Runs the command line in this process, and parses its tables."""

import re
import signal
import sys

import pytest

from fp8core import cli


def runner(capsys, monkeypatch):
    """Return a function that runs the command line in this process and returns (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    for console in (cli.console, cli.errors):  # they took their width from the environment when they were made
        monkeypatch.setattr(console, "_width", 200)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fp8core", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def row(text, name):
    """Return the cells of the table row with this name."""
    line = next(line for line in text.splitlines() if re.match(rf"│ {name} +│", line))
    return [cell.strip() for cell in line.strip("│").split("│")]


def rows(text):
    """Return the cells of all rows below a table's heading; the lines of a cell are joined by blanks."""
    found = []
    for line in text.splitlines():
        if line.startswith("│"):
            cells = [cell.strip() for cell in line.strip("│").split("│")]
            if cells[0]:
                found.append(cells)
            else:
                found[-1] = [f"{old} {new}".strip() for old, new in zip(found[-1], cells, strict=True)]
    return found


@pytest.fixture
def fp8core_(capsys, monkeypatch):
    return runner(capsys, monkeypatch)
