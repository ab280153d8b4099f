"""The command line, with one module for each command."""

import os
import signal
import sys
from inspect import getdoc
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

import fp8core
from fp8core.cli import bench, compiling, convert, demo, explain, info, inspect, quantize, tune, verify
from fp8core.cli.targets import GPUS, UNPROVEN, proven, target_named
from fp8core.cli.terminal import console, error_line, errors
from fp8core.errors import Fp8Error

__all__ = ["GPUS", "UNPROVEN", "app", "console", "errors", "main", "proven", "target_named"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's help tables break values in the middle on terminals of 80 columns
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    info.info,
    explain.explain,
    inspect.inspect,
    verify.verify,
    convert.convert,
    quantize.quantize,
    tune.tune,
    compiling.compile,
    demo.demo,
    bench.bench,
):
    app.command(short_help=getdoc(command))(command)  # without short_help, typer cuts texts in its list of commands


def main() -> None:
    """Run the command line; errors of library, system and memory are printed as one red line, with exit status 1."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:  # nohup makes the process ignore SIGHUP
            signal.signal(number, _stop)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed (cron, >&-): the next file that is opened would get its descriptor
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # print characters that the encoding lacks as escapes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except Fp8Error as error:
        _fail(str(error))
    except MemoryError as error:
        _fail(f"no memory: {error}")
    except OSError as error:
        what = error.filename
        if what is None:  # printing failed: its errors name no file
            what = "cannot write the output"
            _mute(sys.stdout.fileno())
        _fail(f"{what}: {error.strerror}")


def _fail(text: str) -> NoReturn:
    """Print an error, and exit with status 1."""
    errors.print("[bold red]error:[/] ", end="")
    error_line(text, style="red")
    sys.exit(1)


def _stop(number: int, _: object) -> NoReturn:
    """Raise SystemExit, so that temporary files are removed."""
    sys.exit(128 + number)


def _mute(handle: int) -> None:
    """Redirect a file descriptor to the null device: at exit, Python would fail again to write what is buffered."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, handle)
    os.close(nowhere)


def _version(wanted: bool) -> None:
    if wanted:
        console.print(f"fp8core {fp8core.__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 for inference: quantize, inspect, verify and convert checkpoints; explain, tune and time kernels."""
