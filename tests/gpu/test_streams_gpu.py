"""What only a GPU shows: streams, threads, graphs, devices, sizes beyond 2**31 elements. Every test is marked gpu."""

import threading

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN
from support import reference
from support.engines import CupyEngine, TorchEngine, assert_same_bytes, fresh, fresh_fp8, fresh_scale, rng

pytestmark = pytest.mark.gpu
GROUPS = [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128]


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


def layer_and_inputs(engine, scheme, m):
    options = {
        "channel": {},
        "tensor": {"weight_group_shape": PER_TENSOR, "group_shape": PER_TENSOR},
        "block": {"weight_group_shape": BLOCK_128, "group_shape": GROUP_128},
    }[scheme]
    layer = fp8core.Fp8Linear.from_weight(engine.array(fresh((512, 1024), spread=1)), **options)
    return layer, [engine.array(fresh((m, 1024), spread=1 + i)) for i in range(3)]


def bits(engine, x):
    return engine.numpy(x).view(np.uint16)


@pytest.mark.parametrize("group_shape", GROUPS, ids=str)
@pytest.mark.parametrize("m", [1, 64, 4096])
def test_a_graph_of_torch_replays_with_changed_inputs(torch, group_shape, m):
    engine = TorchEngine("cuda")
    x = engine.array(fresh((m, 1024)))
    graph = torch.cuda.CUDAGraph()
    fp8core.quantize(x, group_shape=group_shape)
    with torch.cuda.graph(graph):
        q = fp8core.quantize(x, group_shape=group_shape)
    for turn in range(3):
        changed = fresh((m, 1024), spread=2 + turn)
        x.copy_(engine.array(changed))
        graph.replay()
        eager = fp8core.quantize(x, group_shape=group_shape)
        torch.cuda.synchronize()
        assert_same_bytes(engine.codes(q.data), engine.codes(eager.data))
        assert_same_bytes(engine.numpy(q.scale), engine.numpy(eager.scale))
        if m <= 64:  # more would take the naive oracle too long
            assert_same_bytes(engine.codes(q.data), reference.quantize(changed, group_shape=group_shape).codes)


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
@pytest.mark.parametrize("m", [1, 16, 100])
def test_a_graph_of_torch_holds_a_linear(torch, scheme, m):
    engine = TorchEngine("cuda")
    layer, inputs = layer_and_inputs(engine, scheme, m)
    x = inputs[0].clone()
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    for given in inputs:
        x.copy_(given)
        graph.replay()
        np.testing.assert_array_equal(bits(engine, y), bits(engine, layer(given)))


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
@pytest.mark.parametrize("m", [1, 100])
def test_a_graph_of_cupy_holds_a_linear(cupy, scheme, m):
    engine = CupyEngine()
    layer, inputs = layer_and_inputs(engine, scheme, m)
    x = inputs[0].copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    out = cupy.empty((m, 512), x.dtype)
    with stream:
        layer(x, out=out)
        stream.synchronize()
        stream.begin_capture()
        layer(x, out=out)
        graph = stream.end_capture()
    for given in inputs:
        x[...] = given
        cupy.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        np.testing.assert_array_equal(bits(engine, out), bits(engine, layer(given)))


def test_graphs_captured_from_one_stream_replay_at_once(torch):
    engine = TorchEngine("cuda")
    layer, inputs = layer_and_inputs(engine, "channel", 16)
    want = [bits(engine, layer(x)) for x in inputs]
    tensor_want = [engine.codes(fp8core.quantize(x, group_shape=PER_TENSOR).data) for x in inputs]
    graphs, results = [], []
    for x in inputs:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append((layer(x), fp8core.quantize(x, group_shape=PER_TENSOR)))
        graphs.append(graph)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (y, q), expected, codes in zip(results, want, tensor_want, strict=True):
        np.testing.assert_array_equal(bits(engine, y), expected)
        assert_same_bytes(engine.codes(q.data), codes)


@pytest.mark.parametrize("group_shape", GROUPS, ids=str)
def test_the_side_stream_of_torch_is_followed(torch, group_shape):
    engine = TorchEngine("cuda")
    x = fresh((512, 1024))
    there = engine.array(np.zeros_like(x))
    side = torch.cuda.Stream()
    late = engine.array(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        there.copy_(late)
        q = fp8core.quantize(there, group_shape=group_shape)
    side.synchronize()
    want = fp8core.quantize(engine.array(x), group_shape=group_shape)
    assert_same_bytes(engine.codes(q.data), engine.codes(want.data))


@pytest.mark.parametrize("give", ["torch stream", "address", "cupy stream"])
def test_an_explicit_stream_wins(torch, cupy, give):
    engine = TorchEngine("cuda")
    x, there = engine.array(fresh((512, 1024))), engine.array(np.zeros((512, 1024), fresh((1, 1)).dtype))
    side = torch.cuda.Stream()
    stream = {"torch stream": side, "address": side.cuda_stream, "cupy stream": cupy.cuda.Stream.from_external(side)}[
        give
    ]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        there.copy_(x)
    q = fp8core.quantize(there, stream=stream)
    side.synchronize()
    torch.cuda.synchronize()
    assert_same_bytes(engine.codes(q.data), engine.codes(fp8core.quantize(x).data))


def test_two_streams_work_beside_each_other(torch):
    engine = TorchEngine("cuda")
    layer, inputs = layer_and_inputs(engine, "tensor", 128)
    want = [bits(engine, layer(x)) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    results = []
    for _ in range(30):
        for at, (stream, x) in enumerate(zip(streams, inputs, strict=True)):
            with torch.cuda.stream(stream):
                results.append((at, layer(x)))
    torch.cuda.synchronize()
    for at, y in results:
        np.testing.assert_array_equal(bits(engine, y), want[at])


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_threads_with_streams_of_their_own(torch, scheme):
    engine = TorchEngine("cuda")
    layer, inputs = layer_and_inputs(engine, scheme, 48)
    want = [bits(engine, layer(x)) for x in inputs]
    wrong = []

    def work(at):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(60):
                    if not np.array_equal(bits(engine, layer(inputs[at])), want[at]):
                        wrong.append(at)
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("group_shape", [PER_TENSOR, PER_TOKEN, GROUP_128], ids=str)
def test_element_offsets_above_2_to_the_31(torch, group_shape):
    rows, cols = 65_600, 32_768 + 64
    x = torch.empty((rows, cols), dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 4096):
        x[start : start + 4096].normal_()
    assert x.numel() > 2**31
    engine = TorchEngine("cuda")
    q = fp8core.quantize(x, group_shape=group_shape)
    for rows_seen in (slice(0, 2), slice(rows - 2, rows)):
        part = engine.numpy(x[rows_seen])
        scale = engine.numpy(q.scale) if group_shape == PER_TENSOR else None
        want = reference.quantize(part, group_shape=tuple(group_shape), scale=scale)
        assert_same_bytes(engine.codes(q.data[rows_seen]), want.codes)
        if scale is None:
            assert_same_bytes(engine.numpy(q.scale[rows_seen]), want.scale)
    back = q.dequantize("bfloat16")
    error = (back[-2:].float() - x[-2:].float()).norm() / x[-2:].float().norm()
    assert error < 0.04


def test_a_product_with_element_offsets_above_2_to_the_31(torch):
    m, n, k = 140_000, 16_384, 64
    engine = TorchEngine("cuda")
    a, weight = fresh_fp8((m, k)), fresh_fp8((n, k))
    token, channel = fresh_scale((m, 1)), fresh_scale((1, n))
    got = fp8core.scaled_mm(engine.array(a), engine.array(weight).T, engine.array(token), engine.array(channel))
    last = reference.scaled_mm(a[-3:].astype(np.float32), weight.astype(np.float32).T, token[-3:], channel)
    assert reference.relative_error(engine.numpy(got[-3:]), last) <= 3e-3


def test_float8_arrays_cross_to_torch_without_a_copy(torch, cupy):
    q = fp8core.quantize(cupy.asarray(fresh((16, 256), "float32")))
    tensor = torch.from_dlpack(q.data)
    assert tensor.dtype == torch.float8_e4m3fn
    assert tensor.data_ptr() == q.data.codes.data.ptr
    assert torch.equal(tensor.view(torch.uint8).cpu(), torch.from_numpy(q.data.codes.get()))


def test_cupy_weights_and_torch_activations_meet_in_one_product(torch, cupy):
    weight = fresh((128, 256))
    q = fp8core.quantize(cupy.asarray(weight))
    x = fresh((5, 256))
    engine = TorchEngine("cuda")
    got = fp8core.linear(engine.array(x), q.data, q.scale)
    assert isinstance(got, torch.Tensor)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert reference.relative_error(engine.numpy(got), want) <= 0.06


def test_jax_arrays_in_and_out():
    jax = pytest.importorskip("jax")
    x, weight = fresh((7, 256)), fresh((128, 256))
    layer = fp8core.Fp8Linear.from_weight(jax.numpy.asarray(weight))
    y = layer(jax.numpy.asarray(x))
    assert isinstance(y, jax.Array)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert reference.relative_error(np.asarray(y), want) <= 0.06
    again = np.asarray(layer(jax.numpy.asarray(x) + 0))
    np.testing.assert_array_equal(again.view(np.uint16), np.asarray(y).view(np.uint16))


def test_the_first_call_of_a_thread(torch):
    engine = TorchEngine("cuda")
    x = engine.array(fresh((4, 256)))
    fp8core.quantize(x)
    out = engine.array(np.zeros((4, 256), fresh_fp8((1, 1)).dtype)), engine.array(np.zeros((4, 1), np.float32))
    results = []
    thread = threading.Thread(target=lambda: results.append(fp8core.quantize(x, out=out)))
    thread.start()
    thread.join()
    assert results
    assert_same_bytes(engine.codes(out[0]), reference.quantize(fresh((4, 256))).codes)


def test_the_first_call_may_be_inside_a_capture(torch):
    """A kernel that was never loaded can be prepared while a stream is being captured."""
    engine = TorchEngine("cuda")
    x = engine.array(fresh((3, 1872)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q = fp8core.quantize(x, group_shape=(1, 208), dtype="float8_e5m2")
    graph.replay()
    torch.cuda.synchronize()
    want = reference.quantize(fresh((3, 1872)), "float8_e5m2", (1, 208))
    assert_same_bytes(engine.codes(q.data), want.codes)


@pytest.mark.multigpu
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_a_device_that_is_not_the_current_one(torch, scheme):
    engine, other = TorchEngine("cuda:0"), TorchEngine("cuda:1")
    layer, inputs = layer_and_inputs(engine, scheme, 20)
    layer_there, inputs_there = layer_and_inputs(other, scheme, 20)
    assert torch.cuda.current_device() == 0
    for x, x_there in zip(inputs, inputs_there, strict=True):
        y = layer_there(x_there)
        assert y.device.index == 1
        np.testing.assert_array_equal(bits(other, y), bits(engine, layer(x)))
    assert torch.cuda.current_device() == 0
    with pytest.raises(fp8core.DeviceError, match="device 1"):
        layer(inputs_there[0])


def test_random_values_of_every_size_per_tensor(cupy):
    engine = CupyEngine()
    for rows, cols in ((1, 16), (1, 100_000), (999, 1001), (4096, 4096), (3000, 20_000)):
        x = rng(rows, cols).standard_normal((rows, cols), dtype=np.float32)
        got = fp8core.quantize(engine.array(x), group_shape=PER_TENSOR)
        want = fp8core.quantize(x, group_shape=PER_TENSOR)
        assert_same_bytes(engine.numpy(got.scale), want.scale)
        assert_same_bytes(engine.codes(got.data), want.data.view(np.uint8))
