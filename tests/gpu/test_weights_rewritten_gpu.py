"""Weights that change between calls: a product never reads what was there before, whoever wrote it and wherever."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import fp8core
from fp8core import BLOCK_128, GROUP_128, PER_TENSOR, PER_TOKEN, Fp8Linear
from support.engines import TorchEngine, fresh, fresh_scale

pytestmark = pytest.mark.gpu

N, K = 8192, 8192
"""A weight that takes long enough to be written for a product that does not wait to be caught."""
SCHEMES = {
    "channel": (PER_TOKEN, PER_TOKEN),
    "tensor": (PER_TENSOR, PER_TENSOR),
    "block": (BLOCK_128, GROUP_128),
}
RUNS = 20


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def bits(x):
    return x.view(x.dtype if x.dtype.itemsize == 1 else __import__("torch").int16)


def layer_of(torch, scheme, n=N, k=K):
    weight_group, group = SCHEMES[scheme]
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    return Fp8Linear.from_weight(weight, weight_group_shape=weight_group, group_shape=group), weight_group


def expected(layer, x):
    """Return what the layer has to give, by a layer that never called before, on copies."""
    copies = [None if a is None else a.clone() for a in (layer.weight, layer.weight_scale, layer.bias)]
    import torch

    torch.cuda.synchronize()
    there = Fp8Linear(copies[0], copies[1], bias=copies[2], group_shape=layer.group_shape)
    y = there(x)
    torch.cuda.synchronize()
    return y


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("writer", ["quantize", "requantize", "normalize", "copy", "norm"])
def test_a_weight_refreshed_in_place_is_not_read_too_early(torch, scheme, writer):
    layer, group = layer_of(torch, scheme)
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    news = [torch.randn(N, K, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    codes = [fp8core.quantize(new, group_shape=group).data for new in news]
    scales = torch.from_numpy(fresh_scale((2,))).cuda()
    gamma = torch.ones(K, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        layer(x)
    wrong = 0
    for run in range(RUNS):
        new = news[run % 2]
        if writer == "quantize":
            fp8core.quantize(new, group_shape=group, out=(layer.weight, layer.weight_scale))
        elif writer == "requantize":
            fp8core.requantize_with_max_scale(codes[run % 2], scales * (1 + run), [N // 2, N // 2], out=layer.weight)
        elif writer == "normalize":
            fp8core.normalize_e4m3fn_to_e4m3fnuz(codes[run % 2], scales, out=layer.weight)
        elif writer == "norm":
            if scheme != "channel":
                pytest.skip("one scale a row is what the fused producer gives beside a weight per channel")
            fp8core.rms_norm_quant(new, gamma, 1e-6, out=(layer.weight, layer.weight_scale))
        else:
            layer.weight.copy_(codes[run % 2])
        got = [layer(x) for _ in range(3)]
        want = expected(layer, x)
        wrong += sum(not torch.equal(bits(y), bits(want)) for y in got)
    assert wrong == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_refresh_inside_of_a_graph_is_waited_for_at_every_replay(torch, scheme):
    layer, group = layer_of(torch, scheme)
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    new = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8core.quantize(new, group_shape=group, out=(layer.weight, layer.weight_scale))
        y = layer(x)
        again = layer(x)
    wrong = 0
    for _ in range(RUNS):
        new.copy_(torch.randn_like(new))
        y.fill_(float("nan"))
        graph.replay()
        want = expected(layer, x)
        wrong += not torch.equal(bits(y), bits(want))
        wrong += not torch.equal(bits(again), bits(want))
        wrong += not torch.equal(bits(layer(x)), bits(want))
    assert wrong == 0


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_first_call_without_rows_or_on_another_stream_settles_nothing(torch, scheme):
    _, group = layer_of(torch, scheme, 128, 128)
    side = torch.cuda.Stream()
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    wrong = 0
    for run in range(RUNS):
        new = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        q = fp8core.quantize(torch.zeros_like(new), group_shape=group)
        layer = Fp8Linear(q, group_shape=SCHEMES[scheme][1])
        if run % 2:
            layer(x[:0])
        else:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                layer(x)
            torch.cuda.current_stream().wait_stream(side)
        fp8core.quantize(new, group_shape=group, out=(q.data, q.scale))
        y = layer(x)
        wrong += not torch.equal(bits(y), bits(expected(layer, x)))
    assert wrong == 0


def test_a_fresh_weight_in_the_place_of_an_old_one_is_not_read_too_early(torch):
    layer, group = layer_of(torch, "channel")
    x = torch.randn(1, K, device="cuda", dtype=torch.bfloat16)
    wrong = 0
    for _ in range(RUNS):
        layer(x)
        place = layer.weight.data_ptr()
        new = torch.randn(N, K, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        layer.weight.data, layer.weight_scale.data = (
            torch.empty(0, device="cuda", dtype=layer.weight.dtype),
            torch.ones(N, 1, device="cuda"),
        )
        q = fp8core.quantize(new, group_shape=group)
        layer.weight.data, layer.weight_scale.data = q.data, q.scale
        y = layer(x)
        wrong += not torch.equal(bits(y), bits(expected(layer, x)))
        del q, new, place
    assert wrong == 0


def test_a_weight_that_another_thread_rewrites_on_the_same_stream_is_read_whole(torch):
    """Each result is that of one weight: threads change places as often as they can, between decision and launch, too."""
    layer, group = layer_of(torch, "channel", 2048, 4096)
    x = fp8core.quantize(torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16))
    news = [torch.randn(2048, 4096, device="cuda", dtype=torch.bfloat16) * (1 + i) for i in range(2)]
    wants = []
    for new in news:
        fp8core.quantize(new, group_shape=group, out=(layer.weight, layer.weight_scale))
        wants.append(expected(layer, x))
    ended = threading.Event()

    def rewrite():
        while not ended.is_set():
            for new in news * 25:
                fp8core.quantize(new, group_shape=group, out=(layer.weight, layer.weight_scale))
            torch.cuda.current_stream().synchronize()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as pool:
            writer = pool.submit(rewrite)
            torn = 0
            try:
                for _ in range(60):
                    results = [layer(x) for _ in range(20)]
                    torn += sum(not any(torch.equal(bits(y), bits(want)) for want in wants) for y in results)
            finally:
                ended.set()
            writer.result()
    finally:
        sys.setswitchinterval(interval)
    assert torn == 0


OFFSETS = [(0, 0), (8, 0), (0, 8), (8, 8), (2, 0), (0, 2)]


def at(torch, shape, dtype, offset):
    """Return an uncleared tensor at ``offset`` bytes behind a multiple of 256."""
    size = torch.empty((), dtype=dtype).element_size()
    count = int(np.prod(shape))
    raw = torch.empty(256 + count * size + 256, dtype=torch.uint8, device="cuda")
    start = -raw.data_ptr() % 256 + offset
    return raw[start : start + count * size].view(dtype).view(shape)


@pytest.mark.parametrize("group", [PER_TENSOR, PER_TOKEN, GROUP_128, BLOCK_128], ids=str)
def test_calls_whose_operands_lie_otherwise_are_calls_of_their_own(torch, group):
    engine = TorchEngine("cuda")
    values = engine.array(fresh((128, 512)))
    want = fp8core.quantize(values, group_shape=group)
    for _ in range(2):
        for x_at, out_at in OFFSETS:
            x = at(torch, values.shape, values.dtype, x_at)
            x.copy_(values)
            out = at(torch, values.shape, torch.float8_e4m3fn, out_at)
            got = fp8core.quantize(x, group_shape=group, out=out)
            torch.cuda.synchronize()
            assert torch.equal(got.data.view(torch.uint8), want.data.view(torch.uint8))
            assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("m", [1, 16, 100])
def test_products_whose_operands_lie_otherwise_are_calls_of_their_own(torch, m):
    layer, _ = layer_of(torch, "channel", 256, 512)
    values = torch.randn(m, 512, device="cuda", dtype=torch.bfloat16)
    want = layer(values)
    weight = torch.randn(512, device="cuda", dtype=torch.bfloat16)
    produced = fp8core.rms_norm_quant(values, weight, 1e-6)
    gated = fp8core.silu_and_mul_quant(values)
    for _ in range(2):
        for x_at, out_at in OFFSETS:
            x = at(torch, values.shape, values.dtype, x_at)
            x.copy_(values)
            y = layer(x, out=at(torch, want.shape, want.dtype, out_at))
            assert (y.float() - want.float()).norm() <= 0.01 * want.float().norm()
            data = at(torch, values.shape, torch.float8_e4m3fn, out_at)
            got = fp8core.rms_norm_quant(x, weight, 1e-6, out=data)
            assert torch.equal(got.data.view(torch.uint8), produced.data.view(torch.uint8))
            half = at(torch, (m, 256), torch.float8_e4m3fn, out_at)
            got = fp8core.silu_and_mul_quant(x, out=half)
            assert torch.equal(got.data.view(torch.uint8), gated.data.view(torch.uint8))


@pytest.mark.parametrize("engine", ["cupy", "torch"])
def test_misaligned_elements_are_refused(torch, engine):
    raw = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    if engine == "torch":
        with pytest.raises(RuntimeError, match="divisible"):
            raw[1:5].view(torch.float32)
        return
    cp = pytest.importorskip("cupy")
    base = cp.asarray(raw)
    scale = cp.ndarray((1,), cp.float32, base.data + 1)
    with pytest.raises(fp8core.LayoutError, match="scale needs"):
        fp8core.quantize(cp.asarray(x.float()), scale=scale)
    nowhere = cp.cuda.MemoryPointer(cp.cuda.UnownedMemory(0, 4, None, 0), 0)
    with pytest.raises(fp8core.LayoutError, match="scale needs memory, got address 0"):
        fp8core.quantize(cp.asarray(x.float()), scale=cp.ndarray((1,), cp.float32, nowhere))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_the_largest_magnitude_of_nothing_is_written(torch, shape):
    m, n = shape
    a = torch.zeros(m, 32, device="cuda").to(torch.float8_e4m3fn)
    b = torch.zeros(n, 32, device="cuda").to(torch.float8_e4m3fn)
    amax = torch.full((1,), 77.0, device="cuda")
    fp8core.scaled_mm_nt(a, b, 1.0, 1.0, amax=amax)
    assert amax.item() == 0.0
