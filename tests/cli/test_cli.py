"""The command line: what it prints, how it refuses, and what it leaves when it is stopped."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fp8core
from fp8core.runtime import device
from support.command_line import (
    fp8core_,  # noqa: F401
    row,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("arguments", [("explain", "16", "64", "64"), ("--help",), ("--version",), ("info",)])
def test_output_that_cannot_be_written_is_a_plain_message(arguments):
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [sys.executable, "-m", "fp8core", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert (run.returncode, run.stderr) == (1, "error: cannot write the output: No space left on device\n")


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize(("arguments", "code"), [(("--version",), 0), (("inspect", "nothere"), 1)])
def test_commands_run_where_standard_files_are_closed(closed, arguments, code):
    """As cron and ``>&-`` close them: Python has None in their places then."""
    command = [sys.executable, "-m", "fp8core", *arguments]
    closing = " ".join(f"{number}>&-" for number in closed)
    run = subprocess.run(
        ["sh", "-c", f'"$@" {closing}', "sh", *command], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == code
    assert run.stdout == ("" if 1 in closed or code else f"fp8core {fp8core.__version__}\n")
    assert run.stderr == ("" if 2 in closed or not code else "error: cannot read nothere: No such file or directory\n")


def test_too_little_memory_is_a_plain_message(fp8core_, monkeypatch):
    def cases(tokens, width):
        raise MemoryError("Unable to allocate 5.82 TiB")

    monkeypatch.setattr("fp8core.bench.cases", cases)
    assert fp8core_("bench", "--tokens", 10**11)[::2] == (1, "error: no memory: Unable to allocate 5.82 TiB\n")


def test_version_prints_the_version(fp8core_):
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


def test_info_makes_no_folder_of_kernels_and_says_if_none_can_be_made(fp8core_, monkeypatch, tmp_path):
    folder = tmp_path / "cache" / "kernels"
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(folder))
    assert f"Compiled kernels are kept in {folder}\n" in fp8core_("info")[1]
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    reason = f"it cannot be made, as {tmp_path} cannot be written"
    assert f"kept in {folder}, which is not used: {reason}\n" in fp8core_("info")[1]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "kernel", "verdict", "reason"),
    [
        (("--target", "host"), "host", "chosen", ""),
        (("--target", "host"), "generic_mma", "unable", "needs cuda or hip, got host"),
        (("--target", "sm_80"), "generic_decode", "chosen", ""),
        (("--target", "sm_80"), "cublaslt", "unable", "needs FP8 matrix instructions (sm_89 and later"),
        (("--target", "gfx942", "--a", "float8_e4m3fn"), "hipblaslt", "unable", "needs fnuz formats on gfx942"),
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
    assert row(out, "sm90_tiled")[1] == "chosen *"  # by its estimate, which the library's may beat
    assert "* unless an unknown kernel is able on the device and comes first or is estimated faster" in out
    assert row(fp8core_("explain", 4096, 4096, 4096, "--target", "sm_100")[1], "generic_mma")[1] == "chosen *"
    assert "*" not in fp8core_("explain", 16, 4096, 4096, "--target", "sm_90")[1]  # no unknown one comes first


def test_explain_calls_a_device_that_is_not_here_by_its_name(fp8core_):
    _, out, _ = fp8core_("explain", 16, 4096, 4096, "--target", "sm_80")
    assert "on sm_80:" in out
    assert row(out, "host")[2] == "needs host, got sm_80"
    assert "(device" not in out


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


def test_a_model_of_gpu_is_refused_with_its_architecture(fp8core_):
    assert "sm_90 (H100, H200)" in fp8core_("explain", 1, 1, 1, "--target", "h100")[2]


def test_explain_of_operands_that_no_kernel_multiplies(fp8core_):
    code, out, _ = fp8core_("explain", 16, 64, 64, "--a", "float8_e5m2", "--b", "float8_e5m2", "--target", "host")
    assert code == 0
    assert "chosen" not in out


def test_bench_times_what_it_names(fp8core_):
    code, out, _ = fp8core_("bench", "--tokens", 32, "--width", 256, "--seconds", 0.01)
    assert code == 0
    assert "32 tokens, weight" in out
    assert "1 token, weight" in fp8core_("bench", "--tokens", 1, "--width", 32, "--seconds", 0.01)[1]
    for operation in ("quantize per token", "dequantize per token", "product per token", "product 1x128 by 128x128"):
        assert float(row(out, operation)[2].removesuffix(" us").replace(",", "")) > 0


def test_it_is_a_command_and_a_module():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-m", "fp8core", "--version"], capture_output=True, text=True, check=True, env=environment
    )
    assert run.stdout == f"fp8core {fp8core.__version__}\n"


def test_progress_that_is_not_shown_is_not_ended(monkeypatch):
    """rich before 14.3 ends one that is disabled with an empty line."""
    from rich.progress import Progress

    from fp8core.cli.terminal import Bar

    monkeypatch.setattr(Progress, "stop", lambda self: pytest.fail("an empty line"))
    with Bar("quantizing") as advance:
        advance("up.weight", 1, 2)
