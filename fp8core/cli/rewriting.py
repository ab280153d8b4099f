"""The arguments and the steps that `fp8core quantize` and `fp8core convert` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fp8core.cli.terminal import Bar, interrupted, warnings_as_lines

SourceArgument = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A safetensors file, or a folder with one or with shards.")
]
TargetArgument = Annotated[
    Path | None, typer.Argument(metavar="TARGET", help="The new safetensors file, or for a folder the new folder.")
]
SplitExpertsOption = Annotated[
    bool, typer.Option("--split-experts", help="Write experts that are stacked in one tensor one by one.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file, or a folder that fp8core wrote.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List the verdict on every tensor; write nothing.")]
Planned = TypeVar("Planned")
Done = TypeVar("Done")


def rewrite(
    plan: Callable[..., Planned],
    run: Callable[..., Done],
    source: Path,
    target: Path | None,
    *,
    dry_run: bool,
    doing: str,
    allowed: dict[str, Any],
    **options: Any,
) -> tuple[Planned | None, Done | None]:
    """Plan a new checkpoint if ``dry_run``, else write it; return the plan or the result, and None for the other.

    Args:
        plan: the function that plans.
        run: the function that writes.
        source: the checkpoint, for both functions.
        target: the new file or folder, for both functions; a plan does not need one.
        dry_run: whether to write nothing.
        doing: the label of the progress bar.
        allowed: options for ``run`` only.
        **options: options for both functions.
    """
    if dry_run:
        with warnings_as_lines():
            return plan(source, target, **options), None
    if target is None:
        raise typer.BadParameter("needs a file or folder to write, or --dry-run, got none", param_hint="TARGET")
    with interrupted(), warnings_as_lines(), Bar(doing) as advance:
        return None, run(source, target, **options, **allowed, progress=advance)
