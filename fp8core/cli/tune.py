"""`fp8core tune`: finds the fastest kernels for products or for a model's linear layers, and saves them in a file."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from fp8core.cli.numbers import whole_number
from fp8core.cli.terminal import OnTerminal, console, count, errors, table, warnings_as_lines

if TYPE_CHECKING:
    from fp8core.problem import ScaledMm
    from fp8core.tuning import Timed, Tuning

SAVED_AFTER: Final = 10.0
"""The interval, in seconds, at which tunings are saved while tuning continues."""


def tune(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="A safetensors file or a folder of them, whose linear layers are tuned."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(metavar="MxNxK", help="Products m x n x k: 1,16,64x4096x4096 is three of them; repeatable."),
    ] = None,
    rows: Annotated[
        str, typer.Option(metavar="M,M", help="Numbers of rows (m) to tune for each of the model's layers.")
    ] = "1,16,64,256,1024,4096",
    scheme: Annotated[
        Literal["channel", "tensor", "block"],
        typer.Option(help="One scale per output channel, tensor or 128x128 block; an FP8 model has its own."),
    ] = "channel",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="The dtype of inputs and results.")
    ] = "bfloat16",
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to add to; by default $FP8CORE_TUNINGS, or tunings.jsonl in the user's data folder."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also tune products that the file already has.")] = False,
) -> None:
    """Time every kernel for products or for a model's linear layers, and save the fastest in a file."""
    from fp8core.checkpoint.linear_shapes import layers_of
    from fp8core.checkpoint.tuning import products_of
    from fp8core.errors import UnsupportedProblemError
    from fp8core.kernels.gemm.table import SCALED_MM
    from fp8core.runtime import device
    from fp8core.tuning.files import check_writable, tunings_file
    from fp8core.tuning.shapes import layer_product, tuned

    SCALED_MM.before = None  # do not load the file in $FP8CORE_TUNINGS: it is read below, if it exists
    if model is None and not shapes:
        raise typer.BadParameter("needs a model or --shapes, got neither", param_hint="MODEL")
    listed = list(_shapes(shapes or []))
    some = _numbers(rows, "--rows")
    layers = {} if model is None else layers_of(model, scheme)
    if model is not None:
        weights = count(sum(map(len, layers.values())), "weight")
        _say(f"{model}: {weights} of {count(len(layers), 'shape')}, {count(len(some), 'number')} of rows each")
    if device.count() == 0:
        raise UnsupportedProblemError(f"tune needs a GPU, whose kernels it times, got none: {device.why_none()}")
    asked = [layer_product(shape, scheme, dtype) for shape in listed]
    products = list(dict.fromkeys([*asked, *products_of(layers, some, dtype)]))
    file = out or tunings_file()
    check_writable(file)
    with warnings_as_lines():
        known = set() if again else _known(file)
    wanted = [product for product in products if product not in known]
    if len(wanted) < len(products):
        _say(f"{file} has {count(len(products) - len(wanted), 'product')} already: --again retunes them")
    kept = Kept(file)
    try:
        with Steps(len(wanted), kept) as advance:
            tuned(wanted, advance)
    finally:
        kept.save()
    _show(kept.found)


def _shapes(texts: list[str]) -> Iterator[tuple[int, int, int]]:
    """Yield the products that texts such as 1,16x4096x4096 describe."""
    for text in texts:
        parts = text.lower().split("x")
        if len(parts) != 3:
            raise typer.BadParameter(f"needs m x n x k as in 1,16x4096x4096, got {text!r}", param_hint="--shapes")
        rows, channels, shared = (_numbers(part, "--shapes") for part in parts)
        yield from ((m, n, k) for n in channels for k in shared for m in rows)


def _numbers(text: str, option: str) -> list[int]:
    found = [whole_number(part) for part in text.replace(",", " ").split()]
    if not found or not all(found):
        needed = "needs numbers from 1 to 2**31 - 1, separated by commas"
        raise typer.BadParameter(f"{needed}, got {text!r}", param_hint=option)
    return [number for number in found if number]


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
            _say(f"{count(len(self.found), 'product')} tuned, saved in {self._file}")

    def _write(self) -> None:
        from fp8core.tuning import save_tunings

        if self._saved < len(self.found):
            with warnings_as_lines():
                save_tunings(self._file, self.found[self._saved :])
        self._saved, self._next = len(self.found), time.monotonic() + SAVED_AFTER


class Steps:
    """Shows the progress of tuning: a bar on a terminal, else a line for each product."""

    def __init__(self, total: int, kept: Kept) -> None:
        columns = TextColumn("tuning {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = OnTerminal(errors, *columns)
        self.task = self.progress.add_task("", total=total)
        self.kept = kept

    def __enter__(self) -> Self:
        self.progress.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.__exit__(None, None, None)

    def __call__(self, tuning: "Tuning", done: int, total: int) -> None:
        """Keep a tuning, and show that ``done`` of ``total`` products are tuned."""
        self.kept.add(tuning)
        if errors.is_terminal:
            self.progress.update(self.task, completed=done, description=_call(tuning))
        else:
            line = f"{done}/{total} {_call(tuning)}: {tuning.chosen}, {tuning.gain:.1%} gained"
            errors.print(line, markup=False, highlight=False, soft_wrap=True)


def _call(tuning: "Tuning") -> str:
    return f"{tuning.m}x{tuning.n}x{tuning.k}"


def _kernel(timed: "Timed") -> str:
    return f"{timed.kernel} algorithm {timed.algorithm}" if timed.algorithm else timed.kernel


def _show(found: "list[Tuning]") -> None:
    if not found:
        return
    made = table("Tuned products", "m x n x k", "scales", "before", "us", "chosen", "us", "gained")
    for tuning in found:
        first, chosen = tuning.timed[0], tuning.chosen
        times = _kernel(first), f"{first.us:.2f}", _kernel(chosen), f"{chosen.us:.2f}"
        made.add_row(_call(tuning), " x ".join(tuning.scales), *times, f"{tuning.gain:.1%}")
    console.print(made)


def _say(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
