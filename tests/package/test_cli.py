"""The command line: what it prints, how it refuses, and what it leaves when it is stopped."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import fp8core
from fp8core import cli
from fp8core.runtime import device
from package.test_checkpoint import left_in, model, read, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fp8core_(capsys, monkeypatch):
    """Run the command line in this process: (exit status, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "200")
    for console in (cli.console, cli.errors):  # whatever the environment said when they were made
        monkeypatch.setattr(console, "_width", 200)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fp8core", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        captured = capsys.readouterr()
        return left.value.code or 0, captured.out, captured.err

    return run


def row(text, name):
    """Return the cells of a table's row."""
    line = next(line for line in text.splitlines() if re.match(rf"│ {name} +│", line))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_version(fp8core_):
    assert fp8core_("--version") == (0, f"fp8core {fp8core.__version__}\n", "")


def test_without_arguments_it_shows_its_commands(fp8core_):
    code, out, err = fp8core_()
    assert code == 2
    assert all(command in out + err for command in ("info", "explain", "quantize", "demo", "bench"))


def test_info_names_versions_devices_capabilities_and_the_cache(fp8core_, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    code, out, _ = fp8core_("info")
    assert code == 0
    assert f"Compiled kernels are kept in {tmp_path}" in out
    assert row(out, "numpy")[1] == __import__("numpy").__version__
    for feature, (able, _) in fp8core.capabilities().items():
        assert row(out, feature)[1] == ("yes" if able else "no")
    if not device.count():
        assert "No GPU" in out
        assert device.why_none() in out


@pytest.mark.parametrize(
    ("arguments", "kernel", "verdict", "reason"),
    [
        (("--target", "host"), "host", "chosen", ""),
        (("--target", "host"), "simt", "unable", "needs cuda or hip, got host"),
        (("--target", "sm_80"), "simt", "chosen", ""),
        (("--target", "sm_80"), "cublaslt", "unable", "needs FP8 matrix instructions (sm_89 and later"),
        (("--target", "gfx942", "--a", "float8_e4m3fn"), "hipblaslt", "unable", "gfx942 multiplies fnuz formats"),
        (("--target", "sm_90", "--scale-a", "group", "--scale-b", "block", "--out", "float16"), "host", "unable", ""),
    ],
)
def test_explain_gives_a_verdict_for_every_kernel(fp8core_, arguments, kernel, verdict, reason):
    code, out, _ = fp8core_("explain", 16, 4096, 4096, *arguments)
    assert code == 0
    name, got, why = row(out, kernel)
    assert (name, got) == (kernel, verdict)
    assert why.startswith(reason)


@pytest.mark.skipif(device.count() > 0, reason="with a GPU its library is asked")
def test_explain_does_not_hold_an_absent_library_against_a_kernel(fp8core_):
    _, out, _ = fp8core_("explain", 4096, 4096, 4096, "--target", "sm_90")
    assert row(out, "cublaslt")[1] == "unknown"
    assert row(out, "simt")[1] == "chosen if no unknown is"


@pytest.mark.parametrize(
    "arguments",
    [
        ("explain", 0, 1, 1),
        ("explain", 1, 1),
        ("explain", 1, 1, 1, "--target", "sm_61"),
        ("explain", 1, 1, 1, "--a", "int8"),
        ("quantize", "a"),
        ("demo", "--scheme", "int4"),
        ("nonsense",),
    ],
)
def test_what_it_does_not_understand_is_status_2(fp8core_, arguments):
    code, out, err = fp8core_(*arguments)
    assert code == 2
    assert out == ""
    assert "Usage" in err


def test_explain_of_operands_that_no_kernel_multiplies(fp8core_):
    code, out, _ = fp8core_("explain", 16, 64, 64, "--a", "float8_e5m2", "--b", "float8_e5m2", "--target", "host")
    assert code == 0
    assert "chosen" not in out


@pytest.mark.parametrize("k", [128, 384])
@pytest.mark.parametrize("scale_b", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("scale_a", ["tensor", "row", "group"])
def test_explain_refuses_the_pairs_of_scales_that_the_product_refuses(fp8core_, scale_a, scale_b, k):
    m, n, groups = 4, 256, k // 128
    shapes_a = {"tensor": (1,), "row": (m, 1), "group": (m, groups)}
    shapes_b = {"tensor": (1,), "row": (n, 1), "group": (n, groups), "block": (n // 128, groups)}
    a, b = (np.ones((rows, k), ml_dtypes.float8_e4m3fn) for rows in (m, n))
    scales = np.ones(shapes_a[scale_a], np.float32), np.ones(shapes_b[scale_b], np.float32)
    arguments = ("explain", m, n, k, "--target", "host", "--scale-a", scale_a, "--scale-b", scale_b)
    code, out, err = fp8core_(*arguments)
    if code:
        with pytest.raises((fp8core.errors.ScaleError, fp8core.errors.ShapeError), match=r"scale_[ab] .*needs"):
            fp8core.scaled_mm_nt(a, b, *scales)
        assert out == ""
        assert re.match("error: scale_[ab] .*needs scale_[ab] ", err)
    else:
        fp8core.scaled_mm_nt(a, b, *scales)
        assert row(out, "host")[1] == "chosen"


def test_quantize_writes_and_tells(fp8core_, tmp_path):
    write(tmp_path / "in.safetensors", model())
    arguments = ("quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors", "--scheme", "block")
    code, out, err = fp8core_(*arguments, "--exclude", "*.down_proj")
    assert (code, err) == (0, "")
    assert "1 weights are FP8 (scheme block); 9 tensors stay." in out
    assert str(tmp_path / "out.config.json") in out
    assert {n for n in read(tmp_path / "out.safetensors") if n.endswith("_scale")} == {
        "model.layers.0.self_attn.q_proj.weight_scale"
    }
    code, out, err = fp8core_(*arguments)
    assert (code, out) == (1, "")
    assert err == f"error: {tmp_path}/out.safetensors exists: give another name, or force (--force) to replace it\n"
    assert fp8core_(*arguments, "--force", "--include", "lm_head")[0] == 0


def test_bench_times_what_it_names(fp8core_):
    code, out, _ = fp8core_("bench", "--tokens", 32, "--width", 256, "--seconds", 0.01)
    assert code == 0
    for operation in ("quantize per token", "dequantize per token", "product per token", "product 1x128 by 128x128"):
        assert float(row(out, operation)[2].removesuffix(" us").replace(",", "")) > 0


SLOWLY = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
from fp8core.checkpoint import writing
from fp8core import cli
quantize = writing.quantize
def slowly(*args, **kwargs):
    print("started", flush=True)
    signal.pause()
    return quantize(*args, **kwargs)
writing.quantize = slowly
cli.main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_quantize_leaves_no_file(tmp_path, number):
    write(tmp_path / "in.safetensors", model())
    command = [sys.executable, "-c", SLOWLY, "quantize", tmp_path / "in.safetensors", tmp_path / "out.safetensors"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        assert run.stdout.readline() == "started\n"
        assert len(left_in(tmp_path)) == 3  # the source and two temporary files: work was under way
        run.send_signal(number)
        _, err = run.communicate(timeout=30)
    assert run.returncode != 0
    assert "Traceback" not in err
    assert left_in(tmp_path) == ["in.safetensors"]


def test_it_is_a_command_and_a_module():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "fp8core", "--version"], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout == f"fp8core {fp8core.__version__}\n"
