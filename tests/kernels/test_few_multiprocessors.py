"""Per-tensor quantization where its blocks cannot all run at once: another row's kernel gives the same bits."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from fp8core.errors import BackendError
from fp8core.kernels.quantize import QUANTIZE
from fp8core.problem import PER_TENSOR, Quantize
from fp8core.runtime import device, jit, partitions
from fp8core.runtime.launches import TOO_LARGE, LaunchError
from fp8core.runtime.plans import QuantizeNumbers
from support import reference
from support.emulation import CUDA
from support.emulation.fixtures import emulation_session, emulator  # noqa: F401
from support.emulation.running import empty, matrix, same_bytes, teasing

ROWS, COLS = 740, 512
PROBLEM = Quantize(CUDA, "bfloat16", "float8_e4m3fn", PER_TENSOR, False, "float32", "k", COLS, 16)
STREAM = 0xABC0


class Refusing:
    """A launcher whose launches the driver refuses with a status, each of them counted."""

    def __init__(self, status):
        self.status, self.launches = status, 0

    def bind_args(self, _grid, _arguments):
        def launch(_stream, *_addresses):
            self.launches += 1
            raise LaunchError("launching quantize_tensorwise", self.status)

        return launch


@pytest.fixture
def refusing(emulator, monkeypatch):
    """Stand in for the driver: it refuses cooperative grids with `refusing.status`."""
    made = Refusing(720)

    def prepare(target, source, entry, constants, signature, *, cooperative=False, **options):
        if cooperative:
            return made
        return emulator.prepare(target, source, entry, constants, signature, **options)

    monkeypatch.setattr(jit, "prepare", prepare)
    return made


def run(emulator, launches=1):
    x = teasing(ROWS, COLS, "bfloat16", 3)
    want = reference.quantize(x, group_shape=(-1, -1))
    launch = QUANTIZE.planned(PROBLEM, QUANTIZE.choice(PROBLEM))
    bound = launch.bind(QuantizeNumbers(COLS, COLS, 0, 0, ROWS, ROWS, float("inf"), 1e-10))
    for _ in range(launches):
        with emulator.watch() as memory:
            source, data, scale = matrix(memory, x), empty(memory, x.shape, np.uint8), memory.empty((1, 1), np.float32)
            bound(STREAM, source.pointer, data.pointer, scale.ctypes.data, 0)
            same_bytes(data.values, want.codes, "data")
            same_bytes(scale, want.scale, "scale")


@pytest.mark.parametrize("status", TOO_LARGE)
def test_a_refused_grid_is_run_by_another_kernel(emulator, refusing, monkeypatch, status):
    monkeypatch.setattr(partitions, "multiprocessors", lambda _stream: None)
    refusing.status = status
    run(emulator, launches=2)
    assert refusing.launches == 2
    assert len(emulator.launches) == 2


def test_a_stream_with_few_multiprocessors_is_not_given_the_grid(emulator, refusing, monkeypatch):
    """So that a capture never holds a launch that the driver refuses."""
    monkeypatch.setattr(partitions, "multiprocessors", lambda stream: 3 if stream == STREAM else None)
    run(emulator, launches=2)
    assert refusing.launches == 0


def test_a_stream_is_asked_once_where_it_has_room(emulator, monkeypatch):
    asked = []
    monkeypatch.setattr(partitions, "multiprocessors", lambda stream: asked.append(stream) or CUDA.multiprocessors)
    run(emulator, launches=3)
    assert asked == [STREAM]


def test_another_refusal_is_an_error(emulator, refusing, monkeypatch):
    monkeypatch.setattr(partitions, "multiprocessors", lambda _stream: None)
    refusing.status = 719
    with pytest.raises(BackendError, match="quantize_tensorwise"):
        run(emulator)


def test_explain_says_when_another_kernel_runs_instead():
    verdict = next(v for v in QUANTIZE.explain(PROBLEM).verdicts if v.status == "chosen")
    assert "not all blocks can run at once" in verdict.reason


@pytest.fixture
def driver(monkeypatch):
    """A driver of CUDA that knows one stream in a green context of 16 multiprocessors and one in a context of 132."""
    contexts = {0x100: (0x7, 0x8), 0x200: (0x7, None)}

    def of_stream(stream, context, green):
        if stream.value not in contexts:
            return 400
        context._obj.value, green._obj.value = contexts[stream.value]
        return 0

    def resource(count):
        def answer(_context, into, kind):
            assert kind == 1
            ctypes.c_uint32.from_buffer(into._obj, 96).value = count
            return 0

        return answer

    def error_name(_status, into):
        into._obj.value = b"CUDA_ERROR_INVALID_HANDLE"

    fake = SimpleNamespace(
        cuStreamGetCtx_v2=of_stream,
        cuGreenCtxGetDevResource=resource(16),
        cuCtxGetDevResource=resource(132),
        cuGetErrorName=error_name,
    )
    monkeypatch.setattr(device, "driver", lambda: fake)
    monkeypatch.setattr(device, "platform", lambda: "cuda")
    return fake


def test_the_multiprocessors_of_a_stream_are_asked_of_the_driver(driver):
    assert [partitions.multiprocessors(stream) for stream in (0x100, 0x200, 0, 1, 2)] == [16, 132, None, None, None]
    with pytest.raises(BackendError, match=r"cuStreamGetCtx failed with CUDA_ERROR_INVALID_HANDLE \(400\)"):
        partitions.multiprocessors(0x300)
    del driver.cuGreenCtxGetDevResource
    assert partitions.multiprocessors(0x100) is None
