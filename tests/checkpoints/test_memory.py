"""The memory that checkpoints take to be written, converted and verified: parts, whatever the size of a tensor or file."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST, MOST_OF_FP8 = 300e6, 250e6
"""Bytes, of which parts of 32 MB are some: fewer than the largest tensor has, and than the FP8 file has."""
PEAK = r"""
import re, sys
from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint, verify_checkpoint
does, source, target, what = sys.argv[1:]
if does == "verify":
    assert not verify_checkpoint(source).faults
elif does == "convert":
    convert_checkpoint(source, target, to=what, lossy=True)
else:
    quantize_checkpoint(source, target, scheme=what)
wrong = [name for name in ("torch", "jax", "cupy", "transformers") if name in sys.modules]
assert not wrong, wrong
# And not getrusage's ru_maxrss, which a child inherits from the process that started it.
print(1024 * int(re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())[1]))
"""


def peak(does, source, target, what):
    """Return the most memory that a process of its own took."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PEAK, does, str(source), str(target), what]
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    target.unlink(missing_ok=True)
    return int(run.stdout)


def header(tensors):
    """Return the header of a safetensors file: names with dtype, itemsize and shape."""
    found, end = {}, 0
    for name, (dtype, size, shape) in tensors.items():
        found[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size * math.prod(shape)]}
        end += size * math.prod(shape)
    text = json.dumps(found).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A file whose largest tensor, of float32, has 403 MB, beside one that is copied, of 268 MB."""
    path = tmp_path_factory.mktemp("large") / "in.safetensors"
    shapes = {"layers.0.up.weight": (12288, 8192), "embed.weight": (8192, 8192)}
    rows = np.random.default_rng(0).standard_normal((1024, 8192), np.float32)
    with path.open("wb") as file:
        file.write(header({name: ("F32", 4, shape) for name, shape in shapes.items()}))
        for _ in range(sum(n for n, _ in shapes.values()) // 1024):
            file.write(rows.data)
    yield path
    path.unlink()


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_quantizing_takes_less_than_the_largest_tensor(tmp_path, plain, scheme):
    assert plain.stat().st_size > 670e6
    assert peak("quantize", plain, tmp_path / "out.safetensors", scheme) < MOST


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """An FP8 file of 268 MB in two weights."""
    path = tmp_path_factory.mktemp("large") / "in.safetensors"
    n, k = 16384, 8192
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        tensors[name] = ("F8_E4M3", 1, (n, k))
        tensors[f"{name}_scale_inv"] = ("F32", 4, (n // 128, k // 128))
    generator = np.random.default_rng(0)
    codes = (generator.standard_normal((1024, k)) * 60).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    with path.open("wb") as file:
        file.write(header(tensors))
        for _ in range(2):
            for _ in range(n // len(codes)):
                file.write(codes.data)
            file.write((generator.random(n * k // 128**2, np.float32) / 1000 + 1e-4).data)
    yield path
    path.unlink()


@pytest.mark.parametrize("to", ["bf16", "channel", "block", "tensor", "verify"])
def test_converting_and_verifying_take_less_than_the_file(tmp_path, fp8, to):
    assert fp8.stat().st_size > 268e6
    does = "verify" if to == "verify" else "convert"
    assert peak(does, fp8, tmp_path / "out.safetensors", to) < MOST_OF_FP8
