"""The file of a benchmark's records, and the cases that it has, so that a stopped run can be continued."""

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from bench import results
from bench.results import Record

Case = TypeVar("Case")


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
        """Return whether the file has the record of a case, given by the fields that distinguish cases."""
        return results.key_of(case) in self._there

    def append(self, *records: Record) -> None:
        """Add a line for each record."""
        results.append(self._path, *records)

    def measured(
        self, cases: Iterable[Case], key: Callable[[Case], Record], measure: Callable[[Case], Record]
    ) -> Iterator[tuple[Case, Record]]:
        """Measure the cases that the file does not have; yield each with its record, once that is written.

        Args:
            cases: the cases, in order.
            key: returns the fields of a case's record that distinguish it from others.
            measure: returns the record of a case.
        """
        for case in cases:
            if self.has(key(case)):
                continue
            record = measure(case)
            self.append(record)
            yield case, record
