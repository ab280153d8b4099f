"""Faults on a GPU: no memory, launches and compiles that fail, tuning that is interrupted or inside a capture."""

import gc
from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

import fp8core
from fp8core import timing
from fp8core.errors import BackendError
from fp8core.runtime import compiler, device, kernel_cache, launches
from support import reference
from support.engines import FP8, CupyEngine, TorchEngine, assert_same_bytes, fresh

pytestmark = pytest.mark.gpu
M, N, K = 8192, 1024, 4096
"""Results of 16 MB and scratches of 32 MB: no free block is as large."""
LAUNCH_FAILED = 719


def taken(allocate, error):
    """Take all memory that ``allocate(bytes)`` still has, and return it."""
    held = []
    for size in (1 << 26, 1 << 22, 1 << 20):
        for _ in range(10_000):
            try:
                held.append(allocate(size))
            except error:
                break
    return held


@contextmanager
def torch_without_memory():
    torch = pytest.importorskip("torch")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 20)) / whole)
    held = taken(lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"), torch.OutOfMemoryError)
    try:
        yield torch.OutOfMemoryError
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


@contextmanager
def cupy_without_memory():
    cupy = pytest.importorskip("cupy")
    pool = cupy.get_default_memory_pool()
    cupy.cuda.Device().synchronize()
    pool.free_all_blocks()
    pool.set_limit(size=max(pool.total_bytes(), 1))
    held = taken(cupy.cuda.alloc, cupy.cuda.memory.OutOfMemoryError)
    try:
        yield cupy.cuda.memory.OutOfMemoryError
    finally:
        held.clear()
        pool.set_limit(size=0)


MEMORY = {"torch-cuda": (lambda: TorchEngine("cuda"), torch_without_memory), "cupy": (CupyEngine, cupy_without_memory)}
CALLS = {
    "quantize": lambda x, q, layer: fp8core.quantize(x),
    "silu_and_mul_quant": lambda x, q, layer: fp8core.silu_and_mul_quant(x),
    "dequantize": lambda x, q, layer: fp8core.dequantize(q.data, q.scale, group_shape=(1, -1), dtype="bfloat16"),
    "linear": lambda x, q, layer: fp8core.linear(x, layer.weight, layer.weight_scale),
    "Fp8Linear": lambda x, q, layer: layer(x),
}


@cache
def inputs():
    """Return what every case takes its first rows of."""
    return fresh((M + 8 * len(CALLS), K))


def values(engine, result):
    if hasattr(result, "scale"):
        return [engine.codes(result.data), engine.numpy(result.scale)]
    return [np.ascontiguousarray(engine.numpy(result)).view(np.uint16)]


@pytest.mark.parametrize("cached", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("framework", MEMORY)
def test_no_memory_for_a_result_or_a_scratch(framework, name, cached):
    make, without_memory = MEMORY[framework]
    engine = make()
    rows = M + 8 * sorted(CALLS).index(name) + (0 if cached else 4)  # a first call is one of a new shape
    given = inputs()[:rows]
    x, q = engine.array(given), fp8core.quantize(engine.array(given))
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((N, K))))
    call = CALLS[name]
    if cached:
        call(x, q, layer)
    for _ in range(2):
        with without_memory() as error, pytest.raises(error):
            call(x, q, layer)
    assert_same_bytes(engine.numpy(x), given)
    got = values(engine, call(x, q, layer))
    other = fp8core.Fp8Linear(layer.weight, layer.weight_scale)
    for one, want in zip(got, values(engine, call(engine.array(given), q, other)), strict=True):
        assert_same_bytes(one, want)


class Launch:
    """The driver's launch, which fails instead while `fails` says so."""

    def __init__(self, real):
        self.real, self.count, self.fails = real, 0, lambda number: False

    def __call__(self, *arguments):
        self.count += 1
        return LAUNCH_FAILED if self.fails(self.count) else self.real(*arguments)


@pytest.fixture
def launch(monkeypatch):
    found = Launch(launches._launch_function("cuda"))
    monkeypatch.setattr(launches, "_launch_function", lambda platform: found)
    yield found
    found.fails = lambda number: False


def test_a_failing_launch_names_itself_and_writes_nothing(launch):
    engine = CupyEngine()
    x = fresh((5, 1368))
    data, scale = engine.array(np.zeros((5, 1368), FP8["float8_e4m3fn"])), engine.array(np.full((5, 1), -1, np.float32))
    launch.fails = lambda number: True
    for _ in range(2):
        with pytest.raises(BackendError, match=rf"launching \w+ .*\({LAUNCH_FAILED}\)"):
            fp8core.quantize(engine.array(x), out=(data, scale))
        assert not engine.codes(data).any()
        assert (engine.numpy(scale) == -1).all()
    launch.fails = lambda number: False
    fp8core.quantize(engine.array(x), out=(data, scale))
    want = reference.quantize(x)
    assert_same_bytes(engine.codes(data), want.codes)
    assert_same_bytes(engine.numpy(scale), want.scale)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_launch_that_fails_within_a_linear_layer(launch, failing):
    engine = CupyEngine()
    weight, x = engine.array(fresh((72, 1384))), engine.array(fresh((5, 1384)))
    layer = fp8core.Fp8Linear.from_weight(weight)
    begun = launch.count
    launch.fails = lambda number: number == begun + failing
    out = engine.array(np.zeros((5, 72), fresh((1, 1)).dtype))
    failed = None
    try:
        layer(x, out=out)
    except BackendError as error:
        failed = error
    launched = launch.count - begun
    assert failed is not None or launched < failing  # one kernel may do both
    if failed is not None:
        assert not engine.numpy(out).view(np.uint16).any()
    launch.fails = lambda number: False
    layer(x, out=out)
    want = fp8core.Fp8Linear(layer.weight, layer.weight_scale)(x)
    assert_same_bytes(engine.numpy(out), engine.numpy(want))


def test_a_failing_compile_leaves_no_entry(tmp_path, monkeypatch):
    engine = CupyEngine()
    x = fresh((3, 1736))
    monkeypatch.setenv(kernel_cache.FOLDER_VARIABLE, str(tmp_path))

    def failing(*arguments):
        raise BackendError("the compiler refused it")

    options = {"group_shape": (1, 217), "dtype": "float8_e5m2"}
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_text", failing)
        for _ in range(2):
            with pytest.raises(BackendError, match="refused it"):
                fp8core.quantize(engine.array(x), **options)
            assert not list(tmp_path.iterdir())
    got = fp8core.quantize(engine.array(x), **options)
    assert_same_bytes(engine.codes(got.data), reference.quantize(x, "float8_e5m2", (1, 217)).codes)


def capturing_streams():
    cupy = device.cupy()
    streams = [x for x in gc.get_objects() if isinstance(x, cupy.cuda.Stream)]
    return [stream for stream in streams if cupy.cuda.runtime.streamIsCapturing(stream.ptr)]


@pytest.mark.parametrize("number", [1, 2, 4, 8, 16, 32, 64])
def test_an_interrupted_tune_leaves_no_capture_and_no_choice(monkeypatch, number):
    engine = CupyEngine()
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((512, 1024))))
    x = engine.array(fresh((24, 1024)))
    before, want = fp8core.explain(layer, x).chosen, engine.numpy(layer(x))
    run, seen = timing.Operands.run, []

    def interrupted(self, *arguments):
        seen.append(0)
        if len(seen) == number:
            raise KeyboardInterrupt
        return run(self, *arguments)

    monkeypatch.setattr(timing.Operands, "run", interrupted)
    with pytest.raises(KeyboardInterrupt) as kept:  # and with it the frames and their streams
        fp8core.tune(layer, x)
    assert kept.value is not None
    assert not capturing_streams()
    assert fp8core.explain(layer, x).chosen == before
    assert_same_bytes(engine.numpy(layer(x)), want)


def test_a_tune_inside_a_capture_is_refused_and_the_capture_goes_on():
    torch = pytest.importorskip("torch")
    engine = TorchEngine("cuda")
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((512, 1024))))
    x = engine.array(fresh((24, 1024)))
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        doubled = x + x
        with pytest.raises(fp8core.Fp8Error, match="captur"):
            fp8core.tune(layer, x)
        assert torch.cuda.is_current_stream_capturing()
        result = doubled * 2
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, 4 * x)
