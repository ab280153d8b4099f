"""`fp8core quantize`: an FP8 checkpoint, or a list of what would become what."""

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from fp8core.cli.terminal import Bar, console, count, errors, table, warnings_as_lines

if TYPE_CHECKING:
    from fp8core.checkpoint import Plan, Summary, Verdict

STYLES: Final = {"quantized": "green", "kept": "", "refused": "bold red"}


def quantize(
    source: Annotated[Path, typer.Argument(help="A safetensors file, or a folder with one or with shards.")],
    target: Annotated[
        Path | None, typer.Argument(help="The new safetensors file, or for a folder the new folder.")
    ] = None,
    scheme: Annotated[
        Literal["channel", "tensor", "block"],
        typer.Option(help="One scale per output channel, tensor or 128x128 block."),
    ] = "channel",
    include: Annotated[
        list[str] | None,
        typer.Option(
            help="Modules to quantize: a glob over whole names, or re: and a regular expression. By default every "
            "linear layer but heads, poolers, routers and towers of images and sound."
        ),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Modules to leave as they are, likewise.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file, or a folder that this command wrote.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would become of every tensor and file; write nothing.")
    ] = False,
) -> None:
    """Write an FP8 checkpoint as vLLM and compressed-tensors read it."""
    from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint

    if target is None and not dry_run:
        raise typer.BadParameter("needs a file or folder to write, or --dry-run, got none", param_hint="TARGET")
    if dry_run:
        with warnings_as_lines():
            plan = plan_checkpoint(source, target, scheme=scheme, include=include, exclude=exclude or (), force=force)
        _show_plan(plan)
        raise typer.Exit(1 if plan.refused else 0)
    assert target is not None
    try:
        with warnings_as_lines(), Bar("quantizing") as advance:
            summary = quantize_checkpoint(
                source, target, scheme=scheme, include=include, exclude=exclude or (), force=force, progress=advance
            )
    except (KeyboardInterrupt, SystemExit) as stop:
        what = "; ".join(getattr(stop, "__notes__", [])) or "nothing was written"
        errors.print(f"interrupted: {what}", markup=False, highlight=False, soft_wrap=True)
        raise
    _show(summary, scheme)


def _show(summary: "Summary", scheme: str) -> None:
    before, after = summary.bytes_before, summary.bytes_after
    _print(f"{summary.target}: {after:,} bytes, from {before:,} ({before / after:.2f} times smaller)")
    quantized, kept = len(summary.quantized), len(summary.kept)
    are, stay = "is" if quantized == 1 else "are", "stays" if kept == 1 else "stay"
    end = ":" if kept else "."
    _print(f"{count(quantized, 'weight')} {are} FP8 (scheme {scheme}); {count(kept, 'tensor')} {stay} as before{end}")
    for reason, tensors in _by_reason(summary.plan).items():
        more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
        _print(f"  {reason}: {tensors[0]}{more}")
    _show_extras(summary.plan)
    if summary.target.is_dir():
        _print(f"{summary.config_file} has the quantization_config.")
    else:
        _print(f"{summary.config_file} has the quantization_config, which readers want in config.json.")


def _by_reason(plan: "Plan") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verdict in plan.verdicts:
        if verdict.status == "kept":
            found.setdefault(_starred(verdict.reason), []).append(verdict.tensor)
    return found


def _show_extras(plan: "Plan") -> None:
    for extra in plan.extras:
        if not extra.copied:
            _print(f"Left out: {extra.name} ({extra.reason})")
        elif extra.reason:
            _print(f"Copied as it is: {extra.name} ({extra.reason})")


def _show_plan(plan: "Plan") -> None:
    """Print the verdict on every tensor: a table in which layers are one row, or in a log a line for each."""
    if console.is_terminal:
        made = table(f"What would become of {plan.source}")
        made.add_column("tensors", overflow="fold")
        for heading in ("number", "from", "shape", "becomes"):
            made.add_column(heading, overflow="fold")
        for (name, dtype, shape, status, reason), number in Counter(map(_row, plan.verdicts)).items():
            becomes = "FP8" if status == "quantized" else f"{status}: {reason}"
            made.add_row(name, str(number), dtype, shape, becomes, style=STYLES[status])
        console.print(made)
    else:
        for verdict in plan.verdicts:
            cells = verdict.status, verdict.tensor, verdict.dtype, _shape(verdict), verdict.reason
            print("\t".join(cells), file=console.file)  # rich would make blanks of the tabs
    _show_extras(plan)
    tally = Counter(verdict.status for verdict in plan.verdicts)
    refused = f", {tally['refused']:,} refused" if tally["refused"] else ""
    sizes = f"{plan.bytes_before:,} bytes become {plan.bytes_after:,}"
    after = "nothing would be written" if plan.refused else sizes
    _print(f"{tally['quantized']:,} quantized, {tally['kept']:,} kept{refused}: {after}")


def _row(verdict: "Verdict") -> tuple[str, str, str, str, str]:
    """Return what is said of a tensor; numbers of layers and experts are stars, so that equal ones fall together."""
    return _starred(verdict.tensor), verdict.dtype, _shape(verdict), verdict.status, _starred(verdict.reason)


def _starred(text: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", text)


def _shape(verdict: "Verdict") -> str:
    return "[" + ", ".join(map(str, verdict.shape)) + "]"


def _print(line: str) -> None:
    console.print(line, markup=False, highlight=False, soft_wrap=True)
