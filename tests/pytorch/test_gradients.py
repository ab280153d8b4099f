"""Gradients through FP8 layers: straight to inputs, to biases where they require them, and to adapters."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.utils.checkpoint import checkpoint  # noqa: E402

import fp8core  # noqa: E402
from pytorch.layers import WEIGHT_GROUPS, expected, kinds, original, quantized  # noqa: E402
from pytorch.tensors import K, N, bits, wide  # noqa: E402


@kinds
def test_gradients_go_straight_through(scheme, input_scale):
    layer, x, grad = quantized(scheme, input_scale), wide(5, K).requires_grad_(), wide(5, N, seed=9)
    y = layer(x)
    assert bits(y) == bits(expected(scheme, input_scale, x))
    y.backward(grad)
    weight = fp8core.dequantize(
        layer.weight, layer.weight_scale, group_shape=WEIGHT_GROUPS[scheme], dtype=torch.bfloat16
    )
    assert torch.equal(x.grad, grad @ weight)
    exact = original()
    twin = wide(5, K).requires_grad_()
    exact(twin).backward(grad)
    assert torch.cosine_similarity(x.grad.float().flatten(), twin.grad.float().flatten(), 0) > 0.99
    assert layer.weight.grad is None


def test_gradients_of_the_bias_where_it_is_made_to_require_them():
    layer, exact, grad = quantized("channel", None), original(), wide(2, 3, N, seed=9)
    layer.bias.requires_grad_()
    layer(wide(2, 3, K)).backward(grad)
    exact(wide(2, 3, K)).backward(grad)
    assert layer.bias.grad.dtype == torch.bfloat16
    torch.testing.assert_close(layer.bias.grad, exact.bias.grad, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 0, K), (2, 3, K)], ids=str)
@pytest.mark.parametrize("n", [0, N])
def test_the_bias_has_a_gradient_for_inputs_and_results_of_any_extents(n, shape, compiled):
    torch._dynamo.reset()
    layer, exact = (kind(K, n, dtype=torch.float32) for kind in (fp8core.torch.Linear, nn.Linear))
    layer.bias.requires_grad_()
    for one in (torch.compile(layer, fullgraph=True, backend="aot_eager") if compiled else layer, exact):
        one(wide(*shape, dtype=torch.float32)).sum().backward()
    assert torch.equal(layer.bias.grad, exact.bias.grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_gradient_of_a_float32_bias_is_summed_in_float32(dtype):
    """float16 does not hold 4,096 * 100."""
    layer, grad = fp8core.torch.Linear(K, N, dtype=torch.float32), wide(4096, N, dtype=dtype) + 100
    layer.bias.requires_grad_()
    layer(wide(4096, K, dtype=dtype)).backward(grad)
    torch.testing.assert_close(layer.bias.grad, grad.double().sum(0).float(), rtol=1e-5, atol=0)


def test_gradients_are_those_of_the_layer_that_was_called():
    layer, grad, x = quantized("channel", None), wide(5, N, seed=9), wide(5, K).requires_grad_()
    bias = layer.bias.requires_grad_()
    wanted = grad @ layer.dequantized(torch.bfloat16)
    y = layer(x)
    other = quantized("block", None)
    layer.scheme, layer.weight, layer.weight_scale, layer.bias = "block", other.weight, other.weight_scale, None
    y.backward(grad)
    assert torch.equal(x.grad, wanted)
    assert torch.equal(bias.grad, grad.sum(0))


@pytest.mark.parametrize("compiled", [False, True])
def test_the_bias_has_a_gradient_beside_inputs_that_are_quantized_already(compiled):
    layer, x, grad = quantized("channel", None), wide(5, K), wide(5, N, seed=9)
    layer.bias.requires_grad_()
    q = fp8core.quantize(x)

    def run(codes, scale):
        return layer(fp8core.Quantized(codes, scale, q.group_shape))

    y = (torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run)(*q)
    assert bits(y) == bits(layer(x))
    y.backward(grad)
    assert torch.equal(layer.bias.grad, grad.sum(0))


@kinds
def test_compiled_bits_and_gradients(scheme, input_scale):
    torch._dynamo.reset()
    layer, grad = quantized(scheme, input_scale), wide(5, N, seed=9)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x, twin = wide(5, K).requires_grad_(), wide(5, K).requires_grad_()
    assert bits(compiled(x)) == bits(layer(twin))
    compiled(x).backward(grad)
    layer(twin).backward(grad)
    assert torch.equal(x.grad, twin.grad)
    with torch.no_grad():
        assert bits(compiled(wide(16, K))) == bits(layer(wide(16, K)))


@kinds
@pytest.mark.parametrize("checkpointed", [False, True])
def test_layers_one_after_the_other_in_a_dynamic_graph(checkpointed, scheme, input_scale):
    """Each is a subgraph, and no subgraph takes what torch.compile has made an input of another, as numbers were."""
    torch._dynamo.reset()
    layers = [quantized(scheme, input_scale, dtype=torch.float32) for _ in range(2)]

    def run(x):
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
            x = torch.nn.functional.pad(x, (0, K - N))
        return x

    compiled, sizes = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager"), (5, 16)
    for rows in sizes:
        x, twin = (
            wide(rows, K, dtype=torch.float32).requires_grad_(),
            wide(rows, K, dtype=torch.float32).requires_grad_(),
        )
        assert bits(compiled(x)) == bits(run(twin))
        compiled(x).sum().backward()
        run(twin).sum().backward()
        assert torch.equal(x.grad, twin.grad)


def test_lora_trains_on_a_frozen_base():
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base
            self.down, self.up = nn.Linear(K, 4, bias=False), nn.Linear(4, N, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    torch.manual_seed(0)
    base = quantized("channel", None, dtype=torch.float32)
    before = bits(list(base.parameters()))
    model = nn.Sequential(nn.Linear(K, K), Adapted(base))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x, target = wide(32, K, dtype=torch.float32), wide(32, N, dtype=torch.float32, seed=5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        for trained in (model[0].weight, model[1].up.weight):
            assert trained.grad is not None
            assert trained.grad.abs().sum() > 0
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert bits(list(base.parameters())) == before
