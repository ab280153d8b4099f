"""docs/reference/cli.md is what the commands say of themselves, and the commands of the how-to work."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer.main

from fp8core.cli import app
from support.checkpoints import normal, write
from support.command_line import (
    fp8core_,  # noqa: F401
)

ROOT = Path(__file__).resolve().parents[2]
CONVERT = ROOT / "docs" / "how-to" / "convert-a-checkpoint.md"
HOW_TO = ROOT / "docs" / "how-to" / "quantize-a-checkpoint.md"
PARTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.gate_proj")


def test_the_reference_of_the_command_line_is_current():
    command = [sys.executable, "docs/make_cli_reference.py", "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert run.returncode == 0, run.stderr or "run python docs/make_cli_reference.py"


def test_the_reference_has_every_option_that_typer_knows():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    sections = {section.split("\n", 1)[0]: section for section in page.split("\n## ")[1:]}
    commands = typer.main.get_command(app).commands
    assert set(sections) == set(commands)
    for name, command in commands.items():
        options = {one for parameter in command.params for one in parameter.opts if one.startswith("--")}
        assert set(re.findall(r"^\| `(--[a-z-]+)`", sections[name], re.MULTILINE)) == options - {"--help"}
        arguments = [parameter.name.upper() for parameter in command.params if not parameter.opts[0].startswith("-")]
        assert re.findall(r"^\| `([A-Z]+)`", sections[name], re.MULTILINE) == arguments


def test_the_commands_of_the_how_to_work(fp8core_, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {f"model.layers.{layer}.{part}.weight": normal(128, 128) for layer in range(2) for part in PARTS}
    (tmp_path / "model").mkdir()
    others = {name: normal(100, 128) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write(tmp_path / "model" / "model.safetensors", tensors | others)
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    modules = [f"model.layers.{layer}.{part}" for layer in range(2) for part in PARTS]
    (tmp_path / "scales.json").write_text(json.dumps(dict.fromkeys(modules, 0.013)))
    blocks = re.findall(r"```console\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert len(commands) == 7
    counts = []
    for prompt, name, *arguments in commands:
        assert (prompt, name) == ("$", "fp8core")
        code, out, err = fp8core_(*arguments)
        assert (code, err) == (0, ""), arguments
        counts.append(re.search(r"^(\d+) (?:weights are FP8|quantized)", out, re.MULTILINE)[1])
    assert counts == ["12", "12", "4", "6", "13", "12", "12"]
    assert json.loads((tmp_path / "model-fp8" / "fp8core.json").read_text(encoding="utf-8"))["scheme"] == "tensor"


def test_the_commands_about_fp8_checkpoints_work(fp8core_, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tensors = {f"model.layers.{layer}.{part}.weight": normal(256, 256) for layer in range(2) for part in PARTS}
    (tmp_path / "model").mkdir()
    write(tmp_path / "model" / "model.safetensors", tensors | {"model.embed_tokens.weight": normal(100, 256)})
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    for arguments in (("model-block", "--scheme", "block"), ("model-tensor", "--scheme", "tensor")):
        assert fp8core_("quantize", "model", *arguments)[0] == 0
    assert fp8core_("convert", "model-block", "model-fp8", "--to", "deepseek")[0] == 0
    blocks = re.findall(r"```console\n(.*?)```", CONVERT.read_text(encoding="utf-8"), re.DOTALL)
    commands = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert len(commands) == 13
    for prompt, name, *arguments in commands:
        assert (prompt, name) == ("$", "fp8core")
        code, out, err = fp8core_(*arguments)
        assert (code, err) == (0, ""), arguments
        said = {
            "inspect": "DeepSeek / Hugging Face fp8",
            "verify": "no fault in 12 FP8 layers",
            "convert": "requantized"
            if "--lossy" in arguments
            else "bfloat16"
            if "bf16" in arguments
            else "their codes",
        }
        assert said[arguments[0]] in out, arguments
    written = {file.name for file in tmp_path.iterdir() if file.name.startswith("model-")}
    for folder in written - {"model-bf16"}:
        code, out, _ = fp8core_("verify", folder, "--against", "model")
        assert (code, "no fault in 12 FP8 layers" in out) == (0, True), out


def test_the_snippets_about_fp8_checkpoints_run(capsys):
    for snippet in re.findall(r"```python\n(.*?)```", CONVERT.read_text(encoding="utf-8"), re.DOTALL):
        exec(snippet, {})
    assert capsys.readouterr().out == "compressed-tensors channel F8_E4M3 (256, 1)\n"


def test_the_snippets_of_the_how_to_run(capsys):
    for snippet in re.findall(r"```python\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), re.DOTALL):
        exec(snippet, {})
    assert "quantized model.layers.0.mlp.down_proj.weight linear layer" in capsys.readouterr().out
