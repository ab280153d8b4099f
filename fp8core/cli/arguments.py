"""The arguments and options that several commands for checkpoints share, and the error about one of them."""

from pathlib import Path
from typing import Annotated, Final

import typer

_FILE_OR_FOLDER: Final = "A safetensors file, or a folder with one or with shards."
ModelArgument = Annotated[Path, typer.Argument(metavar="MODEL", help=_FILE_OR_FOLDER)]
SourceArgument = Annotated[Path, typer.Argument(metavar="SOURCE", help=_FILE_OR_FOLDER)]
TargetArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="TARGET",
        help="The new safetensors file, or a new folder if SOURCE is one; needed unless --dry-run is given.",
    ),
]
SplitExpertsOption = Annotated[
    bool, typer.Option("--split-experts", help="Write each expert of a stacked tensor by itself.")
]
UnscaledOption = Annotated[
    bool, typer.Option("--unscaled", help="Treat FP8 tensors without a scale as values, such as ComfyUI's casts.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file, or a folder that fp8core wrote.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List what would happen to each tensor; write nothing.")]


def bad_value(name: str, text: str) -> typer.BadParameter:
    """Return the error about the value of an option or argument; its name is in quotes, as in errors of typer."""
    return typer.BadParameter(text, param_hint=f"'{name}'")
