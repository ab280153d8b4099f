"""Run benchmarks, each in a process of its own, and collect their JSON lines in one file.

    python -m bench [SUBJECT ...] [--peers FOLDER] [--out FILE] [--deep-gemm] [--compile] [--short] [--plan]

Without subjects, all of them; what cannot run here is skipped with the reason. The file is appended to: first a line
about the machine, and after each subject's lines one about how it went.
"""

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata, util
from pathlib import Path
from typing import Any, Final, NamedTuple

import fp8core
from bench import results
from fp8core.runtime import device

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cuda-nvrtc", "numpy", "ml_dtypes")


class Subject(NamedTuple):
    """A benchmark: its module, its arguments, those of its short form, and what it understands and needs."""

    module: str
    what: str
    arguments: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    peers: bool = True
    gpu: bool = True
    compiles: bool = False
    deep_gemm: bool = False


def _arguments(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SUBJECTS: Final[dict[str, Subject]] = {
    "quantize": Subject(
        "bench.quantize",
        "quantization beside a copy of as many bytes",
        short=_arguments("--shapes 1x4096 4096x4096"),
        compiles=True,
    ),
    "odd": Subject(
        "bench.odd", "quantization of odd shapes", short=_arguments("--modes token --types bfloat16"), peers=False
    ),
    "fused": Subject(
        "bench.fused", "RMS norm and SiLU with quantization", short=_arguments("--shapes 1x4096 4096x4096")
    ),
    "weights": Subject("bench.weights", "what is done to weights", short=_arguments("--shapes 6144x4096"), peers=False),
    "decode": Subject(
        "bench.decode",
        "products of few rows",
        arguments=_arguments("--modes tensor row block"),
        short=_arguments("--modes row --shapes 6144x4096 --m 1 16"),
        deep_gemm=True,
    ),
    "crossover": Subject(
        "bench.decode",
        "products by their rows, from one kernel to the next",
        arguments=_arguments(
            "--modes row block --shapes 4096x4096 8192x8192 --m 1 2 3 4 7 8 16 17 32 48 64 65 96 128 192 256"
        ),
        short=_arguments("--modes row --shapes 4096x4096 --m 32 64 128"),
    ),
    "products": Subject(
        "bench.decode",
        "products of many rows",
        arguments=_arguments(
            "--modes tensor row block --shapes 6144x4096 28672x4096 8192x8192 7168x16384 --m 512 4096 --replays 10"
        ),
        short=_arguments("--modes row --shapes 6144x4096 --m 512"),
        deep_gemm=True,
    ),
    "invariance": Subject(
        "bench.invariance",
        "products whose rows do not feel the batch",
        short=_arguments("--modes row --shapes 4096x4096 --m 16"),
        peers=False,
    ),
    "linear": Subject(
        "bench.linear", "whole linear layers of few rows", short=_arguments("--shapes 4096x4096 --m 1 16")
    ),
    "first_call": Subject("bench.first_call", "the first call of a fresh process", peers=False),
    "overhead": Subject("bench.overhead", "host time of a call", gpu=False),
    "host": Subject(
        "bench.host", "the host engine", short=_arguments("--rows 256 --cols 1024"), peers=False, gpu=False
    ),
}


def command(subject: Subject, out: Path, peers: Path | None, asked: argparse.Namespace) -> list[str]:
    """Return the command line of a subject's process."""
    arguments = subject.short if asked.short else subject.arguments
    line = [sys.executable, "-m", subject.module, *arguments, "--json", str(out)]
    if peers and subject.peers:
        line += ["--peers", str(peers)]
    if peers and subject.deep_gemm and asked.deep_gemm:
        line += ["--deep-gemm"]
    if subject.compiles and asked.compile:
        line += ["--compile"]
    return line


def obstacle(subject: Subject) -> str | None:
    """Return why a subject cannot run here, or None when it can."""
    if not subject.gpu:
        return None
    if not device.count():
        return f"needs a GPU: {device.why_none()}"
    return None if util.find_spec("torch") else "needs torch, which is not installed"


def machine(peers: Path | None, note: str) -> dict[str, Any]:
    """Return the record of where and when this is."""
    found: dict[str, Any] = {
        "bench": "machine",
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["python -m bench", *sys.argv[1:]]),
        "cpu": _cpu(),
        "python": platform.python_version(),
        "fp8core": fp8core.__version__,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "peers": sorted(path.name for path in peers.glob("*.so")) if peers else [],
        "note": note,
    }
    if device.count():
        runtime = device.cupy().cuda.runtime
        properties = runtime.getDeviceProperties(device.current())
        found["device"] = properties["name"].decode()
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
    """Return the processor's name, where Linux reports it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def run(names: Sequence[str], out: Path, line_of: dict[str, list[str]]) -> bool:
    """Run the subjects, tell what is skipped or fails, and return whether none failed."""
    well = True
    for name in names:
        why = obstacle(SUBJECTS[name])
        if why:
            print(f"{name}: skipped, {why}", flush=True)
            results.append(out, {"bench": "subject", "subject": name, "skipped": why})
            continue
        print(f"{name}: {' '.join(line_of[name])}", flush=True)
        start = time.monotonic()
        status = subprocess.run(line_of[name], cwd=ROOT, check=False).returncode
        seconds = round(time.monotonic() - start, 1)
        results.append(out, {"bench": "subject", "subject": name, "status": status, "seconds": seconds})
        print(f"{name}: {'done' if not status else f'FAILED with status {status}'} after {seconds} s", flush=True)
        well = well and not status
    return well


def main() -> int:
    """Run what is asked for; the exit status is 1 if a subject failed."""
    about = "\n".join(f"  {name:10} {subject.what}" for name, subject in SUBJECTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description=f"{__doc__}\nsubjects:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help="default: all")
    parser.add_argument("--peers", type=Path, help="a folder with the libraries of vLLM and SGLang")
    parser.add_argument("--deep-gemm", action="store_true", help="DeepGEMM of that folder too; compiles for a while")
    parser.add_argument("--out", type=Path, default=Path("bench.jsonl"), help="append to this file (%(default)s)")
    parser.add_argument("--short", action="store_true", help="a few cases of each, to see that it works")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    parser.add_argument("--note", default="", help="what else a reader should know, as the versions of the baselines")
    parser.add_argument("--plan", action="store_true", help="print the commands and what is skipped; run nothing")
    asked = parser.parse_args()
    names, out = asked.subjects or list(SUBJECTS), asked.out.resolve()
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        parser.error(f"no such subject: {', '.join(unknown)} (there are {', '.join(SUBJECTS)})")
    peers = asked.peers and asked.peers.resolve()
    if peers and not peers.is_dir():
        parser.error(f"--peers: no folder {peers}")
    lines = {name: command(SUBJECTS[name], out, peers, asked) for name in names}
    if asked.plan:
        for name in names:
            why = obstacle(SUBJECTS[name])
            print(f"{name}: skipped, {why}" if why else f"{name}: {' '.join(lines[name])}")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    results.append(out, machine(peers, asked.note))
    well = run(names, out, lines)
    print(f"results: {out}\npictures: python -m bench.plot {out}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
