"""Run benchmarks, each in a process of its own, and collect their JSON lines in one file.

    python -m bench [SUBJECT ...] [--baselines FOLDER] [--out FILE] [--deep-gemm] [--compile] [--short] [--plan]
    python -m bench [host] --against CHECKOUT [--out FILE] [--short] [--plan]

Without subjects, all of them; what cannot run here is skipped with the reason. The file gets a line about the machine,
and after each subject's lines one about how it went. Without --out it is a new file in docs/results, named by date and
device. With --against, public calls of this checkout and of another are timed in turns, on the GPU and on the host.
"""

import argparse
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata, util
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple

import fp8core
from bench import results
from fp8core.runtime import device

ROOT: Final = Path(__file__).resolve().parent.parent
RUNS: Final = ROOT / "docs" / "results"
PACKAGES: Final = ("torch", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cuda-nvrtc", "numpy", "ml_dtypes")


class Subject(NamedTuple):
    """A benchmark: its module, its arguments, those of its short form, and what it understands and needs."""

    module: str
    what: str
    arguments: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    baselines: bool = True
    gpu: bool = True
    compiles: bool = False
    deep_gemm: bool = False
    framework: str = "torch"
    """Whose arrays it times on a GPU."""


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
        "bench.odd", "quantization of odd shapes", short=_arguments("--modes token --types bfloat16"), baselines=False
    ),
    "fused": Subject(
        "bench.fused", "RMS norm and SiLU with quantization", short=_arguments("--shapes 1x4096 4096x4096")
    ),
    "weights": Subject(
        "bench.weights", "what is done to weights", short=_arguments("--shapes 6144x4096"), baselines=False
    ),
    "decode": Subject(
        "bench.decode",
        "products of few rows",
        arguments=_arguments("--modes tensor row block"),
        short=_arguments("--modes row --shapes 6144x4096 --m 1 16"),
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
    "models": Subject(
        "bench.decode",
        "products of many rows in DeepSeek-V3, Qwen3-32B and Llama",
        arguments=_arguments(
            "--modes row block --m 128 384 1024 4096 --replays 6 --shapes 2112x7168 24576x1536 4096x7168 7168x2048"
            " 36864x7168 10240x5120 5120x8192 5120x25600 4096x14336"
        ),
        short=_arguments("--modes row --shapes 2112x7168 --m 384"),
        deep_gemm=True,
    ),
    "ending": Subject(
        "bench.ending",
        "what an activation and beta cost a product",
        arguments=_arguments("--shapes 14336x4096"),
        short=_arguments("--shapes 14336x4096 --m 16 512 --modes row"),
        baselines=False,
    ),
    "invariance": Subject(
        "bench.invariance",
        "products without and with batch_invariant",
        short=_arguments("--modes row --shapes 4096x4096 --m 16"),
        baselines=False,
    ),
    "linear": Subject(
        "bench.linear", "whole linear layers of few rows", short=_arguments("--shapes 4096x4096 --m 1 16")
    ),
    "layer": Subject(
        "bench.layer",
        "the linear path of decoder layers, on the GPU",
        short=_arguments("--models Llama-8B --m 1"),
    ),
    "jax_layer": Subject(
        "bench.jax_layer",
        "decoder layers of Llama 8B under jax.jit",
        short=_arguments("--m 1"),
        baselines=False,
        framework="jax",
    ),
    "hf_decoder": Subject(
        "bench.hf_decoder",
        "four layers of Qwen3-8B in transformers, one token, in a graph and eager",
        short=_arguments("--layers 1 --batch 1"),
        baselines=False,
    ),
    "choice": Subject(
        "bench.choice",
        "every candidate of many products, beside the choice without tuning",
        short=_arguments("--modes row --seconds 5"),
        baselines=False,
    ),
    "accuracy": Subject(
        "bench.accuracy", "the error of every kernel of products by k", short=_arguments("--k 512"), baselines=False
    ),
    "first_call": Subject("bench.first_call", "the first call of a fresh process", baselines=False),
    "host": Subject("bench.host", "host time of each public function", gpu=False),
    "engine": Subject(
        "bench.engine", "the host engine", short=_arguments("--rows 256 --cols 1024"), baselines=False, gpu=False
    ),
}
AGAINST: Final = Subject(
    "bench.against", "public calls of two checkouts", short=_arguments("--short"), baselines=False, gpu=False
)


def command(subject: Subject, out: Path, asked: argparse.Namespace) -> list[str]:
    """Return the command line of a subject's process."""
    arguments = subject.short if asked.short else subject.arguments
    line = [sys.executable, "-m", subject.module, *arguments, "--json", str(out)]
    if asked.baselines and subject.baselines:
        line += ["--baselines", str(asked.baselines.resolve())]
        line += ["--deep-gemm"] if subject.deep_gemm and asked.deep_gemm else []
    if subject.compiles and asked.compile:
        line += ["--compile"]
    if subject is AGAINST:
        line += [str(asked.against.resolve()), *(["--kinds", "host"] if asked.subjects else [])]
    return line


def obstacle(subject: Subject) -> str | None:
    """Return why a subject cannot run here, or None when it can."""
    if not subject.gpu:
        return None
    if not device.count():
        return f"needs a GPU: {device.why_none()}"
    return None if util.find_spec(subject.framework) else f"needs {subject.framework}, which is not installed"


def said(asked: argparse.Namespace) -> str:
    """Return the command as anyone can repeat it: quoted, and without the paths of this machine."""
    words = ["python", "-m", "bench", *asked.subjects]
    words += ["--against", asked.against.resolve().name] if asked.against else []
    words += ["--baselines", "BASELINES"] if asked.baselines else []
    words += [f"--{name.replace('_', '-')}" for name in ("deep_gemm", "compile", "short") if getattr(asked, name)]
    words += ["--note", asked.note] if asked.note else []
    return shlex.join(words)


def new_file(folder: Path) -> Path:
    """Return a file in ``folder`` that is not there yet, named by the date and the device."""
    name = f"{datetime.now(UTC):%Y-%m-%d}-{re.sub('[^a-z0-9]+', '-', _device().lower()).strip('-')}"
    paths = (folder / f"{name}{'' if i == 1 else f'-{i}'}.jsonl" for i in count(1))
    return next(path for path in paths if not path.exists())


def _device() -> str:
    if not device.count():
        return _cpu()
    name: str = device.cupy().cuda.runtime.getDeviceProperties(device.current())["name"].decode()
    return name


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    """Return the record of where and when this is, and of what was asked for."""
    now = datetime.now(UTC)
    found: dict[str, Any] = {
        "bench": "machine",
        "format": results.FORMAT,
        "date": f"{now:%Y-%m-%d}",
        "started": f"{now:%Y-%m-%dT%H:%M:%SZ}",
        "command": said(asked),
        "short": asked.short,
        "cpu": _cpu(),
        "python": platform.python_version(),
        "fp8core": fp8core.__version__,
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
    """Return the processor's name, where Linux reports it."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())


def run(subjects: Mapping[str, Subject], out: Path, line_of: Mapping[str, list[str]]) -> bool:
    """Run the subjects, tell what is skipped or fails, and return whether none failed."""
    well = True
    for name, subject in subjects.items():
        why = obstacle(subject)
        if why:
            print(f"{name}: skipped, {why}", flush=True)
            results.append(out, {"bench": "subject", "subject": name, "skipped": why})
            continue
        print(f"{name}: {shlex.join(line_of[name])}", flush=True)
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
    parser.add_argument("--baselines", type=Path, help="a folder with kernels to compare with (bench.fetch makes one)")
    parser.add_argument(
        "--deep-gemm",
        action="store_true",
        help="DeepGEMM of that folder too, for products of many rows; compiles for a while",
    )
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="compare with another checkout of fp8core")
    parser.add_argument("--out", type=Path, help="append to this file (default: a new one in docs/results)")
    parser.add_argument("--short", action="store_true", help="a few cases of each, to see that it works")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    parser.add_argument("--note", default="", help="what else a reader should know, as the versions of the baselines")
    parser.add_argument("--plan", action="store_true", help="print the commands and what is skipped; run nothing")
    asked = parser.parse_args()
    out = asked.out.resolve() if asked.out else new_file(RUNS)
    subjects = chosen(asked, parser)
    lines = {name: command(subject, out, asked) for name, subject in subjects.items()}
    if asked.plan:
        for name, subject in subjects.items():
            why = obstacle(subject)
            print(f"{name}: skipped, {why}" if why else f"{name}: {shlex.join(lines[name])}")
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    results.append(out, machine(asked))
    well = run(subjects, out, lines)
    print(f"results: {out}\npictures: {shlex.join(['python', '-m', 'bench.plot', str(out)])}")
    return 0 if well else 1


def chosen(asked: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Subject]:
    """Return what is to run, by name; what cannot be meant is an error of the command line."""
    names = asked.subjects or list(SUBJECTS)
    unknown = [name for name in names if name not in SUBJECTS]
    if unknown:
        parser.error(f"no such subject: {', '.join(unknown)} (there are {', '.join(SUBJECTS)})")
    for option in ("baselines", "against"):
        folder = getattr(asked, option)
        if folder and not folder.is_dir():
            parser.error(f"--{option} needs a folder, got {folder}")
    if not asked.against:
        return {name: SUBJECTS[name] for name in names}
    if not (asked.against / "fp8core").is_dir():
        parser.error(f"--against needs a checkout of fp8core, got {asked.against}")
    if asked.subjects not in ([], ["host"]):
        parser.error(f"--against compares GPU and host times, or those of host alone, got {' '.join(asked.subjects)}")
    return {"against": AGAINST}


if __name__ == "__main__":
    sys.exit(main())
