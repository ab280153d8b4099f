"""What fails in the middle: memory, compilers, stopwatches, processes. Operands stay, caches hold nothing half-made."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

import fp8core
from fp8core import tuning
from fp8core.checkpoint import quantize_checkpoint
from fp8core.checkpoint.disk.replacing import exchange
from fp8core.core.operation import forget
from fp8core.errors import BackendError
from fp8core.kernels.gemm.table import SCALED_MM
from fp8core.runtime import kernel_cache
from soak import killed
from soak.good_calls import GOOD
from soak.test_fuzz import engine_of
from soak.test_fuzz_wrong import bytes_of, crossed
from support.blaslt_fixtures import built  # noqa: F401
from support.blaslt_tools import problem
from support.tuning_stub import stub  # noqa: F401

MOST = 60
"""Allocations of one call, at most."""


@contextmanager
def numpy_out_of_memory(at):
    """Let the allocation of a number fail, and give how many there were."""
    empty, seen = np.empty, []

    def failing(*args, **options):
        seen.append(args)
        if len(seen) - 1 == at:
            raise MemoryError("no memory, said the test")
        return empty(*args, **options)

    np.empty = failing
    try:
        yield seen
    finally:
        np.empty = empty


@contextmanager
def torch_out_of_memory(at):
    import torch
    from torch.overrides import TorchFunctionMode

    seen = []

    class Failing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.empty, torch.empty_strided, torch.empty_like):
                seen.append(func)
                if len(seen) - 1 == at:
                    raise torch.OutOfMemoryError("no memory, said the test")
            return func(*args, **(kwargs or {}))

    with Failing():
        yield seen


FAILING = {"numpy": numpy_out_of_memory, "torch-cpu": torch_out_of_memory}
ALLOCATING = [name for name in GOOD if name not in ("all_close_1d", "Fp8Linear")]


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("engine_name", FAILING)
@pytest.mark.parametrize("name", ALLOCATING)
def test_out_of_memory_leaves_operands_and_caches_whole(name, engine_name, cached):
    engine = engine_of(engine_name)
    good = GOOD[name]()
    function = good.function
    given = {k: v for k, v in good.arguments.items() if k not in ("out", "output", "amax", "residual")}
    arguments = {name: crossed(engine, value) for name, value in given.items()}
    copied = {name: crossed(engine, np.array(v) if isinstance(v, np.ndarray) else v) for name, v in given.items()}
    if name == "requantize_with_max_scale":  # in place without out: of one scale, so the bytes stay
        arguments["out"] = None
    want = _bytes(engine, function(**copied))
    before = {name: bytes_of(engine, value) for name, value in arguments.items()}
    for at in range(MOST):
        if not cached:
            forget()
        with FAILING[engine_name](at) as seen:
            said = _error_of(function, arguments)
        assert "said the test" in said or len(seen) <= at, said
        assert {name: bytes_of(engine, value) for name, value in arguments.items()} == before
        assert _bytes(engine, function(**arguments)) == want, f"wrong after allocation {at} failed"
        if len(seen) <= at:
            return
    raise AssertionError(f"more than {MOST} allocations")


@pytest.mark.parametrize(("engine_name", "error"), [("numpy", MemoryError), ("torch-cpu", RuntimeError)])
def test_a_result_that_no_memory_holds_is_the_error_of_its_framework(engine_name, error):
    row = engine_of(engine_name).array(np.ones((1, 256), np.float32))
    x = np.broadcast_to(row, (2**45, 256)) if engine_name == "numpy" else row.expand(2**45, 256)
    with pytest.raises(error, match=r"(8\.00 PiB|9007199254740992 bytes)"):
        fp8core.quantize(x)


def _error_of(function, arguments):
    try:
        function(**arguments)
    except (MemoryError, RuntimeError) as error:  # NumPy's and torch's
        return str(error)
    return ""


def _bytes(engine, result):
    if hasattr(result, "scale"):  # a Quantized
        result = (result.data, result.scale)
    if type(result) is tuple:
        return [_bytes(engine, part) for part in result]
    return bytes_of(engine, result)


def test_a_failing_compile_leaves_no_entry(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.FOLDER_VARIABLE, str(tmp_path))
    name = kernel_cache.name_of("text")

    def failing():
        raise BackendError("the compiler refused it")

    for _ in range(2):
        with pytest.raises(BackendError, match="refused"):
            kernel_cache.fetch(name, failing)
        assert not list(tmp_path.iterdir())
    assert kernel_cache.fetch(name, lambda: b"code") == (b"code", False)
    assert kernel_cache.fetch(name, failing) == (b"code", True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, BackendError])
def test_an_interrupted_stopwatch_changes_nothing(stub, error):
    p = problem(m=96)
    before, count = SCALED_MM.choice(p), len(SCALED_MM.candidates(p))
    for step in range(count):

        def times(p, launches, last=step):
            for number, _ in enumerate(launches):
                if number == last:
                    raise error("interrupted")
            return [1.0] * len(launches)

        with pytest.raises(error):
            tuning.timed(p, times).apply()
        assert SCALED_MM.choice(p) == before
        assert not SCALED_MM._tuned
    tuning.timed(p, lambda p, launches: [9.0, 1.0] + [9.0] * (len(launches) - 2)).apply()
    assert SCALED_MM.choice(p) == SCALED_MM.candidates(p)[1]


def deaths(*arguments):
    """Return what is found after a process was killed at each of its steps, and how often it was."""
    path = os.pathsep.join((*sys.path, str(Path(__file__).parents[1])))
    command = [sys.executable, killed.__file__, *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path})
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert [one["died"] for one in found] == [True] * (len(found) - 1) + [False]
    return found


def test_a_process_killed_while_it_keeps_a_kernel(tmp_path):
    found = deaths("cache", tmp_path / "kernels")
    assert len(found) > 3
    assert {one["found"] for one in found} == {"old", "new"}


@pytest.fixture
def source(tmp_path):
    rng = np.random.default_rng(0)
    names = [f"layers.{i}.{kind}.weight" for i in range(2) for kind in ("up_proj", "down_proj")]
    tensors = {name: rng.standard_normal((32, 64)).astype(np.float32) for name in names}
    folder = tmp_path / "source"
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    return folder


def broken(found):
    """Return the deaths after which something is neither the old nor the new, or a run again did not do as any other."""
    wrong = []
    for one in found:
        parts = zip(one["old"], one["found"], one["new"], strict=True)
        if any(there not in (old, new) for old, there, new in parts) or one["new"] != found[-1]["new"] or one["left"]:
            wrong.append(one)
    return wrong


def test_a_process_killed_while_it_writes_a_checkpoint_file(tmp_path, source):
    (tmp_path / "to").mkdir()
    found = deaths("checkpoint", source / "model.safetensors", tmp_path / "to" / "new.safetensors")
    assert len(found) > 5
    assert not broken(found)


def test_a_process_killed_while_it_writes_a_checkpoint_folder(tmp_path, source):
    (tmp_path / "to").mkdir()
    found = deaths("checkpoint", source, tmp_path / "to" / "new")
    assert len(found) > 5
    assert not broken(found)


@pytest.mark.parametrize("name", ["new.safetensors", "new"])
def test_a_process_killed_while_it_converts_a_checkpoint(tmp_path, source, name):
    (tmp_path / "to").mkdir()
    fp8 = tmp_path / "fp8"
    quantize_checkpoint(source, fp8, scheme="tensor")
    found = deaths("convert", fp8 / "model.safetensors" if "." in name else fp8, tmp_path / "to" / name)
    assert len(found) > 5
    assert not broken(found)


def test_names_that_cannot_be_exchanged_say_so(tmp_path):
    (tmp_path / "one").mkdir()
    with pytest.raises(FileNotFoundError, match="No such file"):
        exchange(tmp_path / "one", tmp_path / "missing")
