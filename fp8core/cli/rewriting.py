"""The steps that `fp8core quantize` and `fp8core convert` share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fp8core.cli.arguments import bad_value
from fp8core.cli.terminal import Bar, interrupted, warnings_as_lines

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
        raise bad_value("TARGET", "needs a file or folder to write, or --dry-run, got none")
    with interrupted(), warnings_as_lines(), Bar(doing) as advance:
        return None, run(source, target, **options, **allowed, progress=advance)
