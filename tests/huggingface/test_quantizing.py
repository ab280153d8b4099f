"""Models in bfloat16, quantized while they are loaded: the bytes of `fp8core quantize`, saved and loaded again."""

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import (  # noqa: E402 - after the skips
    AutoModelForCausalLM,
    FalconConfig,
    GPT2Config,
    LlamaForCausalLM,
    T5Config,
    T5EncoderModel,
)
from transformers.models.qwen3_moe import modeling_qwen3_moe  # noqa: E402

import fp8core.torch  # noqa: E402
from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint  # noqa: E402
from fp8core.errors import CheckpointError, DeviceError, DTypeError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Experts, Fp8CoreConfig, GroupedExperts, from_pretrained  # noqa: E402
from huggingface.cases import (  # noqa: E402
    CONFIGS,
    TOKENS,
    config_of,
    differing,
    distance,
    fp8_layers,
    logits,
    random_model,
    same,
    tensors_of,
    written,
)

SCHEMES = "channel", "tensor", "block", "static"


class Own(torch.nn.Linear):
    """A layer that cannot be replaced."""


def static_scales(kind, folder):
    """Scales of inputs by the checkpoint's names of modules: calibrated, or of stacked experts some that are enough."""
    if kind in ("llama", "qwen3"):
        return fp8core.torch.calibrate(AutoModelForCausalLM.from_pretrained(folder), [TOKENS])
    modules = [one.module for one in plan_checkpoint(folder).verdicts if one.status == "quantized"]
    return {module: 0.03 + 1e-4 * at for at, module in enumerate(modules)}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"])
def test_the_bytes_of_the_command(kind, scheme, tmp_path):
    wanted = written(kind, tmp_path / "wide")
    scales = static_scales(kind, tmp_path / "wide") if scheme == "static" else None
    summary = quantize_checkpoint(tmp_path / "wide", tmp_path / "command", scheme=scheme, input_scales=scales)
    asked = Fp8CoreConfig(scheme=scheme, input_scales=scales)
    model, told = from_pretrained(tmp_path / "wide", quantization_config=asked, output_loading_info=True)
    assert not told["missing_keys"] | told["unexpected_keys"] | told["mismatched_keys"], told
    layers = fp8_layers(model)
    stored = {name.replace(".block_sparse_moe.", ".mlp.") for name in summary.quantized}  # Mixtral's, renamed
    assert {f"{name}.weight" for name in layers} == stored
    assert {layer.scheme for layer in layers.values()} == {"tensor" if scheme == "static" else scheme}
    assert {name: layer.input_scale.item() for name, layer in layers.items() if layer.input_scale is not None} == {
        name.replace(".block_sparse_moe.", ".mlp."): torch.tensor(scale).item()
        for name, scale in (scales or {}).items()
    }
    assert not any(parameter.requires_grad for layer in layers.values() for parameter in layer.parameters())
    found = logits(model)
    assert 0.001 < distance(found, wanted) < 0.15

    model.save_pretrained(tmp_path / "saved")
    command, saved = tensors_of(tmp_path / "command"), tensors_of(tmp_path / "saved")
    assert command.keys() == saved.keys()
    assert differing(command, saved, model) == []
    quantization = [config_of(tmp_path / name)["quantization_config"] for name in ("command", "saved")]
    assert quantization[0] == quantization[1] == summary.quantization_config
    assert torch.equal(logits(from_pretrained(tmp_path / "saved")), found)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "phimoe"])
def test_transformers_reads_what_was_saved(kind, tmp_path):
    pytest.importorskip("compressed_tensors")
    wanted = written(kind, tmp_path / "wide")
    model = from_pretrained(tmp_path / "wide")
    model.save_pretrained(tmp_path / "saved")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert not any(isinstance(module, Linear | Experts | GroupedExperts) for module in theirs.modules())
    assert distance(logits(theirs), wanted) < 0.15
    assert distance(logits(theirs), logits(model)) < 0.15


def test_what_is_excluded_stays(tmp_path):
    written("llama", tmp_path)
    asked = Fp8CoreConfig(exclude=["*.down_proj", "re:.*self_attn.*"])
    model = from_pretrained(tmp_path, quantization_config=asked)
    names = {name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert names == {"gate_proj", "up_proj"}


def test_experts_that_are_excluded_stay_stacked(tmp_path):
    wanted = written("qwen3_moe", tmp_path / "wide")
    model = from_pretrained(tmp_path / "wide", quantization_config=Fp8CoreConfig(exclude=["*.experts.*"]))
    model.save_pretrained(tmp_path / "saved")
    for one in (model, from_pretrained(tmp_path / "saved")):
        assert type(one.model.layers[1].mlp.experts) is modeling_qwen3_moe.Qwen3MoeExperts
        assert isinstance(one.model.layers[1].self_attn.q_proj, Linear)
        assert distance(logits(one), wanted) < 0.15


def test_a_name_that_reads_like_a_pattern_stands_for_itself(tmp_path):
    class Odd(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp.add_module("experts[0]", torch.nn.ModuleDict({"down_proj": Own(128, 128, bias=False)}))
                layer.mlp.add_module(
                    "experts0", torch.nn.ModuleDict({"down_proj": torch.nn.Linear(128, 128, bias=False)})
                )
            self.post_init()

    Odd(CONFIGS["llama"]()).to(torch.bfloat16).save_pretrained(tmp_path)
    words = r"0\.mlp\.experts\[0\]\.down_proj stays unquantized: the model has a Own for it \(and 1 other weights\)"
    with pytest.warns(RuntimeWarning, match=words):
        model = Odd.from_pretrained(tmp_path, quantization_config=Fp8CoreConfig(), dtype=torch.bfloat16)
    for layer in model.model.layers:
        assert type(layer.mlp.get_submodule("experts[0].down_proj")) is Own
        assert type(layer.mlp.get_submodule("experts0.down_proj")) is Linear


def test_scales_of_layers_that_cannot_be_replaced_are_not_needed(tmp_path):
    class Odd(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model.layers[0].mlp.down_proj = Own(320, 128, bias=False)

    Odd(CONFIGS["llama"]()).save_pretrained(tmp_path)
    scales = {one.module: 0.05 for one in plan_checkpoint(tmp_path).verdicts if one.status == "quantized"}
    with pytest.warns(RuntimeWarning, match="down_proj stays unquantized"):
        model = Odd.from_pretrained(
            tmp_path, quantization_config=Fp8CoreConfig(scheme="static", input_scales=scales), dtype=torch.float32
        )
    layers = fp8_layers(model)
    assert layers.keys() == scales.keys() - {"model.layers.0.mlp.down_proj"}
    assert all(layer.input_scale.item() == pytest.approx(0.05) for layer in layers.values())


def test_biases_are_those_of_the_file(tmp_path):
    """They are loaded before the weights, into a layer that is then replaced."""
    written("llama", tmp_path)
    stored = tensors_of(tmp_path)
    model = from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        if name.endswith("bias"):
            assert same(value, stored[name])


def test_a_bias_that_the_file_lacks_is_zero(tmp_path):
    written("llama", tmp_path)
    stored = {name: x for name, x in tensors_of(tmp_path).items() if not name.endswith("q_proj.bias")}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model, told = from_pretrained(tmp_path, output_loading_info=True)
    assert told["missing_keys"] == {f"model.layers.{layer}.self_attn.q_proj.bias" for layer in range(2)}
    for layer in model.model.layers:
        assert not layer.self_attn.q_proj.bias.any()
        assert layer.self_attn.k_proj.bias.all()


def test_dequantized_again(tmp_path):
    wanted = written("qwen3_moe", tmp_path)
    model = from_pretrained(tmp_path)
    found = logits(model)
    model.save_pretrained(tmp_path / "fp8")  # which makes a name of the configuration's dtype
    with pytest.raises(DTypeError, match="dtype needs one of float32, float16, bfloat16"):
        model.dequantize("float8_e5m2")
    model.dequantize()
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert 0.001 < distance(logits(model), wanted) < 0.15
    assert distance(logits(model), found) < 0.15
    model.save_pretrained(tmp_path / "wide")
    assert "quantization_config" not in config_of(tmp_path / "wide")
    assert tensors_of(tmp_path / "wide").keys() == tensors_of(tmp_path).keys()
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")  # whose experts round at other places
    assert distance(logits(theirs), logits(model)) < 0.02


def test_generating_and_compiling(tmp_path):
    written("llama", tmp_path)
    model = from_pretrained(tmp_path)
    tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, 7)
    inputs = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        compiled = torch.compile(model.model, fullgraph=True, backend="aot_eager")
        assert torch.equal(
            compiled(inputs, use_cache=False).last_hidden_state, model.model(inputs, use_cache=False).last_hidden_state
        )


@pytest.mark.parametrize("stored", ["wide", "fp8"])
def test_layers_that_are_offloaded(stored, tmp_path):
    """Their weights would come from the disk for each call, past what is known of them here."""
    pytest.importorskip("accelerate")
    written("llama", tmp_path / "wide")
    from_pretrained(tmp_path / "wide").save_pretrained(tmp_path / "fp8")
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    with pytest.raises(DeviceError, match=r"on a device, got model.layers.1 on the disk"):
        from_pretrained(tmp_path / stored, device_map=places, offload_folder=tmp_path / "offloaded")
    with pytest.raises(DeviceError, match=r"on a device, got the whole model on the disk"):
        from_pretrained(tmp_path / stored, device_map={"": "disk"}, offload_folder=tmp_path / "offloaded")
    with pytest.raises(DeviceError, match=r"on a device, got model.layers.0.self_attn.q_proj offloaded"):
        from_pretrained(tmp_path / stored, device_map="meta")
    model = from_pretrained(tmp_path / stored, device_map="auto", max_memory={"cpu": "1GB"})
    assert torch.equal(logits(model), logits(from_pretrained(tmp_path / "fp8")))


def test_checkpoints_and_options_that_cannot_be_quantized_are_refused(tmp_path):
    written("llama", tmp_path / "wide")
    model = from_pretrained(tmp_path / "wide")
    model.save_pretrained(tmp_path / "fp8")
    with pytest.raises(CheckpointError, match="needs a checkpoint that is not quantized, got compressed-tensors"):
        from_pretrained(tmp_path / "fp8", quantization_config=Fp8CoreConfig())
    config = config_of(tmp_path / "fp8")
    del config["quantization_config"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="needs a checkpoint that is not quantized, got FP8"):
        from_pretrained(tmp_path / "fp8", quantization_config=Fp8CoreConfig())
    with pytest.raises(CheckpointError, match="scheme needs one of channel, tensor, block, static, got 'row'"):
        Fp8CoreConfig(scheme="row")
    for name in ("include", "exclude"):  # a string would be the list of its letters
        with pytest.raises(CheckpointError, match=f"{name} needs a list of patterns, got 'lm_head'"):
            Fp8CoreConfig(**{name: "lm_head"})
    for asked, got in (("channel", "'channel'"), ({"quant_method": "fp8"}, "that of fp8")):
        with pytest.raises(CheckpointError, match=f"quantization_config needs an Fp8CoreConfig, got {got}"):
            from_pretrained(tmp_path / "wide", quantization_config=asked)
    with pytest.raises(CheckpointError, match=r"input_scales needs a mapping of layers to numbers, got \[0\.5\]"):
        Fp8CoreConfig(scheme="static", input_scales=[0.5])
    with pytest.raises(CheckpointError, match="source needs a mapping, as config_for finds it, got 'fp8'"):
        Fp8CoreConfig(source="fp8")
    for name in ("use_fast_accum", "batch_invariant"):
        with pytest.raises(DTypeError, match=f"{name} needs True or False, got 'no'"):
            Fp8CoreConfig(**{name: "no"})
    with pytest.raises(CheckpointError, match="scheme static needs input_scales"):
        from_pretrained(tmp_path / "wide", quantization_config=Fp8CoreConfig(scheme="static"))
    with pytest.raises(CheckpointError, match=r"matches none; '\*down_proj' matches 2"):
        from_pretrained(tmp_path / "wide", quantization_config=Fp8CoreConfig(exclude=["down_proj"]))
    with pytest.raises(CheckpointError, match="vLLM joins q_proj, k_proj, v_proj"):
        from_pretrained(tmp_path / "wide", quantization_config=Fp8CoreConfig(exclude=["*.k_proj"]))
    torch.save(random_model("llama").state_dict(), tmp_path / "wide" / "pytorch_model.bin")
    (tmp_path / "wide" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"needs safetensors files, got \['pytorch_model.bin'\]"):
        from_pretrained(tmp_path / "wide")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            FalconConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=32),
            r"needs a weight of a linear layer of the model, got a FalconLinear for transformer\.h\.0\.",
        ),
        (
            GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=32),
            r"has no weight to quantize: Conv1D: stored \[in, out",
        ),
    ],
    ids=["falcon", "gpt2"],
)
def test_a_model_without_linear_layers_to_quantize_is_refused_with_the_reason(config, words, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=words):
        from_pretrained(tmp_path)


def test_what_is_around_experts_does_not_initialize_them(tmp_path, monkeypatch):
    """As Qwen3-Omni's blocks do, by the names of the stacked experts."""
    kind = modeling_qwen3_moe.Qwen3MoePreTrainedModel
    usual = kind._init_weights

    def initialize(self, module):
        usual(self, module)
        if isinstance(module, modeling_qwen3_moe.Qwen3MoeSparseMoeBlock):
            torch.nn.init.normal_(module.experts.gate_up_proj)

    wanted = written("qwen3_moe", tmp_path)
    monkeypatch.setattr(kind, "_init_weights", initialize)
    assert distance(logits(from_pretrained(tmp_path)), wanted) < 0.15


def test_what_is_around_experts_initializes_its_own_parameters(tmp_path, monkeypatch):
    kind, block = modeling_qwen3_moe.Qwen3MoePreTrainedModel, modeling_qwen3_moe.Qwen3MoeSparseMoeBlock
    usual, make = kind._init_weights, block.__init__

    def made(self, config):
        make(self, config)
        self.more = torch.nn.Parameter(torch.empty(3))

    def initialize(self, module):
        usual(self, module)
        if isinstance(module, block):
            torch.nn.init.constant_(module.more, 7.0)

    written("qwen3_moe", tmp_path)
    monkeypatch.setattr(block, "__init__", made)
    monkeypatch.setattr(kind, "_init_weights", initialize)
    assert from_pretrained(tmp_path).model.layers[1].mlp.more.tolist() == [7.0] * 3


def test_a_weight_that_is_not_finite_is_named(tmp_path):
    written("llama", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{name} needs finite values, got NaN or Inf"):
        from_pretrained(tmp_path)
    assert from_pretrained(tmp_path, quantization_config=Fp8CoreConfig(exclude=["*.1.mlp.*"])) is not None


def test_t5_keeps_the_layers_that_decide_the_dtype_of_their_input():
    config = T5Config(d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, vocab_size=96)
    torch.manual_seed(0)
    model = T5EncoderModel(config).to(torch.bfloat16).eval()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        wanted = model(tokens).last_hidden_state
        report = fp8core.torch.quantize_model_(model)
        found = model(tokens).last_hidden_state
    assert sorted({name.rpartition(".")[2] for name in report.quantized}) == ["k", "o", "q", "v", "wi"]
    assert {name.rpartition(".")[2] for name in report.kept} == {"wo"}
    assert 0.001 < distance(found, wanted) < 0.15


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("gpt_neox", set()),
        ("gemma3n", {"correction_coefs", "prediction_coefs", "modality_router"}),
        ("falcon_h1", {"in_proj", "out_proj"}),
        ("nemotron_h", {"out_proj"}),
    ],
)
def test_other_families(kind, kept, tmp_path):
    """What their layers keep; the rest is quantized alike from the files and in memory, and saved and loaded again."""
    wanted = written(kind, tmp_path / "wide")
    model = from_pretrained(tmp_path / "wide")
    layers, found = fp8_layers(model), logits(model)
    assert 0.001 < distance(found, wanted) < 0.15
    model.save_pretrained(tmp_path / "fp8")
    assert torch.equal(logits(from_pretrained(tmp_path / "fp8")), found)
    report = fp8core.torch.quantize_model_(random_model(kind))
    assert {name for name in layers if ".experts." not in name} <= set(report.quantized)
    left = {name.rpartition(".")[2] for name, reason in report.kept.items() if "stacks experts" not in reason}
    assert left == {*kept, "lm_head"}


def test_stacked_experts_that_stay_are_reported():
    kept = fp8core.torch.quantize_model_(random_model("qwen3_moe")).kept
    for part in ("gate_up_proj", "down_proj"):
        assert "split_experts_" in kept[f"model.layers.0.mlp.experts.{part}"]


def test_a_head_stays_whatever_its_name():
    """In a file it is outside of the layers; in a model `quantize_model_` asks for it."""
    report = fp8core.torch.quantize_model_(random_model("biogpt"))
    assert report.kept == {"output_projection": "it is the model's head"}
    asked = fp8core.torch.quantize_model_(random_model("biogpt"), include=["output_projection"])
    assert asked.quantized == ("output_projection",)
