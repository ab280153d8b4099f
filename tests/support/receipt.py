"""The receipt of a GPU suite: the tests that ran, the digest of the tree, the outcomes, the machine and the time.

A whole run of ``pytest -m gpu`` on a machine with a GPU writes docs/results/gpu-suite.json, one of ``-m models``
docs/results/models-suite.json, one of ``-m multigpu`` docs/results/multi-gpu-suite.json, or files of these names in
``$FP8CORE_RECEIPT_DIR``. A partial run writes none, unless ``$FP8CORE_RECEIPT`` names a file; that receipt is marked as
partial.

    python tests/support/receipt.py --check     is this tree the one that ran?
"""

import argparse
import ctypes
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("fp8core", "cuda_src", "hip_src", "tests")
RESULTS = Path("docs/results")
SUITES = {"gpu": "gpu-suite.json", "models": "models-suite.json", "multigpu": "multi-gpu-suite.json"}
"""By the -m expression of a suite: the name of its receipt."""
SLOWEST = 20
VERSIONS = {
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy-rocm-7-0", "cupy"),
    "torch": ("torch",),
    "jax": ("jax",),
    "numpy": ("numpy",),
    "nvrtc": ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"),
    "cublaslt": ("nvidia-cublas", "nvidia-cublas-cu12"),
}
SHAPE = {
    "passed": int,
    "failed": int,
    "errors": int,
    "skipped": list,
    "slowest": list,
    "seconds": (int, float),
    "gpu": str,
    "driver": str,
    "versions": dict,
    "date": str,
    "order": str,
    "argv": list,
    "sources": str,
}
"""The fields of a receipt, and their types."""


# the tree


def listed(root: Path) -> list[str] | None:
    """Return the files of the tree, from git, or None if the tree is not a git checkout.

    Untracked files are included, as a machine that received a copy of the tree may have an older git index.
    """
    command = ("git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *FOLDERS)
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return None
    names = [name for name in done.stdout.decode().split("\0") if name and (root / name).is_file()]
    return sorted(set(names)) if done.returncode == 0 and names else None


def walked(root: Path) -> list[str]:
    """Return the files of the tree without git: all except those that Python and its tools create (.gitignore)."""
    files = []
    for top in FOLDERS:
        for folder, folders, names in os.walk(root / top):
            folders[:] = [
                name for name in folders if not name.startswith(".") and not name.endswith(("__pycache__", ".egg-info"))
            ]
            kept = (Path(folder, name) for name in names if not name.endswith((".pyc", ".pyo")))
            files += [path.relative_to(root).as_posix() for path in kept if path.is_file()]
    return sorted(files)


def digest(root: Path = ROOT) -> str:
    """Return the sha256 of the lines ``path NUL sha256 NEWLINE`` of the tree's files, sorted by path."""
    names = listed(root)
    whole = hashlib.sha256()
    for name in walked(root) if names is None else names:
        whole.update(name.encode() + b"\0" + hashlib.sha256((root / name).read_bytes()).hexdigest().encode() + b"\n")
    return whole.hexdigest()


# the machine


def gpu_name() -> str:
    """Return the name of the first GPU, from its driver."""
    from fp8core.runtime import device

    return device.name(0) if device.count() else f"unknown: {device.why_none()}"


def driver() -> str:
    """Return the driver's version from NVML, or else the version of CUDA or HIP that the driver supports."""
    from fp8core.runtime import device

    text = ctypes.create_string_buffer(80)
    with suppress(OSError):  # NVML exists with NVIDIA's driver only
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0 and nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0:
            return text.value.decode()
    return str(device.driver_version()) if device.count() else f"unknown: {device.why_none()}"


def versions() -> dict[str, str | None]:
    """Return the versions of Python, fp8core and other packages; None for packages that are not installed."""
    import fp8core

    found: dict[str, str | None] = {"python": platform.python_version(), "fp8core": fp8core.__version__}
    for what, packages in VERSIONS.items():
        found[what] = next((version for version in map(_installed, packages) if version), None)
    return found


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


# the run


class Receipt:
    """A pytest plugin that counts the outcomes of a run, and writes the receipt at its end."""

    def __init__(self, config: pytest.Config, root: Path = ROOT) -> None:
        self.config, self.root = config, root
        self.suite = SUITES.get(config.option.markexpr.strip())
        self.outcomes: Counter[str] = Counter()
        self.skips: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self.finished = 0
        self.began = time.monotonic()
        self.sources = digest(root)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["errors"] += 1
        elif report.skipped:
            self.skips[_reason(report)] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.skipped:
            self.skips[_reason(report)] += 1
        elif report.failed:
            self.outcomes["failed" if report.when == "call" else "errors"] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1
        self.finished += report.when == "teardown"

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.config.option.collectonly:
            return
        whole = self.complete(session)
        path = self.destination(whole)
        if path is None:
            return
        text = json.dumps({**self.written(), **({} if whole else {"partial": True})}, indent=1) + "\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\nreceipt of {'the suite' if whole else 'a part of the suite'}: {path}")

    def asked_whole(self) -> bool:
        """Return whether the command line selects a whole suite."""
        option = self.config.option
        chosen = self.config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        left_out = ("keyword", "deselect", "ignore", "ignore_glob", "lf", "stepwise", "collectonly")
        return self.suite is not None and not chosen and not any(getattr(option, name, None) for name in left_out)

    def complete(self, session: pytest.Session) -> bool:
        """Return whether the whole suite ran, to its end and on an unchanged tree."""
        ran = session.testscollected > 0 and self.finished == session.testscollected
        return self.asked_whole() and ran and digest(self.root) == self.sources

    def destination(self, whole: bool) -> Path | None:
        """Return the path of the receipt, or None if none is to be written."""
        if path := os.environ.get("FP8CORE_RECEIPT"):
            return Path(path)
        if not whole or self.suite is None:
            return None
        return Path(os.environ.get("FP8CORE_RECEIPT_DIR") or self.root / RESULTS) / self.suite

    def written(self) -> dict[str, Any]:
        """Return the content of the receipt."""
        order, _, seed = self.config.option.order.partition(":")
        return {
            **{outcome: self.outcomes[outcome] for outcome in ("passed", "failed", "errors")},
            "skipped": [{"reason": reason, "count": count} for reason, count in sorted(self.skips.items())],
            "slowest": [{"test": t, "seconds": round(s, 2)} for t, s in self.seconds.most_common(SLOWEST)],
            "seconds": round(time.monotonic() - self.began, 1),
            "gpu": gpu_name(),
            "driver": driver(),
            "versions": versions(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "order": order,
            **({"seed": int(seed)} if seed else {}),
            "argv": ["pytest", *map(str, self.config.invocation_params.args)],
            "sources": self.sources,
        }


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


# the check


def malformed(receipt: Any) -> str | None:
    """Return how a receipt is malformed, or None."""
    if not isinstance(receipt, dict):
        return "it is no JSON object"
    for name, kind in SHAPE.items():
        if not isinstance(receipt.get(name), kind) or isinstance(receipt[name], bool):
            return f"{name} is {receipt.get(name)!r}"
    for skip in receipt["skipped"]:
        if not isinstance(skip, dict) or not isinstance(skip.get("reason"), str) or type(skip.get("count")) is not int:
            return f"skipped holds {skip!r}"
    return None


def said(name: str, path: Path, sources: str) -> tuple[str, bool]:
    """Return a line about the receipt of a suite, and whether it is valid and reports no failure of this tree."""
    try:
        receipt = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return f"{name} suite: no receipt", True
    except ValueError as error:
        return f"{name} suite: {path} is malformed: {error}", False
    if wrong := malformed(receipt):
        return f"{name} suite: {path} is malformed: {wrong}", False
    here = receipt["sources"] == sources
    skipped = sum(skip["count"] for skip in receipt["skipped"])
    counts = ", ".join(f"{receipt[outcome]} {outcome}" for outcome in ("passed", "failed", "errors"))
    part = "a part of it only, " if receipt.get("partial") else ""
    tree = "this tree" if here else f"another tree (sources differ: {receipt['sources'][:12]}, here {sources[:12]})"
    where = f"{receipt['seconds']} s on {receipt['gpu']} (driver {receipt['driver']}) at {receipt['date']}"
    line = f"{name} suite: {part}{counts}, {skipped} skipped in {where}, {tree}"
    return line, not (here and (receipt["failed"] or receipt["errors"] or not receipt["passed"]))


def check(root: Path = ROOT) -> int:
    """Print a line for each suite; return 1 if a receipt is malformed or reports failures of this tree."""
    sources = digest(root)
    lines = [said(name, root / RESULTS / file, sources) for name, file in SUITES.items()]
    for line, _ in lines:
        print(line)
    return int(not all(fine for _, fine in lines))


def main(arguments: Iterable[str]) -> int:
    parser = argparse.ArgumentParser(description="Say whether this tree is the one that ran on a GPU.")
    parser.add_argument("--check", action="store_true", required=True)
    parser.parse_args(list(arguments))
    return check()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
