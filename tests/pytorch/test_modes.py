"""Layers inside torch's modes: autocast, forward-mode derivatives; and in modules that copy them at every call."""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.autograd import forward_ad  # noqa: E402

import fp8core  # noqa: E402
from fp8core.errors import DeviceError, DTypeError, LayoutError  # noqa: E402
from fp8core.torch import GroupedLinear, Linear  # noqa: E402


def layers(dtype=torch.float32, **options):
    """A layer in FP8, and the one it was made of."""
    wide = nn.Linear(64, 32, dtype=dtype)
    return Linear.from_linear(wide, **options), wide


@pytest.fixture(autouse=True)
def no_graphs_left():
    """Leave no graphs behind: they count against a limit of torch's."""
    yield
    torch._dynamo.reset()


def run_eagerly(layer):
    return layer


def compiled(layer):
    return torch.compile(layer, backend="aot_eager", fullgraph=True)


ways = pytest.mark.parametrize("way", [run_eagerly, compiled])


@ways
@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("given", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_casts_inputs_as_it_does_for_torch_s_own_layers(own, given, way):
    layer, wide = layers(own)
    x = torch.randn(5, 64).to(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, wanted = way(layer)(x), wide(x)
    assert found.dtype == wanted.dtype == torch.bfloat16
    if own == torch.float16:
        layer.bfloat16()  # a bias in 16 bits is cast, too
    assert torch.equal(found, layer(x.bfloat16()))


@ways
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("own", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("auto", [None, torch.float16, torch.bfloat16])
def test_codes_give_the_dtype_of_the_layer_or_of_autocast(auto, own, bias, way):
    layer, _ = layers(own)
    layer.bias = nn.Parameter(torch.arange(32, dtype=own), requires_grad=False) if bias else None
    x = torch.randn(5, 64).to(auto or own)
    q = fp8core.quantize(x)
    with torch.autocast("cpu", dtype=auto, enabled=auto is not None):
        found = way(layer)(q)
    assert found.dtype == x.dtype
    assert torch.equal(found, layer.to(x.dtype)(x))


def test_gradients_inside_autocast_have_the_input_s_dtype():
    layer, _ = layers(torch.bfloat16)
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(x)
    result.float().sum().backward()
    assert x.grad.dtype == torch.float32
    wanted = torch.ones(5, 32, dtype=torch.bfloat16) @ layer.dequantized(torch.bfloat16)
    assert torch.equal(x.grad, wanted.float())


@ways
@pytest.mark.parametrize("trained", [False, True])
def test_autocast_takes_inputs_that_are_copied_first_with_any_bias(trained, way):
    layer, _ = layers(torch.float16)
    x = torch.randn(64, 5).t().requires_grad_(trained)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = way(layer)(x)
    assert torch.equal(found, layer.bfloat16()(x.detach().bfloat16()))


@ways
def test_autocast_that_is_off_or_of_another_device_changes_nothing(way):
    layer, _ = layers()
    x = torch.randn(5, 64)
    wanted = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        found = way(layer)(x)
    assert found.dtype == torch.float32
    assert torch.equal(found, wanted)
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast does where there is a GPU
    try:
        assert torch.equal(way(layer)(x), wanted)
        with pytest.raises(Exception, match="bias needs the dtype of the result, bfloat16, or float32, got float16"):
            way(layer.half())(x.bfloat16())
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_input_without_memory_is_refused_inside_autocast_as_outside(device):
    layer, _ = layers()
    x = torch.randn(5, 64, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(DeviceError, match=r"needs memory of .* got meta"):
        layer.to(device)(x)


@pytest.mark.parametrize("of", ["x", "bias", "both"])
@pytest.mark.parametrize("scheme", ["channel", "block"])
def test_forward_mode_gives_what_backward_gives(scheme, of):
    layer, _ = layers(scheme=scheme)
    x, direction, weights = torch.randn(5, 64), torch.randn(5, 64), torch.randn(5, 32)
    of_bias = torch.randn(32)
    want = torch.zeros(())
    layer.bias.requires_grad_()
    leaf = x.clone().requires_grad_()
    (layer(leaf) * weights).sum().backward()
    if of != "bias":
        want = want + (leaf.grad * direction).sum()
    if of != "x":
        want = want + (layer.bias.grad * of_bias).sum()
    bias = layer.bias.detach()
    with forward_ad.dual_level():
        given = x if of == "bias" else forward_ad.make_dual(x, direction)
        own = {} if of == "x" else {"bias": forward_ad.make_dual(bias, of_bias)}
        result = forward_ad.unpack_dual(torch.func.functional_call(layer, own, (given,)))
        assert torch.equal(result.primal, layer(x).detach())
        assert torch.allclose((result.tangent * weights).sum(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("of", ["x", "bias", "both"])
def test_forward_mode_gives_derivatives_of_the_result_s_dtype(of):
    layer, _ = layers()  # whose bias is float32
    x, bias = torch.randn(5, 64).bfloat16(), layer.bias.detach()
    with forward_ad.dual_level():
        given = x if of == "bias" else forward_ad.make_dual(x, torch.ones_like(x))
        own = {} if of == "x" else {"bias": forward_ad.make_dual(bias, torch.ones_like(bias))}
        result = forward_ad.unpack_dual(torch.func.functional_call(layer, own, (given,)))
    assert result.primal.dtype == result.tangent.dtype == torch.bfloat16


def test_forward_mode_of_a_compiled_layer_is_refused():
    layer, _ = layers()
    x = torch.randn(5, 64)
    words = r"x needs to be outside of .* dual levels|Attempted to wrap a dual tensor"  # torch 2.14 refuses it itself
    with forward_ad.dual_level(), pytest.raises(Exception, match=words):
        compiled(layer)(forward_ad.make_dual(x, x))


def test_data_parallel_is_refused_in_words():
    with pytest.raises(LayoutError, match="use DistributedDataParallel"):
        layers()[0]._replicate_for_data_parallel()


def test_an_array_of_another_framework_meets_the_layer_as_it_meets_the_functions():
    layer, _ = layers()
    x = torch.randn(5, 64)
    assert (layer(x.numpy()) == layer(x).numpy()).all()


@pytest.mark.parametrize("name", ["weight", "weight_scale", "input_scale"])
def test_what_a_loader_has_cast_is_named_when_the_layer_is_moved(name):
    layer, _ = layers(input_scale=0.5)
    parameter = getattr(layer, name)
    parameter.data = parameter.data.to(torch.bfloat16)
    with pytest.raises(DTypeError, match=f"{name} needs .*, got bfloat16"):
        layer.to("cpu")


@ways
@pytest.mark.parametrize("options", [{}, {"scheme": "tensor", "input_scale": 0.5}], ids=["dynamic", "static"])
def test_codes_without_a_scale_are_refused(options, way):
    """As of a model that casts inputs to the weight's dtype: they are no codes of the layer's scale."""
    layer, _ = layers(**options)
    x = torch.randn(5, 64).to(layer.weight.dtype)
    with pytest.raises(Exception, match=r"input needs .* or a Quantized, got float8_e4m3fn without its scale"):
        way(layer)(x)


@pytest.mark.parametrize(
    "derivative",
    [
        lambda layer, x: torch.func.grad(lambda x: layer(x).sum())(x),
        lambda layer, x: torch.func.jacrev(layer)(x),
        lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
    ],
    ids=["grad", "jacrev", "jvp"],
)
def test_derivatives_of_torch_func_name_x_and_what_to_call_instead(derivative):
    layer, _ = layers()
    with pytest.raises(LayoutError, match=r"x needs to be outside of torch.func's derivatives: .* by backward\(\)"):
        derivative(layer, torch.randn(3, 64))


@pytest.mark.parametrize("kind", ["layer", "grouped"])
def test_derivatives_of_a_batch_by_torch_func_name_x(kind):
    layer, offs = layers()[0], torch.tensor([3], dtype=torch.int32)
    experts = GroupedLinear.from_weight(torch.randn(1, 32, 64))
    call = layer if kind == "layer" else lambda x: experts(x, offs)
    with pytest.raises(LayoutError, match=r"x needs to be outside of torch\.func's vmap: pass a batch as the leading"):
        torch.func.vmap(torch.func.grad(lambda x: call(x).sum()))(torch.randn(2, 3, 64))


def test_the_derivative_of_a_bias_by_torch_func_is_refused():
    layer, _ = layers()
    own, x = dict(layer.named_parameters()), torch.randn(3, 64)
    with pytest.raises(LayoutError, match=r"bias needs memory of its own, got a tensor of torch\.func's"):
        torch.func.grad(lambda bias: torch.func.functional_call(layer, {**own, "bias": bias}, x).sum())(own["bias"])
