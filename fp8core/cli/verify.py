"""`fp8core verify`: reports every fault of a checkpoint with the name of its tensor."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from fp8core.cli.arguments import ModelArgument, UnscaledOption
from fp8core.cli.terminal import Bar, console, count, line, tabbed, table

if TYPE_CHECKING:
    from fp8core.checkpoint import Checkpoint, Fault, Verification

MOST_FAULTS: Final = 50
"""The number of faults that are printed on a terminal; elsewhere all are."""


def verify(
    model: ModelArgument,
    against: Annotated[
        Path | None, typer.Option(help="The original checkpoint: weights have to agree with it within rounding.")
    ] = None,
    unscaled: UnscaledOption = False,
) -> None:
    """Report every fault of a checkpoint with the name of its tensor; the exit status is 1 if there is one."""
    from fp8core.checkpoint import verify_checkpoint

    with Bar("verifying") as advance:
        found = verify_checkpoint(model, against=against, unscaled=unscaled, progress=advance)
    _show(found, model, against)
    raise typer.Exit(1 if found.faults else 0)


def _show(found: "Verification", model: Path, against: Path | None) -> None:
    places = _places(found.checkpoint)
    if found.errors:
        name, error = max(found.errors.items(), key=lambda item: item[1])
        mean = sum(found.errors.values()) / len(found.errors)
        line(
            f"Relative to {against}, FP8 weights differ by {100 * mean:.2f} % of their norm on average, "
            f"at most by {100 * error:.2f} % ({name})."
        )
    unverified = found.checkpoint.other
    if unverified is not None:
        line(f"Not verified: {unverified[0]}, which is of {unverified[1]}, and all others like it.", style="yellow")
    if not found.faults:
        line(f"{model}: no fault in {places} ({found.checkpoint.format})", style="green")
        return
    _faults(found.faults)
    line(f"{model}: {count(len(found.faults), 'fault')} in {places} ({found.checkpoint.format})", style="bold red")


def _places(checkpoint: "Checkpoint") -> str:
    """Return in words what was verified: the number of FP8 layers or, if there are none, of KV cache scales."""
    scales = 0 if checkpoint.layers else len(checkpoint.kv_scales())
    if scales:
        return f"{count(scales, 'scale')} of the KV cache and no FP8 layer"
    return count(len(checkpoint.layers), "FP8 layer")


def _faults(faults: "tuple[Fault, ...]") -> None:
    """Print the faults: on a terminal as a table, else a line for each."""
    if not console.is_terminal:
        for fault in faults:
            tabbed(fault.kind, fault.tensor, fault.text)
        return
    made = table(None)
    made.add_column("fault", style="red", no_wrap=True)
    made.add_column("what is wrong", overflow="fold")
    for fault in faults[:MOST_FAULTS]:
        made.add_row(fault.kind, escape(fault.text))
    console.print(made)
    if len(faults) > MOST_FAULTS:
        line(f"and {len(faults) - MOST_FAULTS:,} more: all are printed if the output is not a terminal")
