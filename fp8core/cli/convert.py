"""`fp8core convert`: writes an FP8 checkpoint as bfloat16, or as FP8 of another format or granularity."""

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from fp8core.cli.arguments import (
    DryRunOption,
    ForceOption,
    SourceArgument,
    SplitExpertsOption,
    TargetArgument,
    UnscaledOption,
    bad_value,
)
from fp8core.cli.numbers import whole_number
from fp8core.cli.rewriting import rewrite
from fp8core.cli.terminal import console, count, line, size, starred, tabbed, table
from fp8core.types import ConversionName

if TYPE_CHECKING:
    from fp8core.checkpoint import Change, Conversion


def convert(
    source: SourceArgument,
    target: TargetArgument = None,
    to: Annotated[
        ConversionName,
        typer.Option(
            metavar="FORM",
            help="bf16; a granularity of compressed-tensors: channel, tensor, block (128x128) or mxfp8 (1x32); or a "
            "format, which keeps the layers' scales where it can: compressed-tensors, deepseek, modelopt, "
            "modelopt-mxfp8 or comfyui.",
        ),
    ] = "bf16",
    scales: Annotated[
        Literal["float32", "ue8m0", "ue8m0-bytes"],
        typer.Option(help="Any float32, powers of two in float32, or exponent bytes (deepseek only; mxfp8 always)."),
    ] = "float32",
    fn: Annotated[bool, typer.Option("--fn", help="Write OCP's e4m3fn codes.")] = False,
    fnuz: Annotated[bool, typer.Option("--fnuz", help="Write MI300's e4m3fnuz codes.")] = False,
    block: Annotated[
        str | None,
        typer.Option(
            metavar="RxC",
            help="Block shape, such as 64x128 (block and deepseek): codes are kept if it divides the old one.",
        ),
    ] = None,
    split_experts: SplitExpertsOption = False,
    unscaled: UnscaledOption = False,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow weights to be requantized, and report the error that this adds.")
    ] = False,
    force: ForceOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Write an FP8 checkpoint as bfloat16, or as FP8 of another format or granularity. No GPU is needed."""
    from fp8core.checkpoint import convert_checkpoint, plan_conversion

    if fn and fnuz:
        raise bad_value("--fnuz", "needs one of --fn and --fnuz, got both")
    planned, done = rewrite(
        plan_conversion,
        convert_checkpoint,
        source,
        target,
        dry_run=dry_run,
        doing="converting",
        allowed={"lossy": lossy},
        to=to,
        scales=scales.replace("-", "_"),
        e4m3="fn" if fn else "fnuz" if fnuz else None,
        block_shape=None if block is None else _pair(block),
        split_experts=split_experts,
        unscaled=unscaled,
        force=force,
    )
    if planned is not None:
        _show_plan(planned, lossy=lossy)
        raise typer.Exit(1 if planned.lossy and not lossy else 0)
    if done is not None:
        _show(done)


def _pair(text: str) -> tuple[int, int]:
    """Return the two numbers of a text such as 64x128."""
    rows, cols = (whole_number(part) for part in text.partition("x")[::2])
    if rows is None or cols is None:
        needed = "needs two numbers up to 2**31 - 1 such as 64x128"
        raise bad_value("--block", f"{needed}, got {text!r}")
    return rows, cols


def _show(done: "Conversion") -> None:
    layers = len(done.source.layers)
    line(f"{done.target}: {size(done.bytes_after)}, from {size(done.bytes_before)}", style="bold")
    if done.to == "bf16":
        line(f"{count(layers, 'FP8 weight')} became bfloat16: float32(code) * scale, rounded once.")
    else:
        made, kept = len(done.lossy), layers - len(done.lossy)
        if kept:
            keep = "keeps its" if kept == 1 else "keep their"
            line(f"{count(kept, 'FP8 weight')} {keep} codes and values.")
        if made:
            name, worst = max(done.errors.items(), key=lambda item: item[1])
            mean = sum(done.errors.values()) / len(done.errors)
            line(
                f"{count(made, 'FP8 weight')} requantized: the added error is {100 * mean:.2f} % of the norm "
                f"on average, at most {100 * worst:.2f} % ({name})."
            )
    _left_out(done)
    if done.quantization_config is None:
        line("No configuration is needed." if done.to == "bf16" else "The file itself describes its quantization.")
    elif done.source.source.is_folder:
        line(f"{done.target}/config.json has the quantization_config.")
    else:
        assert done.target is not None
        beside = done.target.with_suffix(".config.json")
        line(f"{beside} has the quantization_config, which readers expect in config.json.")


def _show_plan(planned: "Conversion", *, lossy: bool) -> None:
    """Print the plan: on a terminal a table with a row for each group of similar layers, else a line for each layer."""
    if planned.to == "bf16":
        line(f"{count(len(planned.source.layers), 'FP8 weight')} would become bfloat16.")
    elif console.is_terminal:
        made = table(f"Plan for {planned.source.path}")
        made.add_column("weights", overflow="fold")
        made.add_column("number", justify="right")
        made.add_column("codes", overflow="fold")
        for (name, becomes, style), number in Counter(_rows(planned.changes)).items():
            made.add_row(escape(name), f"{number:,}", escape(becomes), style=style)
        console.print(made)
    else:
        for change in planned.changes:
            tabbed("kept" if change.exact else "requantized", change.layer.weight.name, change.why)
    _left_out(planned)
    sizes = f"{planned.bytes_before:,} bytes become {planned.bytes_after:,}"
    made_anew = len(planned.lossy)
    after = f"{made_anew:,} need --lossy: nothing would be written" if made_anew and not lossy else sizes
    line(f"{count(len(planned.source.layers), 'FP8 weight')}: {after}")


def _rows(changes: "Iterable[Change]") -> Iterable[tuple[str, str, str]]:
    for change in changes:
        becomes = "kept" if change.exact else f"requantized: {change.why}"
        yield starred(change.layer.weight.name), becomes, "" if change.exact else "yellow"


def _left_out(done: "Conversion") -> None:
    found: dict[str, list[str]] = {}
    for name, reason in done.left_out.items():
        found.setdefault(reason, []).append(name)
    for reason, names in found.items():
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        line(f"Left out: {names[0]}{more} ({reason})")
