"""`GroupedLinear` on a GPU: a `Linear` for each group, also captured into a graph, with other ends at each replay."""

import pytest

torch = pytest.importorskip("torch")

from fp8core.torch import GroupedLinear  # noqa: E402 - after the skip
from pytorch.layers import grouped_and_single  # noqa: E402

pytestmark = pytest.mark.gpu
GROUPS, N, K, ROWS = 5, 392, 528, 300
NEAR = 2**-7 + 4e-3
"""Of the largest result: the distance of neighbours in bfloat16, and what fast accumulation may differ by."""


def made(scheme, static):
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(GROUPS, N, K, generator=generator).to("cuda", torch.bfloat16)
    return grouped_and_single(wide, scheme, static)


def check(found, layers, x, offs):
    begin = 0
    for layer, end in zip(layers, offs.tolist(), strict=True):
        if end > begin:
            wanted = layer(x[begin:end]).float()
            assert float((found[begin:end].float() - wanted).abs().max()) <= NEAR * float(wanted.abs().max())
        begin = end


@pytest.mark.parametrize(("scheme", "static"), [("channel", False), ("channel", True), ("block", False)])
def test_each_group_is_a_layer_in_a_graph_too(scheme, static):
    grouped, layers = made(scheme, static)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16)
    offs = torch.tensor([7, 7, 140, 141, 300], dtype=torch.int32, device="cuda")
    with torch.no_grad():
        check(grouped(x, offs), layers, x, offs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # nothing waits for the ends
            result = grouped(x, offs)
        for ends in ([0, 3, 64, 200, 290], [300] * 5, [1, 2, 3, 4, 5]):
            result.fill_(float("nan"))
            x.copy_(torch.randn_like(x))
            offs.copy_(torch.tensor(ends, dtype=torch.int32))
            graph.replay()
            check(result, layers, x, offs)
            assert result[ends[-1] :].isnan().all()


def test_gradients_are_those_of_the_layers():
    grouped, layers = made("channel", False)
    offs = torch.tensor([7, 7, 140, 141, 299], dtype=torch.int32, device="cuda")
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(ROWS, N, device="cuda", dtype=torch.bfloat16)
    grouped(x, offs).backward(grad)
    begin = 0
    for layer, end in zip(layers, offs.tolist(), strict=True):
        wanted = grad[begin:end].float() @ layer.dequantized(torch.float32)
        assert end == begin or float((x.grad[begin:end].float() - wanted).abs().max()) <= NEAR * float(
            wanted.abs().max()
        )
        begin = end
    assert not x.grad[begin:].any()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_gives_the_same_bits(backend):
    grouped, _ = made("block", False)
    offs = torch.tensor([7, 7, 140, 141, 300], dtype=torch.int32, device="cuda")
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(grouped, fullgraph=True, backend=backend)
    with torch.no_grad():
        assert torch.equal(compiled(x, offs), grouped(x, offs))


def test_moved_layers():
    grouped, _ = made("channel", False)
    x, offs = torch.randn(3, K, dtype=torch.bfloat16), torch.tensor([1, 1, 2, 3, 3], dtype=torch.int32)
    with torch.no_grad():
        there = grouped(x.cuda(), offs.cuda()).cpu()
        assert {parameter.device.type for parameter in grouped.cpu().parameters()} == {"cpu"}
        here = grouped(x, offs)
    assert float((here - there).abs().max()) <= NEAR * float(here.abs().max())
    narrow = GroupedLinear.from_weight(torch.randn(3, 24, 40)).cuda()  # 40 bytes: rows are padded
    assert narrow.weight.stride() == (24 * 48, 48, 1)
