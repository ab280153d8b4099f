"""Weights of layers in graphs: a history for each, as long as it lasts; on a GPU what was written to it is read."""

import gc

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

import fp8core  # noqa: E402
from fp8core.torch import Linear, frozen, operators  # noqa: E402
from fp8core.torch.histories import Histories  # noqa: E402
from pytorch.tensors import bits, wide  # noqa: E402

K = 512


def layer_on(device, seed=0):
    linear = nn.Linear(K, K, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        linear.weight.copy_(wide(K, K, seed=seed))
    return Linear.from_linear(linear.to(device))


def test_a_history_lasts_as_long_as_its_tensor():
    known = Histories()
    tensors = [torch.zeros(1) for _ in range(3)]
    made = [known.of(tensor) for tensor in tensors]
    assert len(set(map(id, made))) == len(known) == 3
    assert [known.of(tensor) for tensor in tensors] == made
    del tensors[1]
    assert len(known) == 2
    for _ in range(50):  # numbers are used again
        assert known.of(torch.zeros(1)) not in made
    assert len(known) == 2


def test_a_tensor_has_the_history_of_no_other_one_whose_number_it_got():
    """The notice that a tensor is gone may come late, where another thread frees it."""
    known = Histories()
    first, second = torch.zeros(1), torch.zeros(1)
    old = known.of(first)
    stale = known._known[id(second)] = known._known[id(first)]
    made = known.of(second)
    assert made is not old
    known._forget(id(second), stale[0])
    assert known.of(second) is made


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_graph_meets_the_same_weights_again(backend, monkeypatch):
    torch._dynamo.reset()
    known = Histories()
    for module in (operators, frozen):
        monkeypatch.setattr(module, "HISTORIES", known)
    model = nn.Sequential(layer_on("cpu"), nn.SiLU(), layer_on("cpu"))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        for _ in range(3):
            compiled(wide(2, K))
            assert len(known) == 2
        weight = model[0].weight
        model._apply(torch.Tensor.clone)  # as any move: the parameters stay, and their memory is new
        assert model[0].weight is weight
        assert len(known) == 0
        compiled(wide(2, K))
        assert len(known) == 2
    del model, compiled, weight
    torch._dynamo.reset()
    gc.collect()
    assert len(known) == 0


@pytest.mark.gpu
def test_what_is_written_to_a_weight_is_read():
    torch._dynamo.reset()
    layers = [layer_on("cuda", seed) for seed in range(2)]
    model = nn.Sequential(*layers)
    compiled = torch.compile(model, fullgraph=True)
    x = wide(1, K).cuda()
    with torch.no_grad():
        for seed in range(2, 8):
            assert bits(compiled(x)) == bits(model(x))
            new = wide(K, K, seed=seed).cuda()
            fp8core.quantize(new, out=(layers[1].weight, layers[1].weight_scale))  # by a kernel of the library
            assert bits(compiled(x)) == bits(model(x))
            layers[0].weight.copy_(layers[1].weight)  # and by one of torch
            layers[0].weight_scale.copy_(layers[1].weight_scale)


@pytest.mark.gpu
def test_what_a_recorded_graph_writes_to_a_weight_is_read():
    torch._dynamo.reset()
    layer = layer_on("cuda")
    compiled = torch.compile(layer, fullgraph=True)
    x, new = wide(1, K).cuda(), wide(K, K, seed=1).cuda()

    def step():
        fp8core.quantize(new, out=(layer.weight, layer.weight_scale))
        return compiled(x)

    with torch.no_grad():
        step(), step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = step()
        for seed in range(2, 6):
            new.copy_(wide(K, K, seed=seed))
            graph.replay()
            wanted = fp8core.linear(x, fp8core.quantize(new))
            assert bits(result) == bits(wanted)
