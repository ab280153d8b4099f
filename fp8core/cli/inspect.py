"""`fp8core inspect`: shows what a checkpoint holds."""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from fp8core.cli.arguments import ModelArgument
from fp8core.cli.terminal import console, count, line, size, starred, table

if TYPE_CHECKING:
    from fp8core.checkpoint import Claim, Inspection, Kind

MOST_FAULTS: Final = 10
"""The number of faults that are printed; --json prints all."""


def inspect(
    model: ModelArgument,
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
    if found.layers or found.claim.file:
        line(claimed(found.claim))
    if found.layers:
        _table("layers", found.layers, "codes", "scales", "inputs")
    if found.others:
        _table("others", found.others, "dtype")
    if found.kv_scales:
        line(f"{count(found.kv_scales, 'scale')} of the KV cache")
    if found.layers and not found.faults:
        seen = "The headers and the configuration agree" if found.claim.file else "The headers show no fault"
        line(f"{seen}; `fp8core verify` also checks the numbers.")
    for fault in found.faults[:MOST_FAULTS]:
        line(f"{fault.kind}: {fault.text}", style="yellow")
    if len(found.faults) > MOST_FAULTS:
        line(f"and {len(found.faults) - MOST_FAULTS:,} more: see --json", style="yellow")


def _table(what: str, kinds: "Iterable[Kind]", *columns: str) -> None:
    """Print kinds of tensors, one per row; ``columns`` are the headings of the first fields of a kind."""
    made = table(None)
    made.add_column(what, justify="right", overflow="fold")
    for column in columns:
        made.add_column(column, overflow="fold")
    made.add_column("size", justify="right", overflow="fold")
    made.add_column("for example", overflow="fold")
    for kind in kinds:
        cells = (kind.what, kind.scales, kind.activations)[: len(columns)]
        made.add_row(f"{kind.number:,}", *cells, size(kind.nbytes), escape(starred(kind.example)))
    console.print(made)


def claimed(claim: "Claim") -> str:
    """Return in words what a configuration claims."""
    if not claim.file:
        return "No configuration: names and shapes of tensors show how it is quantized."
    parts = [claim.variant]
    shape = "" if claim.group_shape is None else f" of {'x'.join(map(str, claim.group_shape))}"
    if claim.granularities:
        sides = {"block": shape, "group": shape}
        scales = " or ".join(f"{one}{sides.get(one, '')}" for one in sorted(claim.granularities))
        parts.append(f"one scale per {scales}")
    if claim.activations is not None:
        parts.append(f"{claim.activations} activations")
    if claim.kv_cache:
        parts.append(f"a KV cache of {claim.kv_cache}")
    if claim.ignore:
        parts.append(f"{count(len(claim.ignore), 'pattern')} of layers that are not quantized")
    return f"{claim.file} says: {', '.join(parts)}"
