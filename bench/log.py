"""Where the records of a benchmark go, and which of its cases are there: a run that was stopped can go on."""

import argparse
from pathlib import Path

from bench import results
from bench.results import Record


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `Log` reads."""
    parser.add_argument("--json", type=Path, help="append one line a case to this file")
    parser.add_argument(
        "--go-on", metavar="SUBJECT", help="leave out the cases that this file has of a stopped subject"
    )


class Log:
    """The file of a benchmark's records, if there is one."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self._path: Path | None = asked.json
        left = results.stopped(results.runs(asked.json)).get(asked.go_on, ()) if asked.go_on else ()
        self._there = {results.key_of(record) for record in left}

    def has(self, case: Record) -> bool:
        """Return whether an earlier run left the record of a case, given by the fields that tell cases apart."""
        return results.key_of(case) in self._there

    def append(self, *records: Record) -> None:
        """Add a line for each record."""
        results.append(self._path, *records)
