"""The requirements of benchmarks on the machine, and the error if they are not met."""

import argparse
from importlib import import_module, util
from typing import Any, Final

from fp8core.runtime import device

SEES_GPU: Final = {"torch": lambda torch: torch.cuda.is_available(), "jax": lambda jax: jax.default_backend() != "cpu"}
"""By framework: whether it was built for GPUs and finds one."""


def missing(framework: str) -> str | None:
    """Return why a GPU benchmark with arrays of a framework cannot run here, or None. The framework is not imported."""
    if not device.count():
        return f"needs a GPU: {device.why_none()}"
    return None if util.find_spec(framework) else f"needs {framework}, which is not installed"


def require_gpu(parser: argparse.ArgumentParser, framework: str = "torch") -> None:
    """Exit with one line and status 2, as for invalid arguments, if there is no GPU for a benchmark.

    Args:
        parser: the benchmark's argument parser.
        framework: the framework whose arrays the benchmark uses.
    """
    why = missing(framework)
    if why is None and framework in SEES_GPU:
        loaded: Any = import_module(framework)
        if not SEES_GPU[framework](loaded):
            why = f"needs a {framework} that finds the GPU, got {loaded.__version__}"
    if why is not None:
        parser.exit(2, f"{parser.prog}: error: {why}\n")
