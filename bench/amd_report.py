"""Writes everything that a first run on an AMD GPU can reveal into one file.

    python -m bench.amd_report [--out amd-report.txt] [--only STEP ...] [--list]

Each step runs in its own process with a time limit. A step that fails, hangs or is absent is recorded, and the next one
runs. The file is written after each step, so that it is useful whatever happens; send all of it back.
"""

import argparse
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple, TextIO

ROOT: Final = Path(__file__).resolve().parent.parent
KEPT: Final = 60_000
"""The number of characters kept from the end of a step's output; steps print the important results last."""


class Step(NamedTuple):
    """One process of the report, and the question that it answers."""

    name: str
    decides: str
    command: tuple[str, ...]
    minutes: float = 2.0
    environment: tuple[tuple[str, str], ...] = ()


class Outcome(NamedTuple):
    """The result of a step: a short verdict, and its seconds."""

    name: str
    verdict: str
    seconds: float


def _ours(name: str, decides: str, minutes: float = 2.0, **environment: str) -> Step:
    """Return a step of bench/amd_steps.py."""
    return Step(name, decides, (sys.executable, "-m", "bench.amd_steps", name), minutes, tuple(environment.items()))


def _tests(name: str, decides: str, *arguments: str, minutes: float = 10.0) -> Step:
    command = (sys.executable, "-m", "pytest", "-q", "-rfEs", *arguments)
    return Step(name, decides, command, minutes)


STEPS: Final = (
    _ours("import", "whether CuPy finds all of ROCm that its wheel needs; a missing .so is the finding"),
    _ours("libraries", "which shared libraries CuPy's modules do not find"),
    Step("rocminfo", "the GPU and its features", ("rocminfo",)),
    Step("hipconfig", "the release of HIP, on which captures and limits depend", ("hipconfig", "--full")),
    Step("packages", "the versions of all Python packages", (sys.executable, "-m", "pip", "freeze")),
    Step("info", "what fp8core sees, and which kernels it would choose", (sys.executable, "-m", "fp8core", "info")),
    _ours("runtimes", "how many HIP runtimes a process maps, fp8core first, torch first, and with torch not imported"),
    _tests(
        "compile",
        "whether hipRTC's own front end takes every kernel; needs no GPU",
        *("tests/kernels/test_hiprtc.py",),
        minutes=30,
    ),
    _tests(
        "interop",
        "devices, compiler, launches, streams, arrays of frameworks",
        *("-m", "gpu", "tests/interop/test_frameworks_gpu.py", "tests/interop/test_streams_of_frameworks_gpu.py"),
        *("tests/runtime/test_kernels_gpu.py", "-x"),
    ),
    _tests(
        "conversions",
        "FP8 conversions: all 65,536 inputs, bit for bit, with -0.0 and numbers that underflow",
        *("-m", "gpu", "tests/ops/test_quantize_values.py", "tests/ops/test_quantize.py", "-x"),
    ),
    _tests(
        "products",
        "matrix instructions and their layouts, hipBLASLt",
        *("-m", "gpu", "tests/kernels/test_amd.py", "tests/ops/test_product.py", "tests/ops/test_product_shapes.py"),
    ),
    _tests(
        "graphs",
        "whether captured launches are in the graph (needs PyTorch for ROCm); tests of CuPy's own captures fail",
        *("-m", "gpu", "tests", "-k", "graph or captur"),
        minutes=20,
    ),
    _ours("replay", "the same without PyTorch: what a replayed graph of the driver's computes from changed operands"),
    _ours("streams", "whether hipBLASLt's kernels of two streams disturb each other; it hangs where they wait"),
    _ours("late", "whether a product may be captured whose kernel has not run on that stream", 2),
    _ours("sticky", "whether a failed launch leaves an error behind for torch or CuPy", AMD_LOG_LEVEL="3"),
    _ours("stream1", "whether 1 is taken for the default stream"),
    _ours("results", "which kernel gives FP8 results, and how it saturates", HIPBLASLT_LOG_MASK="32"),
    _ours("offers", "how many algorithms hipBLASLt offers by workspace, bias and scales"),
    _ours("cold", "times of products with weights over 192 MiB and over 768 MiB", 10),
    _ours("resident", "quantization per tensor by a cooperative grid and without one", 5),
    _tests(
        "suite",
        "the whole GPU suite (tests/gemm/test_sm90_decode_gpu.py is about a Hopper kernel)",
        *("-m", "gpu", "tests", "--ignore=tests/gemm/test_sm90_decode_gpu.py"),
        minutes=60,
    ),
    *(
        Step(
            f"bench {tokens}",
            "times of the main operations",
            (sys.executable, "-m", "fp8core", "bench", "--tokens", str(tokens), "--width", "8192"),
            5,
        )
        for tokens in (1, 16, 256, 4096)
    ),
)


def run(step: Step, out: TextIO) -> Outcome:
    """Run a step to its end or its time limit, write its output, and return its outcome."""
    title = f"==== {step.name}: {step.decides}"
    variables = " ".join(f"{name}={value}" for name, value in step.environment)
    print(f"{title}\n$ {' '.join(filter(None, (variables, *step.command)))}", file=out, flush=True)
    start = time.monotonic()
    if shutil.which(step.command[0]) is None:
        said, verdict = "", f"absent: there is no {step.command[0]}"
    else:
        said, verdict = _output(step)
    outcome = Outcome(step.name, verdict, time.monotonic() - start)
    cut = f"[{len(said) - KEPT} characters before]\n" if len(said) > KEPT else ""
    print(f"{cut}{said[-KEPT:].rstrip()}\n---- {step.name}: {verdict}, {outcome.seconds:.1f} s\n", file=out, flush=True)
    return outcome


def _output(step: Step) -> tuple[str, str]:
    environment = os.environ | dict(step.environment)
    process = subprocess.Popen(
        step.command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=60 * step.minutes)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the step has its own session: this also kills its children
        said, _ = process.communicate()
        return said, f"ENDED after its limit of {step.minutes:g} min"
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    code = process.returncode
    return said, "ok" if code == 0 else f"FAILED with exit status {code}" if code > 0 else f"KILLED by signal {-code}"


def write(path: Path, steps: Sequence[Step]) -> list[Outcome]:
    """Write the report of some steps to a file, and return their outcomes."""
    outcomes: list[Outcome] = []
    with path.open("w", encoding="utf-8") as out:
        commit = subprocess.run(
            ("git", "-C", ROOT, "describe", "--always", "--dirty"), capture_output=True, text=True, check=False
        ).stdout.strip()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        print(f"fp8core {commit or 'outside of git'}, {now}, {platform.platform()}, Python {sys.version}\n", file=out)
        try:
            for number, step in enumerate(steps, 1):
                print(f"[{number}/{len(steps)}] {step.name} …", file=sys.stderr, flush=True)
                outcomes.append(run(step, out))
                print(f"    {outcomes[-1].verdict}", file=sys.stderr, flush=True)
        finally:
            print("==== summary", file=out)
            for outcome in outcomes:
                print(f"{outcome.name:<12} {outcome.seconds:8.1f} s  {outcome.verdict}", file=out)
            for step in steps[len(outcomes) :]:
                print(f"{step.name:<12}             not run", file=out)
    return outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit status is 0 if the report was written, whatever its content."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("amd-report.txt"), help="the file that is written")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="STEP", help="some of the steps")
    parser.add_argument("--list", action="store_true", help="print the steps and what each one decides")
    given = parser.parse_args(arguments)
    if given.list:
        for step in STEPS:
            print(f"{step.name:<12} {step.decides}")
        return 0
    write(given.out, [step for step in STEPS if given.only is None or step.name in given.only])
    print(f"written to {given.out}: send it back whole", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
