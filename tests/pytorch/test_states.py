"""States: what `load_state_dict` refuses, what it loads with a warning, and parameters that torch swaps to load one."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip

from fp8core.torch import Linear  # noqa: E402
from fp8core.torch.adjacent import ADJACENT  # noqa: E402
from fp8core.torch.joining import join_  # noqa: E402
from pytorch.layers import quantized  # noqa: E402
from pytorch.tensors import K, N, bits, wide  # noqa: E402


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("weight", torch.uint8, r"weight needs torch\.float8_e4m3fn, got torch\.uint8$"),
        ("weight", torch.float8_e4m3fnuz, r"weight needs torch\.float8_e4m3fn, got torch\.float8_e4m3fnuz$"),
        ("weight_scale", torch.uint8, r"weight_scale needs a floating-point dtype, got torch\.uint8$"),
    ],
)
def test_codes_of_another_kind_and_integers_as_scales_are_refused(name, wrong, words):
    """uint8 scales hold exponents: 120, which is 2**-7, was read as a scale of 120."""
    layer = quantized("channel", None)
    state = layer.state_dict()
    before = {key: bits(tensor) for key, tensor in state.items()}
    state[name] = torch.full(state[name].shape, 120, dtype=torch.uint8).view(wrong)
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict(state)
    assert {key: bits(tensor) for key, tensor in layer.state_dict().items()} == before


@pytest.mark.parametrize("name", ["weight", "weight_scale"])
def test_what_is_no_tensor_is_refused_in_the_words_of_torch(name):
    layer = quantized("channel", None)
    state = layer.state_dict()
    state[name] = state[name].tolist()
    with pytest.raises(RuntimeError, match=r"expected torch\.Tensor or Tensor-like object"):
        layer.load_state_dict(state)


@pytest.mark.parametrize(
    ("name", "scale", "words"),
    [
        ("input_scale", torch.ones(1), r"Unexpected key\(s\) in state_dict: \"input_scale\""),
        ("weight_scale", torch.ones(1, N), rf"size mismatch for weight_scale: .*\[1, {N}\]"),
    ],
)
def test_scales_of_another_kind_of_layer_are_refused_in_the_words_of_torch(name, scale, words):
    layer = quantized("channel", None)
    with pytest.raises(RuntimeError, match=words):
        layer.load_state_dict({**layer.state_dict(), name: scale})


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("name", "other"), [("weight", "weight_scale"), ("weight_scale", "weight")])
def test_half_of_a_weight_is_loaded_with_a_warning(name, other, assign):
    """The other half may be in the next shard; if it is in none, the layer multiplies by a weight that nobody stored."""
    model, x = torch.nn.Sequential(Linear(K, N, dtype=torch.bfloat16)), wide(5, K)
    state = {f"0.{key}": tensor for key, tensor in quantized("channel", None).state_dict().items()}
    rest = {key: state.pop(key) for key in list(state) if key == f"0.{other}"}
    with pytest.warns(RuntimeWarning, match=rf"^0\.{name} was loaded without 0\.{other}: wrong results unless the old"):
        found = model.load_state_dict(state, strict=False, assign=assign)
    assert found.missing_keys == [f"0.{other}"]
    with pytest.warns(RuntimeWarning, match=rf"^0\.{other} was loaded without 0\.{name}"):
        model.load_state_dict(rest, strict=False, assign=assign)
    assert bits(model(x)) == bits(quantized("channel", None)(x))


def test_a_state_without_both_halves_of_a_weight_is_loaded_silently(recwarn):
    layer = quantized("channel", None)
    before = bits(layer.weight)
    layer.load_state_dict({"bias": torch.ones(N)}, strict=False)
    assert bits(layer.weight) == before
    assert not recwarn.list


@pytest.fixture
def swapping():
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("used", ["pickled", "compiled", "joined"])
def test_parameters_are_swapped_whatever_was_done_with_them_before(swapping, used):
    """torch swaps no tensor that anything refers to weakly."""
    torch._dynamo.reset()
    model = nn.Sequential(*[Linear.from_linear(nn.Linear(K, K, bias=False)) for _ in range(2)])
    x = wide(3, K, dtype=torch.float32)
    want = bits(model(x))

    def use():
        if used == "pickled":
            pickle.dumps(model)
        elif used == "compiled":
            with torch.no_grad():
                torch.compile(model, backend="aot_eager")(x)
        else:
            join_(model)
            ADJACENT.as_one([layer.weight for layer in model])

    use()
    parameters = list(model.parameters())
    model.bfloat16()
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    use()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert bits(model(x)) == want


@pytest.mark.parametrize("write", [lambda layer: layer.load_state_dict(layer.state_dict()), lambda layer: layer.half()])
def test_a_layer_is_prepared_anew_once_torch_has_written_its_parameters(write):
    """Kernels may read a weight early that only fp8core writes; torch announces no writes."""
    layer, x = quantized("channel", None), wide(5, K)
    layer(x)
    assert layer._prepared is not None
    write(layer)
    assert layer._prepared is None
