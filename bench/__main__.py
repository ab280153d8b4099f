"""Run benchmarks, each in a process of its own, and collect their JSON lines in one file.

    python -m bench [SUBJECT ...] [--baselines FOLDER] [--out FILE] [--deep-gemm] [--compile] [--short] [--plan]
    python -m bench [SUBJECT ...] --seconds 500 --each 200 --out FILE, and the same with --go-on until all is there
    python -m bench [host] --against CHECKOUT [--out FILE] [--short] [--plan]

Without subjects, all of them run; those that cannot run here are skipped with the reason. The file gets a line about
the machine, and after each subject's lines one with its status. Without --out it is a new file in docs/results, named
by date and device. If no subject can run, no file is written and the exit status is 2; nor without a GPU and --out, as
docs/results has the results of GPUs. A subject that a limit of seconds stops keeps its lines. With --go-on, a run
leaves out the subjects that succeeded according to the file, and the finished cases of stopped ones, if the benchmark
supports that. With --against, public calls of this checkout and of another are timed alternately, on the GPU and on the
host.
"""

import argparse
import math
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any, Final, NoReturn

import fp8core
from bench import results
from bench.needs import missing
from bench.subjects import AGAINST, SUBJECTS, Subject
from fp8core.runtime import device
from fp8core.tuning.values import digest

ROOT: Final = Path(__file__).resolve().parent.parent
RUNS: Final = ROOT / "docs" / "results"
PACKAGES: Final = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cuda-nvrtc", "numpy", "ml_dtypes")


def command(name: str, subject: Subject, out: Path, asked: argparse.Namespace) -> list[str]:
    """Return the command line of a subject's process."""
    arguments = subject.short if asked.short else subject.arguments
    line = [sys.executable, "-m", subject.module, *arguments, "--json", str(out)]
    if asked.baselines and subject.baselines:
        line += ["--baselines", str(asked.baselines.resolve())]
        line += ["--deep-gemm"] if subject.deep_gemm and asked.deep_gemm else []
    if subject.compiles and asked.compile:
        line += ["--compile"]
    if subject.goes_on and asked.go_on:
        line += ["--go-on", name]
    if subject is AGAINST:
        line += [str(asked.against.resolve()), *(["--kinds", "host"] if asked.subjects else [])]
    return line


def obstacle(subject: Subject) -> str | None:
    """Return why a subject cannot run here, or None if it can."""
    return missing(subject.framework) if subject.gpu else None


def said(asked: argparse.Namespace) -> str:
    """Return the command in a form that anyone can repeat: quoted, and without the paths of this machine."""
    words = ["python", "-m", "bench", *asked.subjects]
    words += ["--against", asked.against.resolve().name] if asked.against else []
    words += ["--baselines", "BASELINES"] if asked.baselines else []
    flags = ("deep_gemm", "compile", "short", "go_on")
    words += [f"--{name.replace('_', '-')}" for name in flags if getattr(asked, name)]
    words += ["--note", asked.note] if asked.note else []
    return shlex.join(words)


def new_file(folder: Path) -> Path:
    """Return the path of a new file in ``folder``, named by the date and the device."""
    name = f"{datetime.now(UTC):%Y-%m-%d}-{re.sub('[^a-z0-9]+', '-', _device().lower()).strip('-')}"
    paths = (folder / f"{name}{'' if i == 1 else f'-{i}'}.jsonl" for i in count(1))
    return next(path for path in paths if not path.exists())


def _device() -> str:
    if not device.count():
        return _cpu()
    return device.name(device.current())


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the record of the machine, the time and the command."""
    now = datetime.now(UTC)
    found: dict[str, Any] = {
        "bench": "machine",
        "format": results.FORMAT,
        "date": f"{now:%Y-%m-%d}",
        "started": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "command": said(asked),
        "short": asked.short,
        "goes_on": asked.go_on,
        "cpu": _cpu(),
        "python": platform.python_version(),
        "fp8core": fp8core.__version__,
        "digest": digest(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "baselines": sorted(path.name for path in asked.baselines.glob("*.so")) if asked.baselines else [],
        "note": asked.note,
    }
    if device.count():
        runtime = device.cupy().cuda.runtime
        properties = runtime.getDeviceProperties(device.current())
        found["device"] = _device()
        found["multiprocessors"] = properties["multiProcessorCount"]
        found["memory_bytes"] = properties["totalGlobalMem"]
        found["driver"], found["runtime"] = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str:
    """Return the processor's name, from Linux if it reports one."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def run(
    subjects: Mapping[str, Subject], out: Path, line_of: Mapping[str, list[str]], seconds: float, each: float
) -> bool:
    """Run the subjects and print their status; return whether none was stopped or failed.

    Args:
        subjects: the subjects by name.
        out: the file for their records.
        line_of: the command line of each subject.
        seconds: the time limit of all subjects together.
        each: the time limit of each subject, in seconds.
    """
    well, end = True, time.monotonic() + seconds
    for name, subject in subjects.items():
        why = obstacle(subject)
        if why:
            print(f"{name}: skipped, {why}", flush=True)
            results.append(out, {"bench": "subject", "subject": name, "skipped": why})
            continue
        start = time.monotonic()
        if start >= end:
            print(f"{name}: not started, the {seconds:g} s are over", flush=True)
            well = False
            continue
        print(f"{name}: {shlex.join(line_of[name])}", flush=True)
        record: dict[str, Any] = {"bench": "subject", "subject": name, "status": None}
        try:
            record["status"] = waited(line_of[name], min(each, end - start))
        finally:  # even if this process is terminated
            record["seconds"] = round(time.monotonic() - start, 1)
            results.append(out, record)
        status = record["status"]
        how = "STOPPED" if status is None else f"FAILED with status {status}" if status else "done"
        print(f"{name}: {how} after {record['seconds']} s", flush=True)
        well = well and status == 0
    return well


def waited(line: list[str], seconds: float) -> int | None:
    """Return the exit status of a command, or None if it was stopped, with its children, after ``seconds``."""
    process = subprocess.Popen(line, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(None if seconds == math.inf else seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    """Run the requested subjects; the exit status is 1 if one of them failed or was stopped."""
    about = "\n".join(f"  {name:10} {subject.what}" for name, subject in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{__doc__}\nsubjects:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="default: all")
    parser.add_argument("--baselines", type=Path, help="a folder with kernels to compare with (bench.fetch makes one)")
    parser.add_argument(
        "--deep-gemm",
        action="store_true",
        help="time DeepGEMM of that folder, too, for products of many rows; it compiles for a while",
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout of fp8core")
    parser.add_argument("--out", type=Path, help="append to this file (default with a GPU: a new one in docs/results)")
    parser.add_argument("--short", action="store_true", help="run a few cases of each subject, as a check")
    parser.add_argument("--compile", action="store_true", help="time torch.compile, too, which takes minutes")
    parser.add_argument(
        "--note", default="", help="what else a reader should know, such as the versions of the baselines"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    parser.add_argument(
        "--each", type=float, default=math.inf, metavar="SECONDS", help="stop each subject after this time"
    )
    parser.add_argument("--go-on", action="store_true", help="skip what is in the file of --out")
    parser.add_argument("--plan", action="store_true", help="print the commands and what is skipped; run nothing")
    asked = parser.parse_args()
    out = asked.out.resolve() if asked.out else new_file(RUNS)
    subjects = chosen(asked, parser)
    lines = {name: command(name, subject, out, asked) for name, subject in subjects.items()}
    if asked.plan:
        for name, subject in subjects.items():
            why = obstacle(subject)
            print(f"{name}: skipped, {why}" if why else f"{name}: {shlex.join(lines[name])}")
        return 0
    if not asked.out and subjects and all(map(obstacle, subjects.values())):
        parser.exit(2, "".join(f"{name}: skipped, {obstacle(subject)}\n" for name, subject in subjects.items()))
    if not asked.out and not device.count():
        parser.error(f"--out is needed without a GPU ({device.why_none()}): docs/results has the results of GPUs")
    out.parent.mkdir(parents=True, exist_ok=True)
    results.append(out, machine(asked))
    signal.signal(signal.SIGTERM, _ended)
    well = run(subjects, out, lines, asked.seconds, asked.each)
    print(f"results: {out}\npictures: {shlex.join(['python', '-m', 'bench.plot', str(out)])}")
    return 0 if well else 1


def chosen(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Subject]:
    """Return the subjects to run, by name; invalid arguments are errors of the command line."""
    names = asked.subjects or list(SUBJECTS)
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        parser.error(f"no such subject: {', '.join(unknown)} (there are {', '.join(SUBJECTS)})")
    for option in ("baselines", "against"):
        folder = getattr(asked, option)
        if folder and not folder.is_dir():
            parser.error(f"--{option} needs a folder, got {folder}")
    if asked.go_on:
        if not asked.out or not asked.out.is_file():
            parser.error(f"--go-on needs --out with the file of an earlier run, got {asked.out}")
        runs = results.runs(asked.out)
        there = runs[-1].machine.get("device") if runs else None
        if device.count() and there not in (None, _device()):
            parser.error(f"--go-on needs the GPU of {asked.out}, {there}, got {_device()}")
        done = results.finished(runs)
        names = [name for name in names if name not in done]
    if not asked.against:
        return {name: SUBJECTS[name] for name in names}
    if not (asked.against / "fp8core").is_dir():
        parser.error(f"--against needs a checkout of fp8core, got {asked.against}")
    if asked.subjects not in ([], ["host"]):
        parser.error(f"--against compares GPU and host times, or those of host alone, got {' '.join(asked.subjects)}")
    return {"against": AGAINST}


if __name__ == "__main__":
    sys.exit(main())
