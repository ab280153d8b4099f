"""Host tensors, and programs in a new Python process."""

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
    """Run a program in a new interpreter, in which neither torch nor fp8core has been imported."""
    done = subprocess.run(
        (sys.executable, "-c", textwrap.dedent(program), *arguments), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()
