"""Names that mean something to the terminal: brackets, letters its encoding lacks, and how wide tables are."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fp8core import demo
from fp8core.cli import convert, inspect, quantize, verify
from support.checkpoints import normal, write
from support.command_line import (
    fp8core_,  # noqa: F401
)

ROOT = Path(__file__).resolve().parents[2]
ODD = "layers.0.a[/b].[red]up_proj.weight"
LONG = f"model.layers.0.{'.'.join(['inner'] * 20)}.up_proj.weight"


@pytest.fixture(params=["terminal", "pipe"])
def shown(request, monkeypatch, fp8core_):
    """The command line, with tables as a terminal shows them, or as they are in a pipe."""
    if request.param == "terminal":
        for command in (convert, inspect, quantize, verify):
            monkeypatch.setattr(command, "console", Console(force_terminal=True, width=200, color_system=None))
    return fp8core_


def commands(source, target, converted):
    """Return commands that print names: they quantize ``source`` to ``target``, and plan a conversion of that."""
    return (
        ("inspect", source),
        ("quantize", source, "--dry-run"),
        ("quantize", source, target),
        ("inspect", target),
        ("verify", target, "--against", source),
        ("convert", target, converted, "--to", "tensor", "--dry-run", "--lossy"),
    )


def test_brackets_in_names_are_shown(shown, tmp_path):
    folder = tmp_path / "models[bold]"
    folder.mkdir()
    source = write(folder / "in[red].safetensors", {ODD: normal(128, 256)})
    target, wide = folder / "out[red].safetensors", folder / "wide[red].safetensors"
    for arguments in (*commands(source, target, wide), ("convert", target, wide, "--to", "bf16")):
        status, out, err = shown(*arguments)
        assert (status, err) == (0, ""), arguments
        assert "[red]" in out or "[/" in out, arguments


def test_names_say_nothing_to_the_terminal(fp8core_, tmp_path):
    """Whoever made a checkpoint has chosen its names."""
    name = "layers.0.\x1b]0;title\x07.\x9b31mup\n\t_proj.weight"
    source = write(tmp_path / "in.safetensors", {name: normal(128, 256)})
    target, converted = tmp_path / "out.safetensors", tmp_path / "tensor.safetensors"
    for arguments in (*commands(source, target, converted), ("convert", target, converted, "--to", "tensor")):
        _, out, err = fp8core_(*arguments)
        said = out + err
        assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", said), arguments
        assert "\\x1b]0;title\\x07.\\x9b31mup" in said or "proj" not in said, arguments
    assert r"\x0a\x09_proj.weight" in fp8core_("quantize", source, "--dry-run")[1]


def test_brackets_in_the_cache_folder_and_in_reasons_are_shown(fp8core_, tmp_path, monkeypatch):
    from fp8core.cli.explain import verdicts
    from fp8core.runtime import kernel_cache
    from fp8core.table import Explanation, Verdict

    monkeypatch.setattr(kernel_cache, "folder", lambda: tmp_path / "cache[red]")
    assert f"kept in {tmp_path / 'cache[red]'}\n" in fp8core_("info")[1]
    said = Explanation(None, (Verdict("generic", "unable", "needs a[m, k]"),))
    console = Console(width=200, color_system=None)
    with console.capture() as shown:
        console.print(verdicts(said, "host", "host"))
    assert "needs a[m, k]" in shown.get()


def test_faults_name_their_tensors(shown, tmp_path):
    codes = np.full((4, 4), 0x7F, np.uint8)
    import ml_dtypes

    tensors = {ODD: codes.view(ml_dtypes.float8_e4m3fn), f"{ODD}_scale": np.ones(1, np.float32)}
    status, out, _ = shown("verify", write(tmp_path / "in.safetensors", tensors))
    assert status == 1
    assert ODD in out


def piped(*arguments, **environment):
    """Run a command whose output is a pipe, as bytes."""
    without = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    run = subprocess.run(
        [sys.executable, "-m", "fp8core", *map(str, arguments)], capture_output=True, check=False,
        env={**without, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip
    return run.returncode, run.stdout, run.stderr


def test_letters_that_the_output_cannot_show_are_codes(tmp_path):
    source = write(tmp_path / "modèle.safetensors", {"layers.0.模.weight": normal(64, 64)})
    status, out, err = piped("inspect", source, PYTHONIOENCODING="latin-1")
    assert (status, err) == (0, b"")
    assert "modèle.safetensors: not quantized".encode("latin-1") in out
    assert rb"layers.*.\u6a21.weight" in out


def test_a_row_is_one_line_in_a_pipe(tmp_path):
    source = write(tmp_path / "in.safetensors", {LONG: normal(64, 64)})
    name = LONG.replace("0", "*").encode()
    assert name in piped("inspect", source)[1]
    assert name not in piped("inspect", source, COLUMNS="60")[1]


def cells(text):
    """Return the text of each column of each table, by the number of the table's columns, without blanks."""
    lines = [re.split("[│┃]", line)[1:-1] for line in text.splitlines() if line[:1] in ("│", "┃")]
    return {
        count: [
            "".join("".join(column).split())
            for column in zip(*[one for one in lines if len(one) == count], strict=True)
        ]
        for count in {*map(len, lines)}
    }


@pytest.mark.parametrize(
    ("command", "tables"),
    [
        (("info",), 2),
        (("explain", "1024", "4096", "4096", "--target", "sm_90"), 1),
        (("inspect", "fp8.safetensors"), 1),
    ],
)
def test_a_narrow_table_shows_all_of_each_cell(command, tables, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert piped("quantize", write(tmp_path / "in.safetensors", {LONG: normal(64, 64)}), "fp8.safetensors")[0] == 0
    wanted, found = (cells(piped(*command, COLUMNS=columns)[1].decode()) for columns in ("400", "40"))
    assert len(wanted) == tables
    assert found == wanted


def test_the_demo_shows_all_of_each_layer_in_a_narrow_table():
    layer = demo.Layer("encoder.layer.0.attention.output.dense", (1536, 384), "host + host", 0.03, 0.05)
    report = demo.Report("channel", "", "", [demo.Sentence("x", 3, 0.999)], [layer], 4, 1, {})
    found = []
    for width in (400, 40):
        console = Console(width=width, record=True, file=io.StringIO())
        demo.show(report, console)
        found.append(cells(console.export_text()))
    assert len(found[0]) == 2
    assert found[0] == found[1]


def test_columns_that_are_no_width_are_as_if_they_were_not_there(tmp_path):
    source = write(tmp_path / "in.safetensors", {LONG: normal(64, 64)})
    wanted = piped("inspect", source)
    assert wanted[1].count(b"\n") == 6
    for said in ("0", "00", "-5", "x", ""):
        assert piped("inspect", source, COLUMNS=said) == wanted
    missing = piped("inspect", tmp_path / "none.safetensors", COLUMNS="0")
    assert missing == piped("inspect", tmp_path / "none.safetensors")
    assert missing[2].count(b"\n") == 1


def test_a_terminal_without_a_size_has_80_columns(tmp_path):
    """As those of containers: its columns, which shells put into COLUMNS, are 0."""
    source = write(tmp_path / "in.safetensors", {LONG: normal(64, 64)})
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "0", "TERM": "xterm"}
    command = [sys.executable, "-m", "fp8core", "inspect", str(source)]
    run = subprocess.run(command, stdin=theirs, stdout=theirs, stderr=theirs, check=False, env=environment)
    os.close(theirs)
    printed = b""
    with contextlib.suppress(OSError):  # how Linux says that all has been read
        while part := os.read(ours, 1 << 16):
            printed += part
    os.close(ours)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.decode()).splitlines()
    assert run.returncode == 0, printed
    assert max(len(line) for line in lines if line.startswith(("┏", "│"))) <= 80
    assert any(line.startswith("│") for line in lines)
