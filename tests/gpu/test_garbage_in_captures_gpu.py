"""On a GPU: what the garbage collector frees while a stream is captured in CUDA's strictest mode, which is torch's."""

import gc

import pytest

import fp8core
from support.captures import cupy  # noqa: F401

pytestmark = pytest.mark.gpu


class Cycle:
    """Holds things until the garbage collector runs."""

    def __init__(self, *things):
        self.things, self.itself = things, self


@pytest.fixture
def uncollected():
    """Collect the garbage of other tests, and then none but what a test asks for."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def layer(cupy):
    return fp8core.Fp8Linear.from_weight(cupy.random.standard_normal((256, 512), dtype="float32"))


@pytest.fixture
def x(cupy):
    return cupy.random.standard_normal((16, 512), dtype="float32")


def of_cupy(cupy, layer, x):
    weight = fp8core.quantize(x, group_shape=fp8core.PER_TOKEN)
    many = cupy.ones((300, 512), "float32")
    return fp8core.Fp8Linear(weight.data, weight.scale), fp8core.quantize(many), layer(many), fp8core.linear(x, weight)


def of_torch(cupy, layer, x):
    torch = pytest.importorskip("torch")
    import fp8core.torch

    made = fp8core.torch.Linear.from_linear(torch.nn.Linear(512, 256, device="cuda", dtype=torch.bfloat16))
    with torch.no_grad():
        results = made(torch.ones(16, 512, device="cuda", dtype=torch.bfloat16))
        return made, results, fp8core.quantize(torch.ones(4, 512, device="cuda"))


def of_a_stream(cupy, layer, x):
    stream = cupy.cuda.Stream(non_blocking=True)
    return stream, fp8core.quantize(x, stream=stream), layer(x, stream=stream)


@pytest.mark.parametrize("made", [of_cupy, of_torch, of_a_stream], ids=lambda made: made.__name__)
def test_what_the_library_has_made_may_be_freed(cupy, uncollected, layer, x, made):
    want, got = layer(x), cupy.empty((16, 256), "float32")
    garbage = Cycle(*made(cupy, layer, x))
    cupy.cuda.runtime.deviceSynchronize()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        del garbage
        assert gc.collect()
        layer(x, out=got)
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert (got == want).all()
