"""The arguments and options that several commands for checkpoints share."""

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
