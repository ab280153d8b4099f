"""Write docs/reference/cli.md: every command with its arguments and options, from the functions that typer reads.

Run it without arguments to rewrite the page; with --check the exit status says whether it is current.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fp8core.cli import bench, compiling, convert, demo, explain, info, quantize, tune, verify
from fp8core.cli import inspect as inspect_command

PAGE = Path(__file__).resolve().parent / "reference" / "cli.md"
COMMANDS: tuple[Callable[..., None], ...] = (
    info.info,
    explain.explain,
    inspect_command.inspect,
    verify.verify,
    convert.convert,
    quantize.quantize,
    tune.tune,
    compiling.compile,
    demo.demo,
    bench.bench,
)
HEAD = """# Command line

<!-- Written by docs/make_cli_reference.py from the commands themselves. -->

This page lists the commands of `fp8core` (or `python -m fp8core`) with their options. `-h` and `--help` explain a
command, `--version` prints the version.

An error is one line on standard error, `error: …`, a warning `warning: …`; arguments that were not understood are
answered with the usage and `Error: …`. Tables fit the terminal; in a file or a pipe each row is one line, unless
`COLUMNS` is set.

| exit status | meaning |
| --- | --- |
| 0 | done |
| 1 | refused or failed: standard error says why; `verify`: there are faults; `--dry-run`: the run would be refused |
| 2 | the arguments were not understood |
| 129, 130, 143 | stopped by SIGHUP (a closed terminal), Ctrl-C or SIGTERM; `nohup` keeps a run alive |

| environment | meaning, for the library and the commands |
| --- | --- |
| `FP8CORE_CACHE_DIR` | the folder of compiled kernels and of the demo's model; by default in the user's cache folder |
| `FP8CORE_TUNINGS` | the file of tunings that products use ([tune](../how-to/tune.md#use-the-file)) |

A `~` or `~user` at the beginning of either variable stands for the home folder, also where no shell has expanded it, as
in an `.env` file. In arguments only the shell expands it.
"""


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *(line for command in COMMANDS for line in section(command))])


def section(command: Callable[..., None]) -> Iterator[str]:
    """Yield the lines about one command."""
    hints = get_type_hints(command, include_extras=True)
    rows: dict[str, list[str]] = {"ArgumentInfo": [], "OptionInfo": []}
    usage = f"fp8core {command.__name__} [OPTIONS]"
    for name, parameter in inspect.signature(command).parameters.items():
        kind, about = parts(hints[name])
        group = type(about).__name__
        if group == "ArgumentInfo":
            shown = f"`{name.upper()}`"
            usage += f" {name.upper()}" if parameter.default is parameter.empty else f" [{name.upper()}]"
        else:
            names = (about.default, *(about.param_decls or ()))  # typer's Option takes a first name as its default
            declared = [one for one in names if isinstance(one, str) and one.startswith("--")]
            shown = f"`{declared[0] if declared else '--' + name.replace('_', '-')}`"
        rows[group].append(f"| {shown} | {values(kind, about)} | {default(parameter.default)} | {about.help} |")
    yield from ("", f"## {command.__name__}", "", inspect.getdoc(command) or "", "", "```text", usage, "```")
    table = rows["ArgumentInfo"] + rows["OptionInfo"]
    if table:
        yield from ("", "| | values | default | |", "| --- | --- | --- | --- |", *table)
    yield ""


def parts(hint: Any) -> tuple[Any, Any]:
    """Return the type of a parameter and its typer declaration."""
    assert get_origin(hint) is Annotated
    kind, about = get_args(hint)
    if get_origin(kind) in (Union, UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return kind, about


def values(kind: Any, about: Any) -> str:
    """Return a description of the values of a parameter."""
    if get_origin(kind) is Literal:
        return ", ".join(f"`{one}`" for one in get_args(kind))
    if get_origin(kind) is list:
        return "text"
    least = f" from {about.min}" if about.min is not None else ""
    named = {int: "number", float: "number", str: "text", Path: "path", bool: ""}
    return named[kind] + least


def default(value: Any) -> str:
    """Return a default value in the form of the page."""
    return "" if value is None or value is False or value is inspect.Parameter.empty else f"`{value}`"


def main() -> int:
    """Rewrite the page; with --check, return 1 if it would change."""
    current = page().replace("\n\n\n", "\n\n")
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != current)
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(current, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
