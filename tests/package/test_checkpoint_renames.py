"""The names that transformers gives to layers while it loads them, by its own conversions and by our table."""

import pytest

from fp8core.checkpoint.renames import renamed
from fp8core.checkpoint.schemes import SCHEMES, quantization_config
from support.checkpoints import is_ignored

# By a key of transformers' conversions, a model type or a class: layers as checkpoints name them.
LAYERS = {
    "ViTModel": "encoder.layer.3.attention.output.dense encoder.layer.3.intermediate.dense",
    "rt_detr": "encoder.encoder.1.layers.3.fc1 decoder.layers.3.self_attn.out_proj",
    "exaone": "transformer.h.3.attn.attention.out_proj transformer.h.3.mlp.c_fc_1",
    "nomic_bert": "encoder.layers.3.attn.Wqkv encoder.layers.3.attn.out_proj encoder.layers.3.mlp.fc12",
    "bailing_hybrid": "layers.3.attention.dense layers.3.attention.f_proj layers.3.attention.q_proj",
    "sarvam_moe": "layers.3.attention.query_key_value layers.3.attention.dense",
    "mistral_large4_text": "layers.3.attention.o_proj layers.3.attention.wkv_b",
    "cohere_asr": "transf_decoder._decoder.layers.3.first_sub_layer.key_net encoder.layers.3.self_attn.linear_pos "
    "transf_decoder._decoder.layers.3.second_sub_layer.out_projection encoder.layers.3.self_attn.linear_q "
    "transf_decoder._decoder.layers.3.third_sub_layer.dense_in",
    "cosmos3_omni": "layers.3.self_attn.to_q layers.3.self_attn.to_out",
    "d_fine": "decoder.layers.3.fc1 encoder.encoder.0.layers.3.fc2",
    "deepseek_v4": "layers.3.attn.wq_a layers.3.attn.wo_b layers.3.attn.wkv layers.3.attn.compressor.wgate "
    "layers.3.attn.indexer.compressor.wkv layers.3.attn.indexer.weights_proj layers.3.attn.indexer.wq_b "
    "layers.3.ffn.shared_experts.w1 layers.3.ffn.shared_experts.w2",
    "dory": "backbone.layers.3.self_attn.g_proj",
    "lfm3": "model.layers.3.self_attn.gate_proj",
    "hy_v4": "model.layers.3.self_attn.linear_gate",
    "gte": "encoder.layer.3.attention.qkv_proj encoder.layer.3.attention.o_proj encoder.layer.3.mlp.up_gate_proj",
    "hrm_text": "H_module.layers.3.attn.gqkv_proj H_module.layers.3.attn.o_proj",
    "inkling_mm_model": "model.llm.layers.3.attn.wq_du model.llm.layers.3.attn.wo_ud model.llm.layers.3.attn.wr_du",
    "inkling2_text": "model.llm.layers.3.attn.wk_dv model.llm.layers.3.attn.wr_du model.llm.layers.3.attn.gate_attn",
    "jina_embeddings_v3": "encoder.layers.3.mixer.Wqkv encoder.layers.3.mixer.out_proj",
    "lara_mini": "model.layers.3.linear_attn.in_proj",
    "Molmo2TextModel": "layers.3.self_attn.att_proj layers.3.self_attn.attn_out layers.3.mlp.ff_proj layers.3.mlp.ff_out",
    "nemo_speechlm": "encoder.layers.3.attn.w_qkv encoder.layers.3.ffn.net.0 encoder.layers.3.ffn.net.3",
    "radio": "radio_model.model.blocks.3.attn.qkv radio_model.model.blocks.3.attn.proj",
    "sapiens2": "blocks.3.attn.wq blocks.3.attn.proj blocks.3.ffn.w12 blocks.3.ffn.w3",
    "Tipsv2VisionModel": "blocks.3.attn.qkv blocks.3.attn.proj blocks.3.mlp.c_fc",
    "Tipsv2TextModel": "transformer.resblocks.3.attn.out_proj transformer.resblocks.3.mlp.c_proj",
    "step3p7": "model.layers.3.share_expert.up_proj",
    "SegformerModel": "encoder.block.1.3.attention.self.query encoder.block.1.3.mlp.dense2",
    "timesfm2_5": "layers.3.mlp.ff0 layers.3.mlp.ff1",
    "altclip": "text_model.roberta.encoder.layer.3.intermediate.dense",
    "RfDetrModel": "backbone.0.encoder.encoder.encoder.layer.3.attention.attention.query transformer.decoder.layers.3.linear2",
}


def names_in_transformers(kind, module):
    """Return the layers that transformers makes of one: several if it splits it."""
    conversions = pytest.importorskip("transformers.conversion_mapping").get_checkpoint_conversion_mapping(kind)
    loading = pytest.importorskip("transformers.core_model_loading")
    if conversions is None:
        pytest.skip("this release of transformers does not know the model")
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    found, pattern = loading.rename_source_key(f"{module}.weight", renamings, converters, "", {})
    targets = next((one.target_patterns for one in converters if pattern in one.source_patterns), [found])
    return {found.replace(targets[0].strip("\\"), one.strip("\\")).removesuffix(".weight") for one in targets}


def of_its_layer(name):
    """Return a name from its first numbered layer on."""
    parts = name.split(".")
    return ".".join(parts[next(at for at, part in enumerate(parts) if part.isdigit()) - 1 :])


@pytest.mark.parametrize(("kind", "module"), [(kind, one) for kind, names in LAYERS.items() for one in names.split()])
def test_the_table_has_the_names_of_transformers(kind, module):
    wanted = names_in_transformers(kind, module)
    assert module not in wanted
    assert {of_its_layer(one) for one in wanted} <= {of_its_layer(one) for one in renamed(module)}


def test_numbers_of_layers_stay():
    name = "model.layers.{}.block_sparse_moe.experts.{}.w1"
    for numbers in ((0, 9), (10, 100), (61, 61), (12, 3)):
        assert list(renamed(name.format(*numbers))) == ["model.layers.{}.mlp.experts.{}.w1".format(*numbers)]
    assert "layers.17.mlp.layers.0" in renamed("layers.17.fc1")


@pytest.mark.parametrize(
    ("kept", "tower"),
    [
        ("vit", "vision_tower"),
        ("visual", "vision_tower"),
        ("vision_model", "vision_tower"),
        ("vision_backbone.image_vit", "vision_tower"),
        ("model.vision_encoder", "vision_tower"),
        ("vision_encoder", "vision_model"),
        ("audio_encoder", "audio_tower"),
    ],
)
def test_towers_are_ignored_by_the_names_of_transformers_unless_they_are_fp8(kept, tower):
    weights = [(f"{kept}.layers.0.mlp.fc1.weight", (64, 64))]
    config = quantization_config(SCHEMES["channel"], weights, ["model.layers.0.mlp.up_proj"])
    for name in (kept, tower, f"model.{tower}"):
        assert is_ignored(f"{name}.layers.0.mlp.fc1", config)
    assert not is_ignored("model.language_model.layers.0.mlp.up_proj", config)
    config = quantization_config(SCHEMES["channel"], weights, [f"{kept}.layers.1.mlp.fc1"])
    for name in (kept, tower, f"model.{tower}"):
        assert is_ignored(f"{name}.layers.0.mlp.fc1", config)
        assert not is_ignored(f"{name}.layers.1.mlp.fc1", config)
