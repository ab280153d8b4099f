"""Loaded models: layers that transformers made of FP8 checkpoints, without its look for a GPU; experts put apart."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402 - after the skips
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer  # noqa: E402

from fp8core.errors import CheckpointError, LayoutError  # noqa: E402
from fp8core.torch import Linear, calibrate, dequantize_model_, quantize_model_  # noqa: E402
from fp8core.transformers import (  # noqa: E402
    Experts,
    GroupedExperts,
    convert_,
    from_pretrained,
    group_experts_,
    split_experts_,
)
from fp8core.transformers.experts import Layout  # noqa: E402
from fp8core.transformers.stored import store_scales_  # noqa: E402
from huggingface import cases  # noqa: E402
from huggingface.cases import (  # noqa: E402
    TOKENS,
    config_of,
    differing,
    distance,
    logits,
    random_model,
    same,
    tensors_of,
    written,
)
from huggingface.foreign_layers import channelwise, of_compressed_tensors, of_fbgemm  # noqa: E402
from support import checkpoint_formats as formats  # noqa: E402


@pytest.mark.parametrize(
    ("writer", "kind"),
    [
        (formats.deepseek, "llama"),
        (formats.deepseek_powers, "llama"),
        (formats.hf_static, "llama"),
        (formats.deepseek, "qwen3_moe"),
        (formats.deepseek_powers, "qwen3_moe"),
    ],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_models_that_transformers_loaded(writer, kind, tmp_path, monkeypatch):
    monkeypatch.setitem(cases.EXPERTS, "moe_intermediate_size", 128)  # transformers takes multiples of 128 only
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda *_, **__: None)
    written(kind, tmp_path / "wide")
    out = formats.write_format(writer, tmp_path / "fp8", tensors_of(tmp_path / "wide"), config_of(tmp_path / "wide"))
    ours, model = (read(tmp_path / "fp8") for read in (from_pretrained, AutoModelForCausalLM.from_pretrained))
    wanted = logits(ours)
    assert any(isinstance(module, finegrained_fp8.FP8Linear) for module in model.modules())
    held = {x.dtype for name, x in model.state_dict().items() if "scale" in name}
    names = convert_(model)
    assert {f"{name}.weight" for name in names} == out.expected.keys()
    assert any(isinstance(module, GroupedExperts) for module in model.modules()) == (kind == "qwen3_moe")
    found = logits(model)
    assert torch.equal(found, wanted)
    assert convert_(model) == ()
    assert model.quantization_method == ours.quantization_method
    assert type(model.config.quantization_config) is type(ours.config.quantization_config)
    assert model.hf_quantizer.pre_quantized
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert not any(x.requires_grad for layer in layers for x in layer.parameters())

    model.save_pretrained(tmp_path / "again")
    saved = tensors_of(tmp_path / "again")
    assert saved.keys() == out.tensors.keys()
    for name, stored in out.tensors.items():  # transformers keeps powers of two as such
        assert same(saved[name].to(stored.dtype), stored), name
    assert {x.dtype for name, x in saved.items() if "scale" in name} == held
    assert config_of(tmp_path / "again")["quantization_config"]["quant_method"] == "fp8"
    assert torch.equal(logits(from_pretrained(tmp_path / "again")), found)

    if kind == "qwen3_moe":
        with pytest.raises(LayoutError, match=r"got the grouped layers model\.layers\.0\S+: \S+ separates those"):
            dequantize_model_(model)
        assert set(split_experts_(model)) < set(names)
    dequantize_model_(model)
    with pytest.raises(CheckpointError, match=r"needs model\.layers\.\S+ in FP8, .* its own dequantize"):
        model.save_pretrained(tmp_path / "dequantized")


@pytest.mark.parametrize("made_by", [of_fbgemm, of_compressed_tensors])
@pytest.mark.parametrize("k", [64, 48], ids=["wide", "square"])
def test_layers_of_other_methods(made_by, k):
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
    codes, scale, values = channelwise(k=k)
    model.layers[0].mlp.up_proj = made_by(codes, scale)
    assert convert_(model) == ("layers.0.mlp.up_proj",)
    layer = model.layers[0].mlp.up_proj
    assert isinstance(layer, Linear)
    assert layer.weight.data_ptr() == codes.data_ptr()
    assert torch.equal(layer.dequantized(torch.float32), values)
    state = model.state_dict()
    store_scales_(model, state)
    assert same(state["layers.0.mlp.up_proj.weight_scale"], scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_have_the_dtype_of_what_is_not_fp8_whatever_comes_first(dtype):
    codes, scale, _ = channelwise()
    model = nn.Sequential(of_fbgemm(codes, scale), nn.Module(), nn.LayerNorm(48, dtype=dtype))
    model[1].counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    assert convert_(model) == ("0",)
    assert model[0].compute_dtype == dtype


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_zero_points_of_zero_are_dropped(dtype):
    """compressed-tensors gives them to layers of symmetric schemes, too."""
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]))
    model[0].weight_zero_point = nn.Parameter(torch.zeros(48, 1).to(dtype), requires_grad=False)
    assert convert_(model) == ("0",)
    assert set(model.state_dict()) == {"0.weight", "0.weight_scale"}


def test_layers_that_are_converted_already_keep_their_hooks():
    model = nn.Sequential(of_fbgemm(*channelwise()[:2]))
    assert convert_(model) == ("0",)
    model[0].register_forward_hook(lambda *_: None)
    assert convert_(model) == ()


def test_grouped_layers_keep_their_hooks():
    model = random_model("qwen3_moe")
    split_experts_(model)
    quantize_model_(model)
    (name, *_) = group_experts_(model)
    model.get_submodule(name).down_proj.register_forward_hook(lambda *_: None)
    assert convert_(model) == ()


def test_static_scales_of_stacked_experts_are_those_of_each():
    model = random_model("qwen3_moe")
    experts = finegrained_fp8.FP8Experts(model.config, None, "static")
    for parameter in experts.parameters():
        parameter.requires_grad_(False).copy_(torch.rand(parameter.shape) + 0.5)
    model.model.layers[1].mlp.experts = experts
    held = {name: x.clone() for name, x in experts.named_parameters()}
    convert_(model)
    split_experts_(model)
    for at, expert in enumerate(model.model.layers[1].mlp.experts):
        for role, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            codes = held[role][at].chunk(len(parts))
            scales = held[f"{role}_scale_inv"][at].chunk(len(parts))
            for part, rows, scale in zip(parts, codes, scales, strict=True):
                layer = expert.get_submodule(part)
                assert same(layer.weight, rows)
                assert layer.weight_scale.item() == scale.item()
                assert layer.input_scale.item() == held[f"{role}_activation_scale"][at].item()


def test_scales_that_no_layer_has():
    from transformers import LlamaConfig, LlamaModel

    model = LlamaModel(LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
    codes, _, _ = channelwise()
    model.layers[0].mlp.up_proj = of_fbgemm(codes, torch.ones(3, 5))
    with pytest.raises(
        CheckpointError, match=r"up_proj needs scales per tensor, per channel or by blocks of 128x128, got \[3, 5"
    ):
        convert_(model)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_experts_of_a_loaded_model_are_calibrated_and_quantized(kind, tmp_path):
    written(kind, tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    wanted, before = logits(model), calibrate(model, [TOKENS])
    names = split_experts_(model)
    assert len(names) == 3 * 4 * (1 if kind == "deepseek_v3" else 2)
    assert split_experts_(model) == ()
    assert all(type(model.get_submodule(name)) is torch.nn.Linear for name in names)
    assert distance(logits(model), wanted) < 0.02

    model.save_pretrained(tmp_path / "split")
    stored, saved = tensors_of(tmp_path / "wide"), tensors_of(tmp_path / "split")
    assert stored.keys() == saved.keys()
    assert differing(stored, saved, model) == []

    scales = calibrate(model, [TOKENS, TOKENS.flip(1)])
    assert before.keys() < scales.keys()
    assert scales.keys() - before.keys() <= set(names), "experts that no token was sent to have none"
    report = quantize_model_(model, scheme="tensor", input_scales=scales)
    assert set(names) < set(report.quantized)
    layers = {name: model.get_submodule(name) for name in report.quantized}
    assert {name for name, layer in layers.items() if layer.input_scale is not None} == scales.keys()
    group_experts_(model)  # as from_pretrained does, those of which each has a static scale or none
    found = logits(model)
    assert 0.001 < distance(found, wanted) < 0.15
    model.save_pretrained(tmp_path / "fp8")
    assert torch.equal(logits(from_pretrained(tmp_path / "fp8")), found)


def test_experts_that_stay_stacked():
    model = random_model("llama")
    assert split_experts_(model) == ()
    config = GptOssConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2, vocab_size=64,
        num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    assert split_experts_(GptOssForCausalLM(config)) == ()  # biases, and weights that are transposed


@pytest.mark.parametrize("change", [convert_, split_experts_])
def test_what_is_replaced_keeps_the_hook_that_brings_its_inputs(change):
    """As accelerate gives it to the layers of a model on several devices."""
    hooks = pytest.importorskip("accelerate.hooks")
    model = random_model("qwen3_moe") if change is split_experts_ else nn.Sequential(of_fbgemm(*channelwise()[:2]))
    name = "model.layers.0.mlp.experts" if change is split_experts_ else "0"
    hook = hooks.ModelHook()
    old = hooks.add_hook_to_module(model.get_submodule(name), hook)
    assert change(model)
    new = model.get_submodule(name)
    assert new is not old
    assert new._hf_hook is hook


@pytest.mark.parametrize("change", [convert_, split_experts_])
def test_what_is_in_two_places_is_replaced_in_both(change):
    model = random_model("qwen3_moe") if change is split_experts_ else nn.Sequential(of_fbgemm(*channelwise()[:2]))
    name = "model.layers.0.mlp.experts" if change is split_experts_ else "0"
    shared = model.get_submodule(name)
    model.other = nn.ModuleDict({"place": shared})
    assert change(model)[0].startswith(name)
    assert model.get_submodule(name) is not shared
    assert model.other["place"] is model.get_submodule(name)


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({}, False),
        ({"hidden_act": "gelu"}, False),
        ({"swiglu_limit": 7.0}, True),
        ({"swiglu_limit": 1e6}, True),
        ({"swiglu_alpha": 1.702, "swiglu_limit": 7.0}, True),
        ({"mlp_gate_softcap": 30.0, "mlp_up_softcap": 30.0}, True),
    ],
    ids=str,
)
def test_gates_of_transformers_fp8_experts_are_fused_where_they_are_an_activation(options, own):
    sizes = {"hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 2}
    experts = finegrained_fp8.FP8Experts(Qwen3MoeConfig(**sizes, **options), (128, 128))
    layout = Layout(("gate_proj", "up_proj"), "down_proj", ())
    assert Experts(experts, layout)._own_gate == own
