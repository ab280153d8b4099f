"""The memory of a call: which operands may not overlap, and who frees what the call needs for itself."""

from contextlib import nullcontext

import numpy as np
import pytest

import fp8core
from fp8core import LayoutError
from fp8core.core import calls, memory
from fp8core.interop.overlap import share_memory
from fp8core.target import HOST, Target
from support.engines import fresh, fresh_fp8

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("overlap", ["data", "scale", "data and scale"])
def test_results_in_memory_of_another_operand_are_refused_and_nothing_is_written(framework, overlap):
    memory = np.frombuffer(fresh((32, 64), "float32").tobytes(), np.uint8).copy()
    before = memory.copy()
    view = (lambda x: x) if framework == "numpy" else torch.from_numpy
    array = view(memory)
    x = array[:4096].view(np.float32 if framework == "numpy" else torch.float32).reshape(16, 64)
    fp8 = fp8core.quantize(x).data.dtype
    data, scale = array[4096:5120].view(fp8).reshape(16, 64), None
    scale_at = {"scale": 512, "data and scale": 4096}.get(overlap)
    if scale_at is not None:
        scale = array[scale_at : scale_at + 64].view(x.dtype).reshape(16, 1)
    if overlap == "data":
        data = array[1024:2048].view(fp8).reshape(16, 64)
    for _ in range(3):
        with pytest.raises(LayoutError, match=r"needs memory of its own, got an array that overlaps"):
            fp8core.quantize(x, out=(data, scale))
        np.testing.assert_array_equal(memory, before)


def test_a_reversed_scale_is_looked_for_where_it_lies():
    """Its first element is the last in memory: behind out, unlike the others."""
    memory = np.zeros(160, np.uint8)
    out = memory[:128].view(fresh_fp8((1,)).dtype).reshape(8, 16)
    scale = memory[112:144].view(np.float32)
    scale[:] = 1
    before = memory.copy()
    x = fresh((8, 16), "float32")
    with pytest.raises(LayoutError, match="out needs memory of its own, got an array that overlaps scale"):
        fp8core.quantize(x, scale=scale[::-1].reshape(8, 1), out=out)
    np.testing.assert_array_equal(memory, before)
    other = scale.copy()[::-1].reshape(8, 1)
    fp8core.quantize(x, scale=other, out=out)
    np.testing.assert_array_equal(out.view(np.uint8), fp8core.quantize(x, scale=other.copy()).data.view(np.uint8))


@pytest.mark.parametrize(
    ("at", "steps", "shared"),
    [(0x1000, 8, True), (0x1003, 8, True), (0x1004, 8, False), (0x1007, 8, False), (0x0FFD, 3, True)],
)
def test_one_byte_of_an_element_is_memory_in_common(at, steps, shared):
    numbers, codes = (0x1000, (4,), (2,), "float32"), (at, (4,), (steps,), "float8_e4m3fn")
    assert (share_memory(numbers, codes), share_memory(codes, numbers)) == (shared, shared)


def test_rows_between_the_rows_of_another_operand_are_memory_of_their_own():
    memory = np.zeros((8, 128), np.uint8)
    codes = fresh_fp8((8, 64))
    memory[:, :64] = codes.view(np.uint8)
    q, out = memory[:, :64].view(codes.dtype), memory[:, 64:].view(np.float16)
    fp8core.dequantize(q[:, :32], 0.5, dtype="float16", out=out)
    np.testing.assert_array_equal(out, (codes[:, :32].astype(np.float32) * np.float32(0.5)).astype(np.float16))


class Bare:
    """A framework that gives memory without arrays."""

    def __init__(self):
        self.taken, self.given = [], []

    def scratch_allocator(self, nbytes, target):
        return lambda pool: pytest.fail("an array was allocated")

    def bare_memory(self, target):
        def take(nbytes, stream):
            self.taken.append((nbytes, stream))
            return 4096

        return take, self.given.append


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("captured", [False, True])
def test_memory_without_an_array_is_freed_once_the_launch_has_been_made(monkeypatch, captured, fails):
    monkeypatch.setattr(memory.device, "capturing", lambda stream: captured)
    monkeypatch.setattr(memory.graph_memory, "scratch", lambda nbytes, target, stream: 8192)
    framework, seen = Bare(), []

    def launch(*arguments):
        seen.append((*arguments, list(framework.given)))
        if fails:
            raise fp8core.BackendError("launching needs a device, got none")

    call = object.__new__(calls.Call)
    call.launch, call.can_prefetch, call._scratch = launch, False, True
    call.allocate_scratch = memory.scratch_allocator(100, framework, Target("cuda", 90, 0, 132, 32, 227 << 10))
    with pytest.raises(fp8core.BackendError) if fails else nullcontext():
        call.run(5, [64, 128], None, None)
    assert seen == [(5, 64, 128, 8192 if captured else 4096, [])]
    assert framework.taken == ([] if captured else [(100, 5)])
    assert framework.given == ([] if captured else [4096])


class Arrays:
    """A framework that gives memory in arrays: each is named by the pool that it is from."""

    def scratch_allocator(self, nbytes, target):
        return lambda pool: (4096, pool)

    def bare_memory(self, target):
        return None


@pytest.mark.parametrize("pool", [None, 5])
@pytest.mark.parametrize("captured", [False, True])
def test_the_scratch_of_a_captured_call_is_the_graphs(monkeypatch, captured, pool):
    monkeypatch.setattr(memory.device, "capturing", lambda stream: captured)
    monkeypatch.setattr(memory.graph_memory, "scratch", lambda nbytes, target, stream: 8192)
    allocate = memory.scratch_allocator(100, Arrays(), Target("cuda", 90, 0, 132, 32, 227 << 10))
    assert allocate(5, pool) == ((8192, None) if captured else (4096, pool))
    assert memory.scratch_allocator(100, Arrays(), HOST)(0, pool) == (4096, pool)
    assert memory.scratch_allocator(0, Arrays(), HOST) is None
