"""`fp8core bench`: prints a short table of times on this device."""

from typing import Annotated

import typer
from rich.progress import SpinnerColumn, TextColumn

from fp8core.cli.terminal import OnTerminal, console, count, errors, table
from fp8core.runtime import device


def bench(
    tokens: Annotated[int, typer.Option(min=1, metavar="M", help="Rows of the activations.")] = 256,
    width: Annotated[int, typer.Option(min=16, metavar="N", help="n and k of a square weight.")] = 2048,
    seconds: Annotated[float, typer.Option(min=0.01, metavar="S", help="How long to time each case.")] = 0.5,
) -> None:
    """Time the main operations on this device briefly; `bench/` in the repository has the full benchmarks."""
    from fp8core import bench as work

    times = table(f"{count(tokens, 'token')}, weight {width} x {width}, {work.place()}", "operation", "kernel")
    headings = ("a call", "on the GPU") if device.count() else ("a call",)
    for heading in (*headings, "rate"):
        times.add_column(heading, justify="right", overflow="fold")
    columns = SpinnerColumn(), TextColumn("timing {task.description}")
    with OnTerminal(errors, *columns) as progress:
        task = progress.add_task("")
        for case in work.cases(tokens, width):
            progress.update(task, description=case.name)
            timing = work.timed(case, seconds)
            shown = ("-" if one is None else f"{one * 1e6:,.1f} us" for one in timing[: len(headings)])
            times.add_row(case.name, case.kernel, *shown, case.rate(timing))
    console.print(times)
    if device.count():
        console.print("Calls are timed from Python, and the GPU in a graph. Operands that fit are in L2.")
