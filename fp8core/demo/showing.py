"""Prints the demo's report."""

from textwrap import shorten
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fp8core.demo.comparing import Report

LONGEST: Final = 100
"""The most characters of a sentence that are shown, also in a pipe, whose lines have no end."""


def show(report: Report, console: Console) -> None:
    """Print the report."""
    console.print(f"all-MiniLM-L6-v2 on {report.place}. Scheme [bold]{report.scheme}[/]: {report.meaning}.\n")
    table = Table(title="Embeddings in FP8 against fp32", title_justify="left", title_style="bold")
    table.add_column("cosine", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("sentence")
    for sentence in report.sentences:
        table.add_row(
            f"{sentence.cosine:.5f}",
            str(sentence.tokens),
            shorten(sentence.text, min(max(24, console.width - 26), LONGEST), placeholder=" …"),
        )
    console.print(table)
    table = Table(title="Relative error of the linear layers' outputs", title_justify="left", title_style="bold")
    table.add_column("layer", overflow="fold")
    table.add_column("n x k", justify="right", overflow="fold")
    table.add_column("alone", justify="right", overflow="fold")
    table.add_column("in the run", justify="right", overflow="fold")
    table.add_column("kernels", overflow="fold")
    for layer in report.layers:
        n, k = layer.shape
        table.add_row(
            layer.name.removeprefix("encoder.layer."),
            f"{n} x {k}",
            f"{layer.own:.2%}",
            f"{layer.total:.2%}",
            layer.kernels,
        )
    console.print(table)
    for kernel, explanation in report.explanations.items():
        if explanation.chosen == "host":  # NumPy arrays always run on the host engine
            continue
        console.print(f"\n[bold]Why {kernel}[/], in the first layer that it runs:")
        grid = Table.grid(padding=(0, 2), pad_edge=True)
        for verdict in explanation.verdicts:
            grid.add_row(*map(escape, (verdict.kernel, verdict.status, verdict.reason)))
        console.print(grid)
    saved = report.bytes_before / report.bytes_after
    console.print(
        f"\nLinear layers: {report.bytes_before:,} bytes in fp32, {report.bytes_after:,} in FP8 with their scales "
        f"({saved:.2f} times smaller)."
    )
    worst = min(report.sentences, key=lambda s: s.cosine)
    console.print(f"Least cosine: [bold]{worst.cosine:.5f}[/].")
