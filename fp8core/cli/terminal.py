"""What the commands share on the terminal: where they print, how a table looks, how counts are said."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

console = Console()
errors = Console(stderr=True)
LINE_EVERY = 1 << 30
"""Where nobody watches a bar, a line of progress is printed after at least so many bytes, and at most ten in all."""


def table(title: str | None, *columns: str) -> Table:
    """Return a table with its heading at the left."""
    made = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column)
    return made


def count(number: int, one: str, many: str | None = None) -> str:
    """Return a number and what it counts: "1 weight", "2 weights"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


class Bar:
    """The progress of some bytes: a bar on a terminal, a line now and then in a log."""

    def __init__(self, what: str) -> None:
        self.what, self.told = what, 0
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
        self.task = self.progress.add_task(what, total=None)

    def __enter__(self) -> Callable[[str, int, int], None]:
        self.progress.__enter__()
        return self.advance

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__(None, None, None)

    def advance(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done, the last of them of ``name``."""
        if errors.is_terminal:
            self.progress.update(self.task, completed=done, total=total)
        elif done - self.told >= max(LINE_EVERY, total // 10):
            self.told = done
            line = f"{self.what}: {100 * done // total} % of {total:,} bytes ({name})"
            errors.print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print warnings as lines of their own, after the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for one in caught:
                errors.print(f"warning: {one.message}", style="yellow", markup=False, highlight=False, soft_wrap=True)
