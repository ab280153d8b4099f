"""Output helpers that the commands share: consoles, tables, numbers in words, and progress bars."""

import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Self, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

AS_WIDE_AS_NEEDED: Final = 10_000


def _width(stream: TextIO | None) -> int | None:
    """Return the width of tables in columns; None if rich can take it from the terminal or COLUMNS itself.

    Terminals without a size set COLUMNS to 0, which rich takes for a width in which nothing is printed.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return None
    if stream is None or not stream.isatty():
        return AS_WIDE_AS_NEEDED
    return shutil.get_terminal_size().columns if columns else None


CONTROLS: Final = {number: f"\\x{number:02x}" for number in (*range(32), *range(127, 160))}
"""What a terminal does something else with than show it, as the codes that are shown in its place: files come from
anybody, and names in them may hold such characters."""
IN_TEXT: Final = {number: code for number, code in CONTROLS.items() if chr(number) not in "\t\n"}


class Screen(Console):
    """A console that shows text, and does nothing that text says; styles are its own."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return text as it is shown."""
        return super().render_str(text.translate(IN_TEXT), **options)


console = Screen(width=_width(sys.stdout))
errors = Screen(stderr=True, width=_width(sys.stderr))
LINE_EVERY: Final = 1 << 30
"""Without a terminal, a line of progress is printed after at least this many bytes, and at most ten in all."""


def table(title: str | None, *columns: str) -> Table:
    """Return a table with a left-aligned title. Cells are folded where the terminal is narrow, and lose nothing."""
    made = Table(title=None if title is None else escape(title), title_justify="left", title_style="bold")
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def count(number: int, one: str) -> str:
    """Return a number with a noun in the singular or plural: "1 weight", "2 weights"."""
    return f"{number:,} {one}{'' if number == 1 else 's'}"


def line(text: str, style: str | None = None) -> None:
    """Print one line without wrapping or markup."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def error_line(text: str, style: str | None = None) -> None:
    """Print one line, as `line` does, to stderr."""
    errors.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def tabbed(*texts: str) -> None:
    """Print texts in one line with tabs between; rich would make blanks of these."""
    print("\t".join(text.translate(CONTROLS) for text in texts), file=console.file)


def size(nbytes: int) -> str:
    """Return a number of bytes with a suitable unit: "1.2 GB"."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return count(nbytes, "byte") if unit == "bytes" else f"{value:.3g} {unit}"


def starred(text: str) -> str:
    """Return text with stars in place of the numbers of layers and experts in names, except in quoted patterns."""
    return re.sub(r"('[^']*')|(?<=\.)\d+(?=\.)|^\d+(?=\.)", lambda found: found[1] or "*", text)


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Print each warning of the block as a line, after the block."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            yield
        finally:
            for one in caught:
                error_line(f"warning: {one.message}", style="yellow")


@contextmanager
def interrupted() -> Iterator[None]:
    """Print the state of the target if Ctrl-C or a signal stops the block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as stop:
        what = "; ".join(getattr(stop, "__notes__", [])) or "nothing was written"
        error_line(f"interrupted: {what}")
        raise


class OnTerminal(Progress):
    """rich's progress display, on a console that is a terminal; on any other it prints nothing."""

    def __init__(self, shown_on: Console, *columns: ProgressColumn) -> None:
        super().__init__(*columns, console=shown_on, transient=True, disable=not shown_on.is_terminal)

    def stop(self) -> None:
        """End the display. rich before 14.3 prints an empty line for one that is disabled."""
        if not self.disable:
            super().stop()


class Steps:
    """A bar on a terminal that shows how much of a task is done, in steps or as ``done`` shows it."""

    def __init__(self, text: str, total: int | None, done: ProgressColumn | None = None) -> None:
        columns = TextColumn(text), BarColumn(), done or MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = OnTerminal(errors, *columns)
        self.task = self.progress.add_task("", total=total)

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__(None, None, None)

    def show(self, done: int, total: int, what: str = "") -> None:
        """Show how much is done; ``what`` stands for ``{task.description}`` in the text."""
        self.progress.update(self.task, completed=done, total=total, description=what)


class Bar(Steps):
    """Shows progress in bytes: a bar on a terminal, else an occasional line."""

    def __init__(self, what: str) -> None:
        super().__init__(what, None, DownloadColumn())
        self.what, self.printed = what, 0

    def __call__(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes are done; ``name`` is the tensor of the last bytes."""
        if errors.is_terminal:
            self.show(done, total)
        elif done - self.printed >= max(LINE_EVERY, total // 10):
            self.printed = done
            error_line(f"{self.what}: {100 * done // total} % of {total:,} bytes ({name})")
