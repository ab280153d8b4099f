"""The written checkpoints are read by the packages that they are for: compressed-tensors, and transformers over it."""

import json

import numpy as np
import pytest

from fp8core.checkpoint import convert_checkpoint, quantize_checkpoint
from fp8core.checkpoint.formats.kinds import numbered, without_numbers
from fp8core.checkpoint.formats.naming import module_of
from fp8core.checkpoint.formats.schemes import SCHEMES, quantization_config
from fp8core.errors import CheckpointError
from support.checkpoints import GROUPS, is_ignored, normal, shrink, write

torch = pytest.importorskip("torch")
pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra frameworks)")

SHAPE = (256, 384)


@pytest.mark.parametrize("scheme", GROUPS)
def test_compressed_tensors_reads_the_config_and_decompresses_the_weight(tmp_path, scheme):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from safetensors.torch import load_file

    weight = normal(*SHAPE)
    write(tmp_path / "in.safetensors", {"layer.weight": weight})
    summary = quantize_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", scheme=scheme)
    config = QuantizationConfig.model_validate(json.loads(summary.config_file.read_text())["quantization_config"])
    assert config.format == "float-quantized"
    assert config.ignore == ["lm_head"]
    group = config.config_groups["group_0"]
    assert group.weights.strategy == SCHEMES[scheme].weights["strategy"]
    assert group.input_activations.strategy == SCHEMES[scheme].activations["strategy"]
    assert group.input_activations.dynamic

    found = load_file(tmp_path / "out.safetensors")
    assert found["layer.weight"].dtype is torch.float8_e4m3fn
    state = {"weight": found["layer.weight"], "weight_scale": found["layer.weight_scale"]}
    back = BaseCompressor.get_value_from_registry(config.format).decompress(state, group)["weight"].float().numpy()
    # Half a step of three mantissa bits, next to the largest of its scale's group.
    assert np.all(np.abs(back - weight) <= 2.0**-4 * np.abs(weight) + np.abs(weight).max() / 448 * 2.0**-7)


@pytest.mark.parametrize("scheme", GROUPS)
def test_transformers_loads_the_folder_and_gives_nearly_the_same_logits(tmp_path, scheme):
    transformers = pytest.importorskip("transformers")
    from support import models

    model = models.llama()
    model.save_pretrained(tmp_path / "in")
    summary = quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme=scheme)
    assert len(summary.quantized) == 14
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        want, got = model(tokens).logits, loaded(tokens).logits
    assert torch.isfinite(got).all()
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.equal(got, want)


def small_t5(transformers):
    config = transformers.T5Config(vocab_size=128, d_model=256, d_kv=64, d_ff=512, num_layers=2, num_heads=4)
    return transformers.T5ForConditionalGeneration(config), 2 * 5 + 2 * 9  # without wo


def small_gpt2(transformers):
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=128, n_embd=256, n_layer=2, n_head=4)), 0


def small_mixture(transformers):
    config = transformers.Qwen2MoeConfig(
        vocab_size=128, hidden_size=256, intermediate_size=384, moe_intermediate_size=128, num_hidden_layers=2,
        shared_expert_intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, num_experts=4,
        num_experts_per_tok=2, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.Qwen2MoeForCausalLM(config), 2 * (4 + 3 * 4 + 3)


def small_bert(transformers):
    config = transformers.BertConfig(
        vocab_size=128, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, intermediate_size=512
    )
    return transformers.BertForMaskedLM(config), 2 * 6


def small_smollm(transformers):
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), 2


def small_llava(transformers):
    text = transformers.LlamaConfig(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    vision = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=16
    )
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=127)
    return transformers.LlavaForConditionalGeneration(config), {"channel": 14, "block": 8}


@pytest.mark.parametrize(
    ("make", "scheme"),
    [
        (small_llava, "channel"),
        (small_llava, "block"),  # k_proj and v_proj have no whole blocks, so q_proj stays with them
        (small_t5, "channel"),
        (small_t5, "block"),
        (small_gpt2, "channel"),
        (small_mixture, "channel"),
        (small_bert, "tensor"),
        (small_smollm, "block"),
    ],
)
def test_models_with_more_than_linear_layers_give_nearly_the_same_logits(tmp_path, make, scheme):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, quantized = make(transformers)
    quantized = quantized[scheme] if isinstance(quantized, dict) else quantized
    model = model.eval()
    model.save_pretrained(tmp_path / "in")
    if not quantized:
        with pytest.raises(CheckpointError, match=r"has no weight to quantize: .*Conv1D"):
            quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme=scheme)
        return
    summary = quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme=scheme)
    assert len(summary.quantized) == quantized
    loaded, report = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    loaded = loaded.eval()
    tokens = {"input_ids": torch.arange(48).reshape(2, 24)}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        want, got = model(**tokens).logits, loaded(**tokens).logits
    assert torch.isfinite(got).all()
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.equal(got, want)


def test_transformers_loads_blocks_of_experts_in_the_format_of_deepseek_and_no_other(tmp_path):
    """If it loads those of compressed-tensors one day, docs/how-to/quantize-a-checkpoint.md has to say so."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, quantized = small_mixture(transformers)
    model = model.eval()
    model.save_pretrained(tmp_path / "in")
    assert len(quantize_checkpoint(tmp_path / "in", tmp_path / "block", scheme="block").quantized) == quantized
    with pytest.raises(RuntimeError, match="conversion of the weights"):
        type(model).from_pretrained(tmp_path / "block", dtype=torch.float32)
    assert not convert_checkpoint(tmp_path / "block", tmp_path / "deepseek", to="deepseek").lossy
    loaded = type(model).from_pretrained(tmp_path / "deepseek", dtype=torch.float32).eval()
    tokens = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        want, got = model(tokens).logits, loaded(tokens).logits
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.equal(got, want)


def test_transformers_reads_the_codes_of_modelopt_as_values(tmp_path):
    """If it reads their scales one day, docs/how-to/convert-a-checkpoint.md has to say so."""
    transformers = pytest.importorskip("transformers")
    from support import models

    models.llama().save_pretrained(tmp_path / "in")
    quantize_checkpoint(tmp_path / "in", tmp_path / "block", scheme="block")
    convert_checkpoint(tmp_path / "block", tmp_path / "modelopt", to="modelopt")
    _, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "modelopt", output_loading_info=True)
    assert "model.layers.0.mlp.up_proj.weight_scale" in report["unexpected_keys"]


@pytest.mark.parametrize(
    "model_type",
    [
        *("swin", "vit", "pixio", "lw_detr", "rt_detr", "exaone", "nomic_bert", "kimi_linear", "mixtral"),
        *("axk2", "cosmos3_edge", "hrm_text", "minimax_m3_vl", "qianfan_ocr", "rf_detr", "unlimited_ocr"),
    ],
)
def test_a_layer_that_stays_is_ignored_by_the_name_that_transformers_gives_it(model_type):
    """Each kind of layer alone, while all others are FP8."""
    transformers = pytest.importorskip("transformers")
    from transformers.core_model_loading import revert_weight_conversion

    from fp8core.transformers.names import Names, transforms_of

    config = transformers.CONFIG_MAPPING[model_type]()
    shrink(config)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    model._weight_conversions = transforms = transforms_of(model)
    names, theirs = Names(model, transforms), {}
    for tensor in revert_weight_conversion(model, model.state_dict()):
        named = names.of(tensor)
        layer = module_of(tensor) if tensor.endswith(".weight") and named.pattern is None else ""
        if numbered(layer) and isinstance(model.get_submodule(module_of(named.name)), torch.nn.Linear):
            theirs[layer] = module_of(named.name)
    assert theirs
    for kind in set(map(without_numbers, theirs)):
        kept = {layer for layer in theirs if without_numbers(layer) == kind}
        weights, fp8 = [(f"{x}.weight", (64, 64)) for x in kept], theirs.keys() - kept
        made = quantization_config(SCHEMES["channel"], weights, fp8, model.config.to_dict())
        ignored = {layer for layer, name in theirs.items() if is_ignored(name, made)}
        assert ignored == kept, kind
