"""Layers with something else in the place of a parameter: parametrizations and pruning, as torch.nn.utils has them."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.nn.utils import parametrize, prune  # noqa: E402

import fp8core.torch  # noqa: E402
from fp8core.torch.joining import join_  # noqa: E402
from pytorch.layers import KINDS, quantized  # noqa: E402
from pytorch.tensors import K, N, bits, wide  # noqa: E402

NAMES = "weight", "weight_scale", "input_scale", "bias"


class Doubled(nn.Module):
    """Doubles what it is given: of codes as bytes, as they are left alone."""

    def forward(self, x):
        return x.clone() if x.itemsize == 1 else 2 * x


@pytest.mark.parametrize(
    ("scheme", "input_scale", "name"),
    [(*kind, name) for kind in KINDS for name in NAMES if name != "input_scale" or kind[1] is not None],
)
@pytest.mark.parametrize("grad", [False, True])
def test_a_parametrization_says_what_a_parameter_is(scheme, input_scale, name, grad):
    layer, twin, x = quantized(scheme, input_scale), quantized(scheme, input_scale), wide(5, K)
    with torch.no_grad():
        getattr(twin, name).copy_(Doubled()(getattr(twin, name)))
    layer(x)
    parametrize.register_parametrization(layer, name, Doubled())
    with torch.set_grad_enabled(grad):
        for made in (layer, copy.deepcopy(layer)):
            assert bits(made(x)) == bits(twin(x))
    parametrize.remove_parametrizations(layer, name)
    assert bits(layer(x)) == bits(twin(x))


@pytest.mark.parametrize("name", NAMES)
def test_a_parametrization_is_compiled(name):
    layer, x = quantized("channel", 0.03), wide(5, K)
    parametrize.register_parametrization(layer, name, Doubled())
    torch.compiler.reset()
    assert bits(torch.compile(layer, fullgraph=True, backend="eager")(x)) == bits(layer(x))


def test_gradients_flow_to_what_a_bias_is_made_of():
    layer, x = quantized("channel", None), wide(5, K)
    layer.bias.requires_grad_()
    parametrize.register_parametrization(layer, "bias", Doubled())
    layer(x).sum().backward()
    assert torch.equal(layer.parametrizations.bias.original.grad, torch.full((N,), 10, dtype=layer.bias.dtype))


def test_a_pruned_bias_is_taken():
    layer, x = quantized("channel", None), wide(5, K)
    prune.l1_unstructured(layer, "bias", amount=0.5)
    assert (layer.bias == 0).sum() == N // 2
    alone = quantized("channel", None)
    alone.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
    assert bits(layer(x)) == bits(alone(x))
    assert torch.equal(layer.to_linear().bias, alone.bias)


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_layers_that_are_parametrized_are_not_joined(name):
    model = nn.ModuleList(nn.Linear(256, 128, bias=False) for _ in range(3))
    fp8core.torch.quantize_model_(model)
    parametrize.register_parametrization(model[1], name, Doubled())
    assert join_(model) == (("0", "2"),)
