"""Whole models: which layers are replaced, why others are not, and the way back."""

import math

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402 - after the skip
from torch.nn.utils import prune  # noqa: E402

import fp8core  # noqa: E402
from fp8core.errors import CheckpointError, DTypeError, LayoutError, ScaleError  # noqa: E402
from fp8core.torch import (  # noqa: E402
    Linear,
    Report,
    calibrate,
    compile_options,
    dequantize_model_,
    quantization_config,
    quantize_model_,
    warm_up,
)
from pytorch.models import Block, model, tokens  # noqa: E402
from pytorch.tensors import bits, wide  # noqa: E402


def test_what_is_replaced_and_what_stays():
    made = model()
    with torch.inference_mode():
        exact = made(tokens())
        report = quantize_model_(made)
        got = made(tokens())
    assert report.quantized == ("first.up", "first.down", "second.up", "second.down", "unused")
    assert report.kept == {
        "first.gate": "its name says router or gate",
        "second.gate": "its name says router or gate",
        "attention.out_proj": "it is a NonDynamicallyQuantizableLinear, not a Linear of torch.nn",
        "wide": "its weight is torch.float64",
        "hooked": "it has hooks",
        "lm_head": "its name says head or pooler",
        "twin": "it shares its weight with embed",
    }
    assert {name for name, module in made.named_modules() if isinstance(module, Linear)} == set(report.quantized)
    assert made.again is made.second
    assert 0 < (got - exact).norm() < 0.1 * exact.norm()


class Standing(torch.Tensor):
    """A tensor that stands for others, as DTensor does, which fully_shard makes of weights."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was called")


def standing(layer):
    layer._parameters["weight"] = torch.Tensor._make_wrapper_subclass(Standing, layer.weight.shape)


def without_parameter(layer):
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = weight


def with_a_buffer_as_bias(layer):
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)


def ignore(*_):
    return None


def sparse(layer):
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (nn.utils.spectral_norm, "it has hooks"),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), "it has hooks"),
        (without_parameter, "its weight is not a parameter"),
        (with_a_buffer_as_bias, "its bias is not a parameter"),
        (sparse, "its weight is torch.sparse_coo"),
        (lambda layer: layer.register_state_dict_pre_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_state_dict_post_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_load_state_dict_pre_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_load_state_dict_post_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_forward_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_full_backward_pre_hook(ignore), "it has hooks"),
        (lambda layer: layer.register_buffer("mask", torch.ones(2)), "it holds more than a weight and a bias"),
        (lambda layer: layer.add_module("observer", nn.Identity()), "it holds more than a weight and a bias"),
        (standing, "its weight is a Standing, not a tensor of its own: quantize before sharding"),
    ],
)
def test_layers_that_are_more_than_a_weight_and_a_bias_stay(change, reason):
    made = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    change(made[0])
    assert quantize_model_(made) == Report(("1",), {"0": reason})
    made[1](torch.zeros(2, 16))


def test_a_bias_that_is_a_buffer_is_that_of_the_layer_alone():
    linear = nn.Linear(32, 16)
    wanted = Linear.from_linear(linear)(torch.ones(2, 32))
    with_a_buffer_as_bias(linear)
    assert torch.equal(Linear.from_linear(linear)(torch.ones(2, 32)), wanted)


def test_layers_keep_their_values():
    made, exact = model(), model()
    quantize_model_(made, scheme="block")
    q = fp8core.quantize(exact.first.up.weight, group_shape=fp8core.BLOCK_128)
    assert bits(made.first.up.weight) == bits(q.data)
    assert bits(made.first.up.weight_scale) == bits(q.scale)
    assert torch.equal(made.first.up.bias, exact.first.up.bias)


def test_a_layer_in_two_places_stays_one():
    shared = nn.Linear(32, 32)
    made = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert quantize_model_(made).quantized == ("a",)
    assert isinstance(made["a"], Linear)
    assert made["a"] is made["b"][0]


@pytest.mark.parametrize(
    ("options", "quantized"),
    [
        ({"include": ["first.*"]}, ("first.up", "first.down", "first.gate")),
        ({"include": ["re:.*up$"]}, ("first.up", "second.up")),
        ({"include": ["*.up", "lm_head"], "exclude": ["second.*"]}, ("first.up", "lm_head")),
        ({"exclude": ["*down", "unused"]}, ("first.up", "second.up")),
    ],
)
def test_patterns_choose_the_layers_that_are_quantized(options, quantized):
    made = model()
    report = quantize_model_(made, **options)
    assert report.quantized == quantized
    layers = {name for name, module in made.named_modules() if isinstance(module, nn.Linear)}
    assert set(report.kept) == layers - set(quantized)


def test_quantizing_twice_is_quantizing_once():
    made = model()
    first = quantize_model_(made)
    second = quantize_model_(made)
    assert second.quantized == ()
    assert {second.kept[name] for name in first.quantized} == {"it is FP8 already"}


def test_transformer_encoders_read_their_weights_themselves():
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True).eval()
    made = nn.Sequential(layer, nn.Linear(32, 32))
    report = quantize_model_(made)
    assert report.quantized == ("1",)
    assert report.kept["0.linear1"] == "its TransformerEncoderLayer reads the weight itself"
    with torch.inference_mode():
        assert made(wide(2, 3, 32, dtype=torch.float32)).shape == (2, 3, 32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"input_scales": {"lm_head": 1.0}}, ScaleError, r"got 'lm_head': its name says head or pooler"),
        ({"input_scales": {"third": 1.0}}, ScaleError, "got 'third': the model has no such layer"),
        ({"input_scales": {"first.up": 0.0}}, ScaleError, "numbers above 0 that float32 holds, got 0.0 for 'first.up'"),
        ({"input_scales": {"second.up": 1.0}, "scheme": "block"}, ScaleError, "static needs the scheme"),
        ({"input_scales": 0.5}, ScaleError, "input_scales needs a mapping of layers to numbers, got 0.5"),
        ({"include": "first"}, CheckpointError, "include needs a list of patterns, got 'first'"),
        ({"scheme": "token"}, CheckpointError, "scheme needs one of"),
        ({"scheme": "token", "exclude": ["*"]}, CheckpointError, "scheme needs one of"),
    ],
)
def test_refusals_change_nothing(options, error, words):
    made = model()
    with pytest.raises(error, match=words):
        quantize_model_(made, **options)
    assert not any(isinstance(module, Linear) for module in made.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
def test_weights_that_are_not_finite_are_named_and_nothing_changes(value, scheme):
    made = model()
    with torch.no_grad():
        made.second.up.weight[3, 5] = value
    with pytest.raises(CheckpointError, match=r"second\.up\.weight needs finite values, got NaN or Inf"):
        quantize_model_(made, scheme=scheme)
    assert not any(isinstance(module, Linear) for module in made.modules())
    assert quantize_model_(made, scheme=scheme, exclude=["second.up"]).kept["second.up"].startswith("its name matches")


@pytest.mark.parametrize("model", ["x", None, nn.Linear, {"up": nn.Linear(4, 4)}], ids=["str", "none", "type", "dict"])
def test_what_is_no_model_is_refused_by_its_type(model):
    calls = [lambda x: calibrate(x, []), quantize_model_, dequantize_model_, quantization_config, warm_up]
    for call in calls if model is None else [*calls, compile_options]:  # of which None asks for options of any model
        with pytest.raises(DTypeError, match=rf"^model needs a torch\.nn\.Module, got {type(model).__name__}$"):
            call(model)


def test_a_layer_alone_is_refused():
    with pytest.raises(LayoutError, match="model needs to hold its layers"):
        quantize_model_(nn.Linear(8, 8))
    with pytest.raises(LayoutError, match="model needs to hold its layers"):
        dequantize_model_(Linear(8, 8))


def test_dequantize_model_gives_linear_layers_back():
    made = model()
    names = quantize_model_(made).quantized
    codes = {name: made.get_submodule(name) for name in names}
    assert dequantize_model_(made, torch.float32) == names
    for name, layer in codes.items():
        back = made.get_submodule(name)
        assert type(back) is nn.Linear
        wanted = fp8core.dequantize(layer.weight, layer.weight_scale, group_shape=fp8core.PER_CHANNEL)
        assert torch.equal(back.weight, wanted)
    assert made.again is made.second


def test_the_way_back_loses_no_hooks_and_no_forward():
    made = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    quantize_model_(made)
    hook = made[1].register_state_dict_post_hook(ignore)
    with pytest.raises(LayoutError, match="model needs layers without hooks, got some on 1: remove them first"):
        dequantize_model_(made)
    assert isinstance(made[0], Linear)
    hook.remove()
    made[1].forward = ignore
    with pytest.raises(LayoutError, match="model needs layers with the forward of their class, got another on 1"):
        dequantize_model_(made)
    assert isinstance(made[0], Linear)
    del made[1].forward
    assert dequantize_model_(made) == ("0", "1")


@pytest.mark.parametrize(
    ("dtype", "got"),
    [(None, "float64"), (torch.int8, "int8"), (torch.float8_e4m3fn, "float8"), ("bfloat16", "'bfloat16'")],
)
def test_the_way_back_is_refused_before_anything_is_replaced(dtype, got):
    made = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    quantize_model_(made)
    made[1].double()
    refused = f"dtype needs one of float32, float16, bfloat16, as a torch.dtype, got .*{got}"
    with pytest.raises(DTypeError, match=refused):
        dequantize_model_(made, dtype)
    with pytest.raises(DTypeError, match=refused):
        made[1].to_linear(dtype)
    with pytest.raises(DTypeError, match=refused):
        warm_up(made, dtype=dtype)
    assert isinstance(made[0], Linear)
    assert dequantize_model_(made, torch.float32) == ("0", "1")


def test_models_on_the_meta_device():
    with torch.device("meta"):
        made = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    filled = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 8))
    quantize_model_(made)
    quantize_model_(filled)
    made.load_state_dict(filled.state_dict(), assign=True)
    x = wide(3, 64, dtype=torch.float32)
    assert bits(made(x)) == bits(filled(x))


def test_warm_up_calls_every_layer_for_every_size():
    made = nn.Sequential(nn.Linear(64, 32, dtype=torch.bfloat16), nn.Linear(32, 8, dtype=torch.bfloat16))
    quantize_model_(made)
    called = []
    for layer in made:
        layer.register_forward_hook(lambda layer, args, _y: called.append((tuple(args[0].shape), args[0].dtype)))
    warm_up(made, rows=[1, 7])
    assert called == [((m, k), torch.bfloat16) for k in (64, 32) for m in (1, 7)]


def test_a_model_compiles_as_one_graph():
    torch._dynamo.reset()
    made = nn.Sequential(*(Block(64) for _ in range(3))).eval()
    quantize_model_(made)
    compiled = torch.compile(made, fullgraph=True, backend="aot_eager")
    for m in (1, 5, 16):
        x = wide(m, 64, dtype=torch.float32)
        with torch.inference_mode():
            assert bits(compiled(x)) == bits(made(x))
