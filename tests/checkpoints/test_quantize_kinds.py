"""Which tensors become FP8: by names alone, and against the modules that transformers makes for them."""

import json
import math

import pytest

from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint
from fp8core.checkpoint.formats.kinds import LINEAR, kind_of, names_of
from fp8core.errors import CheckpointError
from support.checkpoints import is_ignored, left_in, shrink
from support.planned import MLP, L, folder, reasons, statuses


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        ("shared", "embedding"),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "embedding"),
        ("transformer.wte", "embedding"),
        ("wpe", "embedding"),
        ("model.embed_tokens", "embedding"),
        ("encoder.embed_positions", "embedding"),
        ("embeddings.position_embeddings", "embedding"),
        ("gpt_neox.embed_in", "embedding"),
        ("tok_embeddings", "embedding"),
        ("backbone.convnext.0.norm.scale", "embedding"),
        ("lm_head", "head"),
        ("score", "head"),
        ("classifier", "head"),
        ("classifier.out_proj", "head"),
        ("output", "head"),
        ("transformer.output_layer", "head"),
        ("embed_out", "head"),
        ("cls.predictions.decoder", "head"),
        ("bert.pooler.dense", "head"),
        (f"{L}mlp.gate", "router"),
        (f"{L}block_sparse_moe.gate", "router"),
        (f"{L}feed_forward.router", "router"),
        (f"{L}mlp.router.classifier", "router"),
        (f"{L}mlp.shared_expert_gate", "router"),
        (f"{L}mamba.x_proj", "state space"),
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj", "tower"),
        ("visual.blocks.0.attn.qkv", "tower"),
        ("multi_modal_projector.linear_1", "tower"),
        ("model.layers.61.eh_proj", "multi-token prediction"),
        ("model.mtp_layers.0.input_proj", "multi-token prediction"),
        ("model.mtp_linear_proj.0", "multi-token prediction"),
        ("model.layers.61.self_attn.q_a_proj", "linear"),
        ("base_model.model.model.layers.0.self_attn.q_proj.lora_A", "adapter"),
        (f"{L}self_attn.q_proj.lora_B.default", "adapter"),
        (f"{L}attn.to_q.lora_down", "adapter"),
        (f"{L}self_attn.q_proj.base_layer", "linear"),
        ("anything", "outside"),
        (f"{L}self_attn.q_proj", "linear"),
        (f"{L}mlp.gate_proj", "linear"),
        (f"{L}mlp.shared_expert.gate_proj", "linear"),
        (f"{L}mlp.experts.3.w1", "linear"),
        ("encoder.layer.0.attention.output.dense", "linear"),
        ("encoder.block.0.layer.1.DenseReluDense.wo", "linear"),
    ],
)
def test_a_name_tells_what_a_module_is(module, kind):
    names = names_of([module, f"{L}self_attn.q_proj"], [], {})
    assert kind in kind_of(module, (64, 64), names).name


@pytest.mark.parametrize(
    ("model_type", "module"),
    [
        ("t5", "encoder.block.0.layer.1.DenseReluDense.wo"),
        ("switch_transformers", "encoder.block.1.layer.1.mlp.experts.expert_0.wo"),
        ("kosmos-2.5", "vision_model.encoder.layer.0.mlp.wo"),
        ("nllb-moe", "model.encoder.layers.0.ffn.fc2"),
        ("seamless_m4t_v2", "text_decoder.layers.0.ffn.fc2"),
        ("wavlm", "encoder.layers.0.attention.q_proj"),
        ("rwkv", "rwkv.blocks.0.attention.output"),
        ("deepseek_v32", f"{L}self_attn.indexer.weights_proj"),
        ("nemotron_h", "backbone.layers.0.mixer.out_proj"),
        ("gemma3n_text", f"{L}altup.prediction_coefs"),
        ("gemma3n", "model.language_model.layers.0.altup.correction_coefs"),
        ("reformer", "reformer.encoder.layers.0.attention.self_attention.query_key"),
        ("layoutlmv3", "layoutlmv3.encoder.0.rel_pos_x_bias"),
        ("inkling2_loop_text", f"{L}mlp_message_gate.down_proj"),
        ("deepseek_v4", "layers.3.attn.wo_a"),
        ("zamba2", f"{L}shared_transformer.feed_forward.gate_up_proj"),
        ("zamba", f"{L}shared_transf.self_attn.q_proj"),
    ],
)
def test_a_layer_whose_weight_the_model_itself_asks_stays(model_type, module):
    names = names_of([module], [], {"model_type": model_type})
    assert kind_of(module, (64, 64), names) is not LINEAR


def test_what_stays_is_named_with_its_reason_and_ignored_by_readers(tmp_path):
    names = ["shared.weight", "lm_head.weight", f"{L}mlp.gate.weight", f"{L}mlp.shared_expert_gate.weight", "x.weight"]
    source = folder(tmp_path / "in", dict.fromkeys([*names, f"{L}mlp.up_proj.weight"], (64, 64)))
    summary = quantize_checkpoint(source, tmp_path / "out")
    assert summary.quantized == (f"{L}mlp.up_proj.weight",)
    assert set(summary.kept) == set(names)
    assert all(is_ignored(name.removesuffix(".weight"), summary) for name in names)
    assert not is_ignored(f"{L}mlp.up_proj", summary)
    record = json.loads((tmp_path / "out" / "fp8core.json").read_text())
    assert set(record["kept"]) == set(names)
    assert "embedding" in record["kept"]["shared.weight"]


@pytest.mark.parametrize(("config", "kind"), [({"model_type": "gpt2"}, "Conv1D: stored"), ({}, "Conv1D or linear")])
def test_gpt2s_conv1d_stays(tmp_path, config, kind):
    shapes = {"h.0.attn.c_attn.weight": (64, 192), "h.0.mlp.c_fc.weight": (64, 256), "h.0.mlp.c_proj.weight": (256, 64)}
    source = folder(tmp_path / "in", shapes, **config)
    assert all(reason.startswith(kind) for reason in reasons(source).values())
    with pytest.raises(CheckpointError, match=f"has no weight to quantize: {kind}"):
        quantize_checkpoint(source, tmp_path / "out")


def test_the_config_beside_a_file_tells_its_kind_of_model(tmp_path):
    source = folder(tmp_path / "in", {"h.0.attn.c_attn.weight": (64, 192)}, model_type="gpt_bigcode")
    assert statuses(source / "model.safetensors") == {"h.0.attn.c_attn": "quantized"}


@pytest.mark.parametrize("name", ["shared", f"{L}mlp.gate", f"{L}mlp.shared_expert_gate"])
def test_what_readers_cannot_read_is_refused_where_it_is_asked_for(tmp_path, name):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64), f"{L}mlp.up_proj.weight": (64, 64)})
    with pytest.raises(CheckpointError, match=rf"cannot quantize {name}\.weight: .* but '\*' of include matches it"):
        quantize_checkpoint(source, tmp_path / "out", include=["*"])
    assert left_in(tmp_path) == ["in"]
    assert statuses(source, include=["*"])[name] == "refused"


def test_a_layer_that_only_training_reads_may_be_asked_for(tmp_path):
    module = "backbone.layers.0.mixer.out_proj"
    tensors = {f"{module}.weight": (64, 64), "backbone.layers.0.mixer.up_proj.weight": (64, 64)}
    source = folder(tmp_path / "in", tensors, model_type="nemotron_h")
    assert statuses(source)[module] == "kept"
    assert statuses(source, include=["*.out_proj"])[module] == "quantized"


@pytest.mark.parametrize("nested", [False, True])
def test_a_head_may_be_asked_for_unless_it_is_the_embedding(tmp_path, nested):
    tensors = {"lm_head.weight": (64, 64), f"{L}mlp.up_proj.weight": (64, 64)}
    source = folder(tmp_path / "in", tensors, model_type="llama", tie_word_embeddings=False)
    assert statuses(source, include=["lm_head"])["lm_head"] == "quantized"
    tied = {"tie_word_embeddings": True}
    (source / "config.json").write_text(json.dumps({"text_config": tied} if nested else tied))
    with pytest.raises(CheckpointError, match="tied to the embedding"):
        quantize_checkpoint(source, tmp_path / "out", include=["lm_head"])


def test_towers_are_ignored_by_whatever_name_readers_give_them(tmp_path):
    tower = "vision_tower.encoder.layers.0.mlp.fc1"
    source = folder(tmp_path / "in", {f"{tower}.weight": (64, 64), f"{L}mlp.up_proj.weight": (64, 64)})
    summary = quantize_checkpoint(source, tmp_path / "out")
    assert is_ignored(tower, summary)
    assert is_ignored("model.vision_tower.other.layers.7.fc3", summary)
    assert not is_ignored(f"{L}mlp.up_proj", summary)
    both = quantize_checkpoint(source, tmp_path / "both", include=["*fc1", "*up_proj"])
    assert not is_ignored(tower, both)


def test_the_layers_of_a_model_that_is_a_tower_are_quantized(tmp_path):
    layer, head, text = "vit.encoder.layer.0.output.dense", "vit.pooler.dense", "text_model.layers.0.fc1"
    source = folder(tmp_path / "alone", dict.fromkeys((f"{layer}.weight", f"{head}.weight"), (64, 64)))
    assert statuses(source) == {layer: "quantized", head: "kept"}
    plan = plan_checkpoint(source)
    assert not is_ignored(layer, plan)
    assert is_ignored(head, plan)
    source = folder(tmp_path / "beside", dict.fromkeys((f"{layer}.weight", f"{text}.weight"), (64, 64)))
    assert statuses(source) == {layer: "kept", text: "quantized"}
    source = folder(tmp_path / "shard", {f"{layer}.weight": (64, 64)}, text_config={})
    assert statuses(source) == {layer: "kept"}


def test_what_is_beside_the_layers_does_not_make_them_a_tower(tmp_path):
    """transformers stores ViT-MSN's layers without the prefix of its embeddings, and loads them with it."""
    shapes = {"encoder.layer.0.output.dense.weight": (64, 64), "vit.embeddings.projection.weight": (64, 3, 8, 8)}
    plan = plan_checkpoint(folder(tmp_path / "in", shapes))
    assert not is_ignored("vit.layers.0.mlp.fc2", plan)
    assert is_ignored("vit.embeddings.projection", plan)


def test_routers_are_ignored_by_whatever_name_readers_give_them(tmp_path):
    source = folder(tmp_path / "in", {f"{L}block_sparse_moe.gate.weight": (4, 64), f"{MLP[2]}.weight": (64, 64)})
    plan = plan_checkpoint(source)
    assert is_ignored(f"{L}mlp.router", plan)
    assert not is_ignored(f"{L}mlp.gate_proj", plan)


def test_layers_are_ignored_by_whatever_prefix_readers_give_them(tmp_path):
    names = [f"language_model.model.layers.{layer}.mlp.down_proj" for layer in range(2)]
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in names})
    summary = quantize_checkpoint(source, tmp_path / "out", exclude=[names[0]])
    for prefix in ("language_model.model.", "model.language_model.", ""):
        assert is_ignored(f"{prefix}layers.0.mlp.down_proj", summary)
        assert not is_ignored(f"{prefix}layers.1.mlp.down_proj", summary)


@pytest.mark.parametrize(
    "names",
    [
        [f"{side}.block.0.layer.0.SelfAttention.o" for side in ("encoder", "decoder")],
        ["encoder.points.layers.0", "boxes.3.layers.0"],
    ],
)
def test_layers_of_equal_names_are_told_apart_by_their_prefix(tmp_path, names):
    source = folder(tmp_path / "in", {f"{name}.weight": (64, 64) for name in names})
    summary = quantize_checkpoint(source, tmp_path / "out", exclude=["encoder.*"])
    assert [is_ignored(name, summary) for name in names] == [True, False]


@pytest.mark.parametrize(
    "tensors",
    [
        {f"{L}mlp.experts.gate_up_proj": (4, 64, 128)},
        {f"{L}mlp.experts.{number}.{part}.weight": (64, 64) for number in (0, 1) for part in ("w1", "w2", "w3")},
        {
            f"{L}mlp.experts.{number}.{part}_proj.weight": (64, 64)
            for number in (0, 1)
            for part in ("gate", "up", "down")
        },
    ],
)
def test_experts_that_stay_are_ignored_by_the_names_that_vllm_asks_for(tmp_path, tensors):
    source = folder(tmp_path / "in", {**tensors, f"{L}self_attn.o_proj.weight": (64, 64)})
    summary = quantize_checkpoint(source, tmp_path / "out", exclude=["*.experts.*"])
    for part in ("gate_proj", "up_proj", "down_proj"):
        assert is_ignored(f"{L}mlp.experts.0.{part}", summary)
        assert not is_ignored(f"{L}mlp.shared_experts.{part}", summary)
    plan = plan_checkpoint(source)
    if len(tensors) == 1:
        assert "experts in one tensor of 3 axes" in plan.verdicts[0].reason
    else:
        assert not is_ignored(f"{L}mlp.experts.0.w1", plan)


def test_experts_of_any_name_are_stacked_beside_a_router(tmp_path):
    """Granite's, for which vLLM has a layer called experts. Convolutions have 3 axes, too."""
    shapes = {"moe.input_linear": (4, 128, 64), "moe.router.layer": (4, 64), "mamba.conv1d": (64, 1, 4)}
    source = folder(
        tmp_path / "in", {f"{L}{name}.weight": shape for name, shape in shapes.items()} | {f"{MLP[2]}.weight": (64, 64)}
    )
    why, plan = reasons(source), plan_checkpoint(source)
    assert why[f"{L}moe.input_linear"] == "experts in one tensor of 3 axes: compressed-tensors has no layer for it"
    assert why[f"{L}mamba.conv1d"] == "3-D: not a matrix"
    assert is_ignored(f"{L}moe.experts.0.gate_proj", plan)
    assert not is_ignored(f"{L}mlp.gate_proj", plan)


@pytest.mark.parametrize("name", ["lm_head", "cls.predictions.decoder", "score", "model.vision_tower.fc1"])
def test_heads_that_no_checkpoint_stores_are_ignored_too(tmp_path, name):
    source = folder(tmp_path / "in", {f"{L}mlp.up_proj.weight": (64, 64)})
    assert is_ignored(name, plan_checkpoint(source))


# One of each family: layers with other names, mixtures, encoders, decoders, towers, state spaces. All of the 1,114
# classes that transformers 5.23 makes from default configurations hold; these take a few seconds.
MODELS = (
    *(
        "albert",
        "bart",
        "bert",
        "bloom",
        "clip",
        "ctrl",
        "deepseek_v3",
        "distilbert",
        "falcon",
        "falcon_mamba",
        "gemma3",
    ),
    *(
        "gpt2",
        "gpt_bigcode",
        "gpt_neox",
        "gpt_oss",
        "jamba",
        "llama",
        "llava",
        "mamba",
        "mixtral",
        "modernbert",
        "mpnet",
    ),
    *(
        "nllb-moe",
        "olmoe",
        "opt",
        "phi3",
        "qwen2_moe",
        "qwen2_vl",
        "qwen3_next",
        "roberta",
        "switch_transformers",
        "t5",
    ),
    *("umt5", "whisper", "xlnet"),
)


@pytest.mark.parametrize("model_type", MODELS)
def test_only_linear_modules_of_transformers_become_fp8(model_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    auto = transformers.models.auto.modeling_auto
    config = transformers.CONFIG_MAPPING[model_type]()
    shrink(config)
    mappings = (
        *(auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING),
        *(auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING),
        *(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, auto.MODEL_MAPPING),
    )
    classes = {mapping[type(config)] for mapping in mappings if type(config) in mapping}
    classes = {one for found in classes for one in (found if isinstance(found, tuple) else (found,))}
    assert classes
    linear = 0
    for cls in classes:
        with torch.device("meta"):
            made = cls._from_config(config)
        shapes = {name: tuple(parameter.shape) for name, parameter in made.named_parameters(remove_duplicate=False)}
        matrices = [name.removesuffix(".weight") for name, shape in shapes.items() if _is_matrix(name, shape)]
        names = names_of(
            matrices, shapes, {"model_type": model_type, "vocab_size": config.get_text_config().vocab_size}
        )
        for module in matrices:
            if kind_of(module, shapes[f"{module}.weight"], names) is LINEAR:
                assert type(made.get_submodule(module)).__name__ in ("Linear", "FalconLinear"), module
                linear += 1
    assert linear or model_type in ("gpt2", "ctrl", "mamba", "falcon_mamba")


def _is_matrix(name, shape):
    return name.endswith(".weight") and len(shape) == 2 and math.prod(shape) > 0


def test_a_vocabulary_in_the_config_tells_embeddings_of_any_name(tmp_path):
    source = folder(tmp_path / "in", {"mystery.weight": (1000, 64), f"{MLP[2]}.weight": (64, 64)}, vocab_size=1000)
    assert reasons(source)["mystery"].startswith("embedding")
