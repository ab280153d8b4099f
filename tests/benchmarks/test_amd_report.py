"""The report of a first run on an AMD GPU: written whole on a machine without one, whatever its steps do."""

import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from bench import amd_report, amd_steps
from bench.amd_report import STEPS, Step, main, write
from fp8core.errors import BackendError
from fp8core.runtime import device
from support.blaslt_fixtures import built, hip_stub  # noqa: F401
from support.targets import MI300

ROOT = Path(__file__).resolve().parents[2]
REAL = amd_steps._quantized
LIMIT = 0.125  # seconds of a step that hangs
FOREVER = """import subprocess
started = subprocess.Popen(["tail", "-f", "/dev/null"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
open({!r}, "w").write(str(started.pid))
started.wait()"""


def python(name, code, minutes=1.0, **environment):
    return Step(name, f"decides {name}", (sys.executable, "-u", "-c", code), minutes, tuple(environment.items()))


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """The code of a step that hangs, whose limit begins when it does; with it, what it has started, as file descriptors
    that can be read once that has ended."""
    says, started = tmp_path / "says", []
    os.mkfifo(says)

    class Limited(subprocess.Popen):
        def communicate(self, input=None, timeout=None):
            if timeout == LIMIT:
                started.append(os.pidfd_open(int(says.read_text())))
            return super().communicate(input, timeout)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    yield FOREVER.format(str(says)), started
    for descriptor in started:
        os.close(descriptor)


def test_every_step_is_recorded_whatever_the_others_do(tmp_path, hanging):
    out = tmp_path / "report.txt"
    steps = [
        python("fails", "print('before'); raise SystemExit(3)"),
        python("dies", "import os; os.abort()"),
        Step("absent", "decides nothing", ("no-such-tool-of-rocm",)),
        python("hangs", f"print('so far')\n{hanging[0]}", minutes=LIMIT / 60),
        python("speaks", "import os; print(os.environ['SAID'])", SAID="in its environment"),
    ]
    outcomes = write(out, steps)
    assert [outcome.verdict.split()[0] for outcome in outcomes] == ["FAILED", "KILLED", "absent:", "ENDED", "ok"]
    text = out.read_text()
    for said in ("before", "so far", "in its environment", "exit status 3", "signal 6", "no-such-tool-of-rocm"):
        assert said in text
    assert "$ SAID=in its environment" in text
    summary = text.split("==== summary\n")[1].splitlines()
    assert [line.split()[0] for line in summary] == [step.name for step in steps]
    assert f"after its limit of {LIMIT / 60:g} min" in summary[3]


def test_what_a_step_started_ends_with_it(tmp_path, hanging):
    code, started = hanging
    write(tmp_path / "report.txt", [python("hangs", code, minutes=LIMIT / 60)])
    ended, _, _ = select.select(started, [], [], 30)
    assert ended == started
    assert len(started) == 1


def test_a_report_that_is_interrupted_says_what_was_not_run(tmp_path, monkeypatch):
    def interrupted(step, out):
        raise KeyboardInterrupt

    monkeypatch.setattr(amd_report, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "report.txt", STEPS[:2])
    assert (tmp_path / "report.txt").read_text().count("not run") == 2


def test_much_output_is_cut_at_its_beginning(tmp_path, monkeypatch):
    monkeypatch.setattr(amd_report, "KEPT", 100)
    write(tmp_path / "report.txt", [python("long", "print('x' * 1000 + 'the end')")])
    text = (tmp_path / "report.txt").read_text()
    assert "the end" in text
    assert "[908 characters before]" in text
    assert len(text) < 1000


@pytest.mark.skipif(device.count() > 0, reason="there is a GPU")
def test_without_a_gpu_the_command_writes_its_report(tmp_path):
    out = tmp_path / "report.txt"
    steps = ("import", "libraries", "rocminfo", "replay")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = (sys.executable, "-m", "bench.amd_report", "--out", str(out), "--only", *steps)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    text = out.read_text()
    assert [text.count(f"==== {name}: ") for name in steps] == [1] * len(steps)
    assert "libraries are not found" in text
    assert "need CuPy" in text
    assert f"written to {out}" in done.stderr


def test_steps_are_listed_with_what_they_decide(capsys):
    assert main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(STEPS) == len({step.name for step in STEPS})
    assert all(step.decides in line for step, line in zip(STEPS, lines, strict=True))


def test_every_step_of_ours_exists_and_every_test_is_there():
    for step in STEPS:
        if "bench.amd_steps" in step.command:
            assert step.command[-1] in amd_steps.STEPS
        for path in step.command:
            if path.startswith("tests/"):
                assert (ROOT / path).exists(), path
    named = {step.command[-1] for step in STEPS if "bench.amd_steps" in step.command}
    assert named == amd_steps.STEPS.keys()


def test_offers_are_those_of_the_library(hip_stub, capsys):
    amd_steps.offers()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * 2 * 4
    assert all(line.endswith("2 algorithms, workspaces [1000, 2000]") for line in lines)
    asked = {line.split()[-1] for line in hip_stub.lines("MatmulPreferenceSetAttribute")}
    assert asked == {str(mebibytes << 20) for mebibytes in (0, 32, 76, 128)}


def test_cold_times_are_of_both_sizes(hip_stub, capsys, monkeypatch):
    sizes = []

    def times(p, launches):
        sizes.append(amd_steps.timing.INFINITY_CACHE_COLD_BYTES >> 20)
        return [float(10 + i) for i in range(len(launches))]

    monkeypatch.setattr(amd_steps.timing, "INFINITY_CACHE_COLD_BYTES", 0)
    monkeypatch.setattr(amd_steps.timing, "times", times)
    monkeypatch.setattr(amd_steps.SCALED_MM, "planned", lambda p, choice: choice)
    amd_steps.cold()
    assert sizes == [192] * 5 + [768] * 5
    assert "768 MiB m=1: 10.00 us gfx9_decode algorithm 0" in capsys.readouterr().out


class Stale:
    """A graph that is launched without computing anything anew, as one that lacks its launches."""

    def __init__(self, stream, calls):
        calls()

    def launch(self, stream):
        pass


class PretendedCupy(SimpleNamespace):
    """NumPy under CuPy's names, with streams and events that do nothing: steps run on it from end to end."""

    def __init__(self):
        def stream(non_blocking=True):
            return Stream(ptr=0x7000, synchronize=lambda: None)

        event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
        runtime = SimpleNamespace(deviceSynchronize=lambda: None)
        cuda = SimpleNamespace(
            Stream=stream, Event=lambda: event, get_elapsed_time=lambda begin, end: 1.0, runtime=runtime
        )
        super().__init__(
            **{name: getattr(np, name) for name in ("asarray", "zeros", "ones", "empty_like", "float16")}, cuda=cuda
        )


class Stream(SimpleNamespace):
    def __enter__(self):
        return self

    def __exit__(self, *raised):
        return None


@pytest.fixture
def pretended(monkeypatch):
    """A device whose arrays are NumPy's, for which the host engine computes."""
    cupy, driver = PretendedCupy(), SimpleNamespace(hipPeekAtLastError=lambda: 0)
    fake = SimpleNamespace(cupy=lambda: cupy, target=lambda ordinal: MI300, driver=lambda: driver)
    monkeypatch.setattr(amd_steps, "device", fake)
    monkeypatch.setattr(amd_steps.hip_graphs, "HipGraph", Stale)
    return cupy


def test_a_graph_without_its_launches_is_seen(pretended, capsys):
    amd_steps.replay()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"{rows} rows per {what}" for rows in (4, 256) for what in ("token", "tensor")
    ]
    assert all("codes WRONG" in line for line in lines)
    assert all("product WRONG" in line for line in lines if "token" in line)


def test_streams_that_disturb_nothing_give_no_wrong_results(pretended, capsys, monkeypatch):
    monkeypatch.setattr(amd_steps, "_quantized", lambda rows, cols, seed: REAL(rows // 8, cols // 8, seed))
    amd_steps.streams(calls=100)
    assert capsys.readouterr().out.splitlines()[-1] == "100 products a stream, 0 results wrong"


def test_what_is_captured_late_is_compared(pretended, capsys):
    amd_steps.late()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("captured, its result is the same") for line in lines)


def test_results_in_fp8_say_where_they_saturate(pretended, capsys):
    amd_steps.results()
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    largest = {name: float(said.split()[-1]) for name, said in found.items()}
    assert largest["float8_e4m3fnuz"] == 224.0
    assert largest["float8_e4m3fn"] == 448.0


def test_a_failed_launch_is_reported_with_what_it_leaves(pretended, capsys, monkeypatch):
    def fails(*arguments):
        raise BackendError("launching nothing: hipErrorInvalidResourceHandle (400)")

    monkeypatch.setattr(amd_steps.launches, "Launcher", lambda *arguments: SimpleNamespace(bind=lambda grid: fails))
    monkeypatch.setattr(amd_steps.util, "find_spec", lambda name: None)
    amd_steps.sticky()
    assert capsys.readouterr().out.splitlines() == [
        "the launch failed as it should: launching nothing: hipErrorInvalidResourceHandle (400)",
        "left behind: 0",
        "CuPy: 2.0",
    ]
