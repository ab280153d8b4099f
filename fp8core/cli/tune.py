"""`fp8core tune`: finds the fastest kernels for products or for a model's linear layers, and saves them in a file."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fp8core.cli.layers import ModelPath, Rows, SchemeName, Shapes, WideDtype, layers_asked
from fp8core.cli.terminal import Steps, console, count, error_line, errors, line, table, warnings_as_lines

if TYPE_CHECKING:
    from fp8core.problem import ScaledMm
    from fp8core.tuning import Timed, Tuning

SAVED_AFTER: Final = 10.0
"""The interval, in seconds, at which tunings are saved while tuning continues."""


def tune(
    model: ModelPath = None,
    shapes: Shapes = None,
    rows: Rows = None,
    scheme: SchemeName = "channel",
    dtype: WideDtype = "bfloat16",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to add to; by default $FP8CORE_TUNINGS, or tunings.jsonl in the user's data folder."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also tune products that the file already has.")] = False,
) -> None:
    """Time every kernel for products or for a model's linear layers, and save the fastest in a file."""
    from fp8core.errors import UnsupportedProblemError
    from fp8core.kernels.gemm.table import SCALED_MM
    from fp8core.runtime import device
    from fp8core.tuning.files import check_writable, tunings_file
    from fp8core.tuning.shapes import layer_product, tuned

    SCALED_MM.before = None  # do not load the file in $FP8CORE_TUNINGS: it is read below, if it exists
    asked = layers_asked(model, shapes, rows, scheme)
    if device.count() == 0:
        raise UnsupportedProblemError(f"tune needs a GPU, whose kernels it times, got none: {device.why_none()}")
    asked_for = (layer_product((m, of.n, of.k), of.scheme, dtype, **of.options) for m, of in asked.layers)
    products = list(dict.fromkeys(asked_for))
    file = out or tunings_file()
    check_writable(file)
    asked.show(model)
    with warnings_as_lines():
        known = set() if again else _known(file)
    wanted = [product for product in products if product not in known]
    if len(wanted) < len(products):
        line(f"{file} has {count(len(products) - len(wanted), 'product')} already: --again retunes them")
    kept = Kept(file)
    try:
        with TuningSteps(len(wanted), kept) as advance:
            tuned(wanted, advance)
    finally:
        kept.save()
    _show(kept.found)


def _known(file: Path) -> "set[ScaledMm]":
    """Load the tunings of a file that are for this machine, and return their products."""
    from fp8core.tuning import load_tunings

    if not file.exists():
        return set()
    return {problem for tuning in load_tunings(file) for problem in tuning.problems()}


class Kept:
    """The tunings of a run. They are saved at intervals, so that a killed run loses little."""

    def __init__(self, file: Path) -> None:
        self.found: list[Tuning] = []
        self._file, self._saved, self._next = file, 0, time.monotonic() + SAVED_AFTER

    def add(self, tuning: "Tuning") -> None:
        """Add a tuning, and save the new ones if the last save was at least `SAVED_AFTER` seconds ago."""
        self.found.append(tuning)
        if time.monotonic() >= self._next:
            self._write()

    def save(self) -> None:
        """Save the rest, and print the number of products that were tuned."""
        self._write()
        if self.found:
            line(f"{count(len(self.found), 'product')} tuned, saved in {self._file}")

    def _write(self) -> None:
        from fp8core.tuning import save_tunings

        if self._saved < len(self.found):
            with warnings_as_lines():
                save_tunings(self._file, self.found[self._saved :])
        self._saved, self._next = len(self.found), time.monotonic() + SAVED_AFTER


class TuningSteps(Steps):
    """Shows the progress of tuning: a bar on a terminal, else a line for each product."""

    def __init__(self, total: int, kept: Kept) -> None:
        super().__init__("tuning {task.description}", total)
        self.kept = kept

    def __call__(self, tuning: "Tuning", done: int, total: int) -> None:
        """Keep a tuning, and show that ``done`` of ``total`` products are tuned."""
        self.kept.add(tuning)
        if errors.is_terminal:
            self.show(done, total, _call(tuning))
        else:
            error_line(f"{done}/{total} {_call(tuning)}: {tuning.chosen}, {tuning.gain:.1%} gained")


def _call(tuning: "Tuning") -> str:
    return f"{tuning.m}x{tuning.n}x{tuning.k}"


def _kernel(timed: "Timed") -> str:
    return f"{timed.kernel} algorithm {timed.algorithm}" if timed.algorithm else timed.kernel


def _show(found: "list[Tuning]") -> None:
    if not found:
        return
    made = table("Tuned products", "m x n x k", "scales", "before", "us", "chosen", "us", "gained")
    for tuning in found:
        before, chosen = tuning.default, tuning.chosen
        times = _kernel(before), f"{before.us:.2f}", _kernel(chosen), f"{chosen.us:.2f}"
        made.add_row(_call(tuning), " x ".join(tuning.scales), *times, f"{tuning.gain:.1%}")
    console.print(made)
