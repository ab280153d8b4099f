"""What a benchmark needs of the machine, and how it ends where that is not there."""

import argparse
from importlib import import_module, util
from typing import Any, Final

from fp8core.runtime import device

SEES_GPU: Final = {"torch": lambda torch: torch.cuda.is_available(), "jax": lambda jax: jax.default_backend() != "cpu"}
"""Whether a framework has been built for GPUs, and finds one."""


def missing(framework: str) -> str | None:
    """Return what a benchmark on the GPU, with arrays of a framework, needs and has not here; None where all is there.

    The framework is not imported.
    """
    if not device.count():
        return f"needs a GPU: {device.why_none()}"
    return None if util.find_spec(framework) else f"needs {framework}, which is not installed"


def require_gpu(parser: argparse.ArgumentParser, framework: str = "torch") -> None:
    """End the process in one line and with status 2, as for arguments that are not understood, where there is no GPU.

    Args:
        parser: that of the benchmark.
        framework: whose arrays it times.
    """
    why = missing(framework)
    if why is None and framework in SEES_GPU:
        loaded: Any = import_module(framework)
        if not SEES_GPU[framework](loaded):
            why = f"needs a {framework} that finds the GPU, got {loaded.__version__}"
    if why is not None:
        parser.exit(2, f"{parser.prog}: error: {why}\n")
