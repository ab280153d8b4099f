"""`fp8core quantize`: what it prints, what it lists before, and what is there after it was stopped."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from fp8core import cli
from fp8core.cli import terminal
from support.checkpoints import left_in, model, normal, read, write
from support.command_line import (
    fp8core_,  # noqa: F401
    rows,
    runner,
)

ROOT = Path(__file__).resolve().parents[2]
Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "in.safetensors", model())


def test_it_writes_a_checkpoint_and_says_what_became_of_each_tensor(fp8core_, tmp_path, source):
    arguments = ("quantize", source, tmp_path / "out.safetensors", "--scheme", "block")
    code, out, err = fp8core_(*arguments, "--exclude", r"re:.*\.layers.0.mlp\.down_proj")
    assert (code, err) == (0, "")
    assert "1 weight is FP8 (scheme block); 9 tensors stay as before:" in out
    assert "  embedding: readers look up its rows without scales: model.embed_tokens.weight\n" in out
    assert r"  excluded by 're:.*\.layers.0.mlp\.down_proj': model.layers.0.mlp.down_proj.weight" in out
    assert re.search(r"1-D: a norm or bias: \S+ and 1 more\n", out)
    assert f"{tmp_path}/out.config.json has the quantization_config, which readers expect in config.json.\n" in out
    assert {n for n in read(tmp_path / "out.safetensors") if n.endswith("_scale")} == {f"{Q_PROJ}.weight_scale"}
    code, out, err = fp8core_(*arguments)
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path}/out.safetensors exists: give another name, or force (--force) to replace it\n"
    assert fp8core_(*arguments, "--force", "--include", "lm_head")[0] == 0


@pytest.mark.parametrize(
    ("tensors", "line"),
    [
        ({"a.weight": normal(4, 4)}, "1 weight is FP8 (scheme channel); 0 tensors stay as before."),
        (
            {"a.weight": normal(4, 4), "a.bias": normal(4)},
            "1 weight is FP8 (scheme channel); 1 tensor stays as before:",
        ),
        ({"a.weight": normal(4, 4), "b.weight": normal(4, 4)}, "2 weights are FP8 (scheme channel); 0 tensors stay"),
    ],
)
def test_counts_have_their_grammar(fp8core_, tmp_path, tensors, line):
    write(tmp_path / "in.safetensors", tensors)
    _, out, _ = fp8core_("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert f"\n{line}" in out


@pytest.mark.parametrize(("columns", "smaller"), [(4, False), (4096, True)])
def test_only_a_smaller_checkpoint_is_called_smaller(fp8core_, tmp_path, columns, smaller):
    source = write(tmp_path / "in.safetensors", {"a.weight": normal(4, columns)})
    assert ("times smaller" in fp8core_("quantize", source, tmp_path / "out.safetensors")[1]) is smaller


def test_a_folder_tells_what_is_left_out(fp8core_, tmp_path):
    (tmp_path / "in" / "2_Dense").mkdir(parents=True)
    for folder in ("in", "in/2_Dense"):
        write(tmp_path / folder / "model.safetensors", {"a.weight": normal(4, 4)})
    (tmp_path / "in" / "pytorch_model.bin").write_bytes(b"big")
    code, out, _ = fp8core_("quantize", tmp_path / "in", tmp_path / "out")
    assert code == 0
    assert "Left out: pytorch_model.bin (another form of the weights)\n" in out
    assert "Copied as it is: 2_Dense/model.safetensors (in a subfolder)\n" in out
    assert f"{tmp_path}/out/config.json has the quantization_config.\n" in out


def test_a_dry_run_lists_every_tensor_on_a_line_and_writes_nothing(fp8core_, tmp_path, source):
    code, out, err = fp8core_("quantize", source, "--dry-run")
    assert (code, err) == (0, "")
    lines = [line.split("\t") for line in out.splitlines()]
    assert {line[1]: line[0] for line in lines[:-1]} == {
        name: "quantized" if name.endswith(("q_proj.weight", "down_proj.weight")) else "kept" for name in model()
    }
    assert ["quantized", f"{Q_PROJ}.weight", "F32", "[96, 128]", "linear layer"] in lines
    assert re.fullmatch(r"2 quantized, 8 kept: [\d,]+ bytes become [\d,]+", lines[-1][0])
    assert left_in(tmp_path) == ["in.safetensors"]


def test_a_dry_run_on_a_terminal_is_a_table_with_a_row_for_all_layers(capsys, monkeypatch, tmp_path):
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": normal(64, 64) for layer in range(12)}
    source = write(tmp_path / "in.safetensors", {**tensors, "lm_head.weight": normal(64, 64)})
    from fp8core.cli import quantize

    fp8core_ = runner(capsys, monkeypatch)
    monkeypatch.setattr(quantize, "console", Console(force_terminal=True, width=200, color_system=None))
    code, out, _ = fp8core_("quantize", source, "--dry-run")
    assert code == 0
    table = rows(out)
    assert ["model.layers.*.mlp.up_proj.weight", "12", "F32", "[64, 64]", "FP8"] in table
    assert [row[4] for row in table if row[0] == "lm_head.weight"] == [
        "kept: head or pooler: vLLM has no place for its scale"
    ]


def test_a_dry_run_of_what_would_be_refused_is_status_1(fp8core_, tmp_path):
    names = [f"layers.0.{part}_proj.weight" for part in "qkv"]
    source = write(tmp_path / "in.safetensors", {name: normal(64, 64) for name in names})
    code, out, _ = fp8core_("quantize", source, "--dry-run", "--exclude", "*q_proj")
    assert code == 1
    assert out.count("refused\t") == 2
    assert out.endswith("0 quantized, 1 kept, 2 refused: nothing would be written\n")
    code, out, err = fp8core_("quantize", source, tmp_path / "out.safetensors", "--exclude", "*q_proj")
    assert (code, out) == (1, "")
    assert err.startswith("error: cannot quantize layers.0.k_proj.weight: vLLM joins q_proj, k_proj, v_proj")
    assert "(1 more: see --dry-run or plan_checkpoint)" in err
    code, out, _ = fp8core_("quantize", source, "--dry-run", "--exclude", "*")
    assert (code, out.splitlines()[-1]) == (1, "0 quantized, 3 kept: nothing would be written")
    assert left_in(tmp_path) == ["in.safetensors"]


def test_a_dry_run_checks_the_target_too(fp8core_, tmp_path, source):
    (tmp_path / "out.safetensors").write_bytes(b"")
    code, _, err = fp8core_("quantize", source, tmp_path / "out.safetensors", "--dry-run")
    assert (code, "exists" in err) == (1, True)


def test_without_a_target_it_asks_for_one(fp8core_, source):
    code, _, err = fp8core_("quantize", source)
    assert code == 2
    assert "needs a file or folder to write, or --dry-run" in err


def test_a_warning_is_a_line(fp8core_, tmp_path, source):
    left = tmp_path / ".out.safetensors.0123abcd.fp8core"
    left.write_bytes(b"half")
    code, _, err = fp8core_("quantize", source, tmp_path / "out.safetensors")
    assert (code, err) == (0, f"warning: {left} was left by a run that was killed: removed\n")


def test_progress_in_a_log_is_a_line_now_and_then(fp8core_, tmp_path, source, monkeypatch):
    monkeypatch.setattr(terminal, "LINE_EVERY", 1)
    code, _, err = fp8core_("quantize", source, tmp_path / "out.safetensors")
    assert code == 0
    total = sum(tensor.nbytes for tensor in model().values())
    lines = re.findall(rf"quantizing: (\d+) % of {total:,} bytes \((\S+)\)\n", err)
    assert 3 <= len(lines) <= 10
    assert [int(percent) for percent, _ in lines] == sorted(int(percent) for percent, _ in lines)
    assert {name for _, name in lines} <= set(model())


SLOWLY = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a runner of the tests may ignore, and its processes with it
if "nohup" in sys.argv:
    sys.argv.remove("nohup")
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
from fp8core.checkpoint.disk import writing
from fp8core import cli
quantize = writing.quantize
def slowly(*args, **kwargs):
    print("started", flush=True)
    sys.stdin.readline()
    return quantize(*args, **kwargs)
writing.quantize = slowly
cli.main()
"""


def stopped(number, *arguments):
    """Send a signal to a run in the middle of its work: (exit status, stdout, stderr)."""
    command = [sys.executable, "-c", SLOWLY, "quantize", *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as run:
        assert run.stdout.readline() == "started\n"
        assert any(name.startswith(".out") for name in left_in(arguments[1].parent))  # work is under way
        run.send_signal(number)
        out, err = run.communicate(input="\n" * 100, timeout=60)
    return run.returncode, out, err


STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("number", STATUS)
def test_a_stopped_run_leaves_what_was_there_and_says_so(tmp_path, number, kind, old, fp8core_):
    (tmp_path / "in").mkdir()
    source = write(tmp_path / "in" / "model.safetensors", model())
    source, target = (source, tmp_path / "out.safetensors") if kind == "file" else (source.parent, tmp_path / "out")
    if old:
        assert fp8core_("quantize", source, target)[0] == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    code, _, err = stopped(number, source, target, "--force")
    state = f"{target} is as it was; nothing was left behind" if old else "nothing was left behind"
    assert (code, err) == (STATUS[number], f"interrupted: {state}\n")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_nohup_keeps_a_run_alive(tmp_path, source):
    code, out, _ = stopped(signal.SIGHUP, source, tmp_path / "out.safetensors", "nohup")
    assert code == 0
    assert "2 weights are FP8" in out


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_run_leaves_the_old_and_the_next_one_tells_and_cleans(tmp_path, kind, fp8core_):
    (tmp_path / "in").mkdir()
    source = write(tmp_path / "in" / "model.safetensors", model())
    source, target = (source, tmp_path / "out.safetensors") if kind == "file" else (source.parent, tmp_path / "out")
    assert fp8core_("quantize", source, target, "--scheme", "tensor")[0] == 0
    before = left_in(tmp_path)
    assert stopped(signal.SIGKILL, source, target, "--force")[0] == -signal.SIGKILL
    left = set(left_in(tmp_path)) - set(before)
    assert left
    weights = target / "model.safetensors" if kind == "folder" else target
    assert read(weights)[f"{Q_PROJ}.weight_scale"].shape == (1,)  # the old one, whole
    code, _, err = fp8core_("quantize", source, target, "--force")
    assert code == 0
    assert {line.split()[1] for line in err.splitlines()} == {str(tmp_path / name) for name in left}
    assert err.count("was left by a run that was killed: removed\n") == len(left)
    assert left_in(tmp_path) == before
    assert read(weights)[f"{Q_PROJ}.weight_scale"].shape == (96, 1)


def test_the_readmes_commands_work(fp8core_, tmp_path, monkeypatch):
    """Both lines of README.md, with `checkpoint/` a folder of shards."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "model.safetensors", model())
    (tmp_path / "checkpoint").mkdir()
    write(tmp_path / "checkpoint" / "model.safetensors", model())
    assert fp8core_("quantize", "model.safetensors", "model-fp8.safetensors")[0] == 0
    arguments = ("--scheme", "block", "--exclude", r"re:.*\.down_proj")
    assert fp8core_("quantize", "checkpoint/", "checkpoint-fp8/", *arguments)[0] == 0
    assert json.loads((tmp_path / "checkpoint-fp8" / "fp8core.json").read_text())["quantized"] == [f"{Q_PROJ}.weight"]


@pytest.mark.parametrize("plot", ["folder", "errors.doc", "absent/errors.png", "errors"])
def test_a_plot_that_cannot_be_drawn_is_refused_before_the_run(fp8core_, tmp_path, plot, monkeypatch):
    from fp8core import demo

    (tmp_path / "folder").mkdir()
    monkeypatch.setattr(demo, "compare", lambda *_: pytest.fail("it ran"))
    code, out, err = fp8core_("demo", "--plot", tmp_path / plot)
    assert (code, out) == (1, "")
    assert str(tmp_path / plot) in err
    assert left_in(tmp_path) == ["folder"]


def test_a_plot_without_matplotlib_is_refused_before_the_run(fp8core_, tmp_path, monkeypatch):
    from fp8core import demo

    monkeypatch.setattr(demo, "compare", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    code, _, err = fp8core_("demo", "--plot", tmp_path / "errors.png")
    assert (code, err) == (1, "error: --plot needs matplotlib, which is not installed: pip install matplotlib\n")


def test_the_names_that_other_modules_use_are_there():
    assert cli.console is terminal.console
    assert cli.errors is terminal.errors
