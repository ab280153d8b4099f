"""Tensors of the host, and Python in a process of its own."""

import subprocess
import sys
import textwrap

import pytest

from fp8core import interop

torch = pytest.importorskip("torch")


def torch_framework():
    return interop.framework_of(torch.Tensor)


def matrix(rows=4, cols=32):
    return torch.randn(rows, cols, dtype=torch.float32).to(torch.bfloat16)


def run(program, *arguments):
    """Run a program in an interpreter of its own, where torch and fp8core have not met yet."""
    done = subprocess.run(
        (sys.executable, "-c", textwrap.dedent(program), *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()
