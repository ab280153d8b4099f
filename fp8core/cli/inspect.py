"""`fp8core inspect`: what a checkpoint holds."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp8core.cli.terminal import console, count, line, size, table

if TYPE_CHECKING:
    from fp8core.checkpoint import Claim, Inspection

MOST_FAULTS = 10
"""So many are printed; --json has all."""


def inspect(
    model: Annotated[Path, typer.Argument(help="A safetensors file, or a folder with one or with shards.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a checkpoint holds: its format, its FP8 layers by kind of scale, and what its configuration claims."""
    from fp8core.checkpoint import inspect_checkpoint, open_checkpoint

    found = inspect_checkpoint(open_checkpoint(model))
    if as_json:
        print(json.dumps(found.to_json(), indent=2), file=console.file)
        return
    _show(found)


def _show(found: "Inspection") -> None:
    line(f"{found.path}: {found.title}, {count(found.files, 'file')}, {size(found.nbytes)}", style="bold")
    line(f"  {claimed(found.claim)}")
    if found.layers:
        made = table(None, "FP8 layers", "weights", "scales", "activations")
        made.add_column("parameters", justify="right")
        made.add_column("size", justify="right")
        made.add_column("for example", overflow="fold")
        for kind in found.layers:
            numbers = f"{kind.elements:,}", size(kind.nbytes)
            made.add_row(f"{kind.number:,}", kind.what, kind.scales, kind.activations, *numbers, kind.example)
        console.print(made)
    if found.others:
        made = table(None, "other tensors", "dtype")
        made.add_column("parameters", justify="right")
        made.add_column("size", justify="right")
        made.add_column("for example", overflow="fold")
        for kind in found.others:
            made.add_row(f"{kind.number:,}", kind.what, f"{kind.elements:,}", size(kind.nbytes), kind.example)
        console.print(made)
    if found.kv_scales:
        line(f"{count(found.kv_scales, 'scale')} of cached keys and values")
    if not found.faults:
        line("The headers and the configuration agree; `fp8core verify` looks at the numbers, too.")
    for fault in found.faults[:MOST_FAULTS]:
        line(f"{fault.kind}: {fault.text}", style="yellow")
    if len(found.faults) > MOST_FAULTS:
        line(f"and {len(found.faults) - MOST_FAULTS:,} more: see --json", style="yellow")


def claimed(claim: "Claim") -> str:
    """Return what a configuration says, in words."""
    if not claim.file:
        return "no configuration says how it is quantized: that is read from the names and shapes of its tensors"
    parts = [claim.variant]
    shape = "" if claim.group_shape is None else f" of {'x'.join(map(str, claim.group_shape))}"
    if claim.granularities:
        parts.append(f"one scale per {' or '.join(sorted(claim.granularities))}{shape}")
    if claim.activations is not None:
        parts.append(f"{claim.activations} activations")
    if claim.kv_cache:
        parts.append(f"keys and values cached as {claim.kv_cache}")
    if claim.ignore:
        parts.append(f"{count(len(claim.ignore), 'pattern')} of layers that are not quantized")
    return f"{claim.file} says: {', '.join(parts)}"
