"""`fp8core quantize`: writes an FP8 checkpoint, or lists what would become of every tensor."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from fp8core.cli.arguments import DryRunOption, ForceOption, SourceArgument, SplitExpertsOption, TargetArgument
from fp8core.cli.rewriting import rewrite
from fp8core.cli.terminal import console, count, line, starred, tabbed, table
from fp8core.types import SchemeName

if TYPE_CHECKING:
    from fp8core.checkpoint import Plan, Summary, Verdict

STYLES: Final = {"quantized": "green", "kept": "", "refused": "bold red"}


def quantize(
    source: SourceArgument,
    target: TargetArgument = None,
    scheme: Annotated[
        SchemeName,
        typer.Option(
            help="One scale per output channel, tensor or 128x128 block; static is tensor with given input scales; "
            "mxfp8 is one exponent per 1x32."
        ),
    ] = "channel",
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="The only modules to quantize: a glob for whole names, or re: and a regular expression; "
            "repeatable. By default every linear layer except heads, poolers, routers and vision and audio towers.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Modules to leave unquantized: patterns as for --include."),
    ] = None,
    input_scales: Annotated[
        Path | None,
        typer.Option(help="For scheme static: a JSON file with the scale of each layer's input, by the layer's name."),
    ] = None,
    split_experts: SplitExpertsOption = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Write an FP8 checkpoint that vLLM and compressed-tensors can read."""
    from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint

    plan, summary = rewrite(
        plan_checkpoint,
        quantize_checkpoint,
        source,
        target,
        dry_run=dry_run,
        doing="quantizing",
        allowed={},
        scheme=scheme,
        include=include,
        exclude=exclude or (),
        input_scales=None if input_scales is None else scales_of(input_scales),
        split_experts=split_experts,
        force=force,
    )
    if plan is not None:
        _show_plan(plan)
        raise typer.Exit(1 if plan.refusal else 0)
    if summary is not None:
        _show(summary, scheme)


def scales_of(file: Path) -> dict[str, float]:
    """Return the scales in a JSON file.

    Raises:
        CheckpointError: the file cannot be read, or is not a JSON object.
    """
    from fp8core.checkpoint.disk.source import read_json
    from fp8core.errors import CheckpointError

    if not file.exists():
        raise CheckpointError(f"cannot read {file}: No such file or directory")
    return read_json(file)


def _show(summary: "Summary", scheme: str) -> None:
    before, after = summary.bytes_before, summary.bytes_after
    smaller = f" ({before / after:.2f} times smaller)" if after < before else ""
    line(f"{summary.target}: {after:,} bytes, from {before:,}{smaller}")
    quantized, kept = len(summary.quantized), len(summary.kept)
    are, stay = "is" if quantized == 1 else "are", "stays" if kept == 1 else "stay"
    end = ":" if kept else "."
    line(f"{count(quantized, 'weight')} {are} FP8 (scheme {scheme}); {count(kept, 'tensor')} {stay} as before{end}")
    for reason, tensors in _by_reason(summary.plan).items():
        more = f" and {len(tensors) - 1:,} more" if len(tensors) > 1 else ""
        line(f"  {reason}: {tensors[0]}{more}")
    _show_extras(summary.plan)
    if summary.target.is_dir():
        line(f"{summary.config_file} has the quantization_config.")
    else:
        line(f"{summary.config_file} has the quantization_config, which readers expect in config.json.")


def _by_reason(plan: "Plan") -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for verdict in plan.verdicts:
        if verdict.status == "kept":
            found.setdefault(starred(verdict.reason), []).append(verdict.tensor)
    return found


def _show_extras(plan: "Plan") -> None:
    for extra in plan.extras:
        if not extra.copied:
            line(f"Left out: {extra.name} ({extra.reason})")
        elif extra.reason:
            line(f"Copied as it is: {extra.name} ({extra.reason})")


def _show_plan(plan: "Plan") -> None:
    """Print the plan: on a terminal a table with a row for each group of similar tensors, else a line for each."""
    if console.is_terminal:
        made = table(f"Plan for {plan.source}")
        made.add_column("tensors", overflow="fold")
        for heading in ("number", "from", "shape", "becomes"):
            made.add_column(heading, overflow="fold")
        for (name, dtype, shape, status, reason), number in Counter(map(_row, plan.verdicts)).items():
            becomes = "FP8" if status == "quantized" else f"{status}: {reason}"
            cells = name, str(number), dtype, shape, becomes
            made.add_row(*map(escape, cells), style=STYLES[status])
        console.print(made)
    else:
        for verdict in plan.verdicts:
            tabbed(verdict.status, verdict.tensor, verdict.dtype, _shape(verdict), verdict.reason)
    _show_extras(plan)
    tally = Counter(verdict.status for verdict in plan.verdicts)
    refused = f", {tally['refused']:,} refused" if tally["refused"] else ""
    sizes = f"{plan.bytes_before:,} bytes become {plan.bytes_after:,}"
    after = "nothing would be written" if plan.refusal else sizes
    line(f"{tally['quantized']:,} quantized, {tally['kept']:,} kept{refused}: {after}")


def _row(verdict: "Verdict") -> tuple[str, str, str, str, str]:
    """Return a tensor's cells, with stars for the numbers of layers and experts, so that similar rows are equal."""
    return starred(verdict.tensor), verdict.dtype, _shape(verdict), verdict.status, starred(verdict.reason)


def _shape(verdict: "Verdict") -> str:
    return "[" + ", ".join(map(str, verdict.shape)) + "]"
