"""The names that transformers gives to layers while it loads them, by its own conversions and by our table."""

import pytest

from fp8core.checkpoint.formats.renaming import renamed, rules_for
from fp8core.checkpoint.formats.schemes import SCHEMES, quantization_config
from support.checkpoints import is_ignored

# By the model type, and by the class of which transformers has conversions in its place: layers as checkpoints name them.
LAYERS = {
    "axk2": "model.layers.3.input_layernorm.W_down model.layers.3.self_attn.q_b_proj",
    "cosmos3_edge": "layers.3.self_attn.to_q layers.3.mlp.up_proj layers.3.mlp.down_proj",
    "ernie4_5_vl_moe": "resampler_model.spatial_linear.0 resampler_model.temporal_linear.2 vision_model.blocks.3.attn.qkv",
    "minimax_m3_vl": "layers.3.block_sparse_moe.shared_experts.down_proj layers.3.self_attn.index_q_proj",
    "pp_doclayout_v4": "decoder_order_head.0 decoder_roor_order_head.0 decoder.layers.3.fc1",
    "qianfan_ocr": "mlp1.1 mlp1.3 vision_model.encoder.layers.3.attn.qkv vision_model.encoder.layers.3.attn.proj",
    "gradium_phonon_tts": "flow_lm.flow_net.res_blocks.3.mlp.2 flow_lm.flow_net.final_layer.adaLN_modulation.1",
    "kimi_k25": "vision_tower.encoder.blocks.3.wqkv vision_tower.encoder.blocks.3.wo",
    "vit ViTModel": "encoder.layer.3.attention.output.dense encoder.layer.3.intermediate.dense",
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
    "deepseek_v4": "head layers.3.attn.wq_a layers.3.attn.wo_b layers.3.attn.wkv layers.3.attn.compressor.wgate "
    "layers.3.attn.indexer.compressor.wkv layers.3.attn.indexer.weights_proj layers.3.attn.indexer.wq_b "
    "layers.3.ffn.shared_experts.w1 layers.3.ffn.shared_experts.w2",
    "gpt_neox GPTNeoXForCausalLM": "embed_out",
    "inkling2": "model.llm.unembed",
    "mistral_large4": "output vision_encoder.transformer.layers.3.attention.wo",
    "dory": "backbone.layers.3.self_attn.g_proj",
    "lfm3": "model.layers.3.self_attn.gate_proj",
    "hy_v4": "model.layers.3.self_attn.linear_gate",
    "gte": "encoder.layer.3.attention.qkv_proj encoder.layer.3.attention.o_proj encoder.layer.3.mlp.up_gate_proj",
    "hrm_text": "H_module.layers.3.attn.gqkv_proj H_module.layers.3.attn.o_proj H_module.layers.3.mlp.gate_up_proj",
    "inkling_mm_model": "model.llm.unembed model.llm.layers.3.attn.wq_du model.llm.layers.3.attn.wo_ud model.llm.layers.3.attn.wr_du",
    "inkling2_text": "model.llm.layers.3.attn.wk_dv model.llm.layers.3.attn.wr_du model.llm.layers.3.attn.gate_attn",
    "jina_embeddings_v3": "encoder.layers.3.mixer.Wqkv encoder.layers.3.mixer.out_proj",
    "lara_mini": "model.layers.3.linear_attn.in_proj",
    "molmo2_text Molmo2TextModel": "layers.3.self_attn.att_proj layers.3.self_attn.attn_out layers.3.mlp.ff_proj layers.3.mlp.ff_out",
    "nemo_speechlm": "encoder.layers.3.attn.w_qkv encoder.layers.3.ffn.net.0 encoder.layers.3.ffn.net.3",
    "radio": "radio_model.model.blocks.3.attn.qkv radio_model.model.blocks.3.attn.proj",
    "sapiens2": "blocks.3.attn.wq blocks.3.attn.proj blocks.3.ffn.w12 blocks.3.ffn.w3",
    "tipsv2_vision_model Tipsv2VisionModel": "blocks.3.attn.qkv blocks.3.attn.proj blocks.3.mlp.c_fc",
    "tipsv2_text_model Tipsv2TextModel": "transformer.resblocks.3.attn.out_proj transformer.resblocks.3.mlp.c_proj",
    "step3p7": "model.layers.3.share_expert.up_proj",
    "segformer SegformerModel": "encoder.block.1.3.attention.self.query encoder.block.1.3.mlp.dense2",
    "timesfm2_5": "layers.3.mlp.ff0 layers.3.mlp.ff1",
    "altclip": "text_model.roberta.encoder.layer.3.intermediate.dense",
    "rf_detr RfDetrModel": "backbone.0.encoder.encoder.encoder.layer.3.attention.attention.query transformer.decoder.layers.3.linear2",
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
    """Return a name from its first numbered layer on, or else its last two parts."""
    parts = name.split(".")
    return ".".join(parts[next((at for at, part in enumerate(parts) if part.isdigit()), -1) - 1 :])


@pytest.mark.parametrize(("kind", "module"), [(kind, one) for kind, names in LAYERS.items() for one in names.split()])
def test_the_table_has_the_names_of_transformers(kind, module):
    model_type, *classes = kind.split()
    wanted = names_in_transformers(*classes or [model_type], module)
    found = set(renamed(f"{module}.weight", rules_for({"model_type": model_type})))
    assert module not in wanted
    assert {of_its_layer(one) for one in wanted} == {of_its_layer(one) for one in found}


def test_numbers_of_layers_stay():
    name, rules = "model.layers.{}.block_sparse_moe.experts.{}.w1", rules_for({"model_type": "mixtral"})
    for numbers in ((0, 9), (10, 100), (61, 61), (12, 3)):
        found = list(renamed(f"{name.format(*numbers)}.weight", rules))
        assert found == ["model.layers.{}.mlp.experts.{}.w1".format(*numbers)]


def test_the_rules_are_those_of_all_parts_of_a_model():
    dory, lfm = ({"model_type": name} for name in ("dory", "lfm3"))
    layers = ("layers.0.self_attn.g_proj", "layers.0.self_attn.gate_proj")

    def found(config):
        return {one for layer in layers for one in renamed(f"{layer}.weight", rules_for(config))}

    assert found(dory) == {layers[1]}
    assert found({"model_type": "lfm3_vl", "text_config": lfm}) == {layers[0]}
    assert found({"thinker_config": {**dory, "text_config": lfm}}) == {*layers}
    for config in ({}, {"model_type": "llama"}, {"model_type": None}, {"model_type": ["dory"]}):
        assert not found(config)


@pytest.mark.parametrize(
    ("model_type", "kept", "tower"),
    [
        ("hunyuan_vl", "vit", "vision_tower"),
        ("inkling2", "visual", "vision_tower"),
        ("ernie4_5_vl_moe", "vision_model", "vision_tower"),
        ("molmo2", "vision_backbone.image_vit", "vision_tower"),
        ("dots3_note", "model.vision_encoder", "vision_tower"),
        ("tipsv2", "vision_encoder", "vision_model"),
        ("dots3_note", "audio_encoder", "audio_tower"),
    ],
)
def test_towers_are_ignored_by_the_names_of_transformers_unless_they_are_fp8(model_type, kept, tower):
    weights, of_model = [(f"{kept}.layers.0.mlp.fc1.weight", (64, 64))], {"model_type": model_type}
    config = quantization_config(SCHEMES["channel"], weights, ["model.layers.0.mlp.up_proj"], of_model)
    for name in (kept, tower, f"model.{tower}"):
        assert is_ignored(f"{name}.layers.0.mlp.fc1", config)
    assert not is_ignored("model.language_model.layers.0.mlp.up_proj", config)
    config = quantization_config(SCHEMES["channel"], weights, [f"{kept}.layers.1.mlp.fc1"], of_model)
    for name in (kept, tower, f"model.{tower}"):
        assert is_ignored(f"{name}.layers.0.mlp.fc1", config)
        assert not is_ignored(f"{name}.layers.1.mlp.fc1", config)


def test_a_tower_that_is_fp8_in_part_by_the_names_of_transformers_is_ignored_layer_by_layer():
    """Unlimited-OCR's has two encoders, of which only one is a tower by its name in the checkpoint."""
    sam, vision = "model.sam_model.blocks.0.mlp.lin1", "model.vision_model.transformer.layers.0.mlp.fc1"
    of_model = {"model_type": "unlimited_ocr"}
    config = quantization_config(SCHEMES["channel"], [(f"{vision}.weight", (64, 64))], [sam], of_model)
    assert is_ignored("model.vision_tower.vision_encoder.encoder.layers.0.mlp.fc1", config)
    assert not is_ignored("model.vision_tower.sam_encoder.layers.0.mlp.lin1", config)


def test_layers_without_a_number_in_transformers_are_not_ignored_if_they_are_fp8():
    of_model = {"model_type": "qianfan_ocr"}
    for fp8, kept in (("mlp1.1", "mlp1.3"), ("mlp1.3", "mlp1.1")):
        theirs = {"mlp1.1": "model.multi_modal_projector.linear_1", "mlp1.3": "model.multi_modal_projector.linear_2"}
        config = quantization_config(SCHEMES["channel"], [(f"{kept}.weight", (64, 64))], [fp8], of_model)
        assert not is_ignored(theirs[fp8], config)
        assert is_ignored(theirs[kept], config)
        assert is_ignored("model.embed_tokens", config)


def test_a_layer_is_ignored_by_its_whole_name_if_one_of_another_part_ends_alike():
    fp8, kept = "encoder.layers.0.self_attn.linear_k", "transf_decoder._decoder.layers.0.first_sub_layer.key_net"
    weights, of_model = [(f"{kept}.weight", (64, 64))], {"model_type": "cohere_asr"}
    config = quantization_config(SCHEMES["channel"], weights, [fp8], of_model)
    assert is_ignored("model.decoder.layers.0.self_attn.k_proj", config)
    assert not is_ignored("model.encoder.layers.0.self_attn.k_proj", config)


@pytest.mark.parametrize(
    ("config", "fp8", "kept", "theirs"),
    [
        ({"model_type": "minimax_m3_vl"}, "vision_tower.vision_model.encoder.layers.0.self_attn.k_proj",
         "language_model.model.layers.0.self_attn.k_proj", "model.language_model.layers.0.self_attn.k_proj"),
        ({"model_type": "mistral_large4", "text_config": {"model_type": "mistral_large4_text"}},
         "vision_encoder.transformer.layers.0.feed_forward.w2", "layers.0.feed_forward.w2",
         "model.language_model.layers.0.mlp.down_proj"),
        ({"model_type": "dots3_note"}, "audio_encoder.dots_encoder.speech_encoder.layers.0.self_attn.k_proj",
         "model.layers.0.self_attn.k_proj", "model.language_model.layers.0.self_attn.k_proj"),
        ({"model_type": "llava"}, "vision_tower.layers.0.mlp.up_proj", "language_model.layers.0.mlp.up_proj",
         "model.layers.0.mlp.up_proj"),
    ],
)  # fmt: skip
def test_a_layer_is_ignored_outside_of_towers_if_an_fp8_layer_of_a_tower_ends_alike(config, fp8, kept, theirs):
    found = quantization_config(SCHEMES["channel"], [(f"{kept}.weight", (64, 64))], [fp8], config)
    for name in (kept, theirs):
        assert is_ignored(name, found)
    for name in (fp8, *renamed(f"{fp8}.weight", rules_for(config))):
        for prefix in ("", "model."):
            assert not is_ignored(prefix + name, found)
    tower = theirs.partition("layers.")[2]
    assert not is_ignored(f"vision_model.encoder.layers.{tower}", found)  # vLLM's name of some vision towers
    found = quantization_config(SCHEMES["channel"], [(f"{kept}.weight", (64, 64))], [fp8, theirs], config)
    assert is_ignored(kept, found)
    assert not is_ignored(theirs, found)


@pytest.mark.parametrize(
    ("model_type", "head"),
    [("deepseek_v4", "head"), ("inkling2", "model.llm.unembed"), ("llava", "language_model.lm_head"), ("", "lm_head")],
)
def test_lm_head_is_not_ignored_if_the_fp8_head_has_this_name_in_transformers(model_type, head):
    kept, config = [("model.layers.0.mlp.up_proj.weight", (64, 64))], {"model_type": model_type}
    for fp8 in ([head], [head, "model.layers.0.mlp.down_proj"]):
        found = quantization_config(SCHEMES["channel"], kept, fp8, config)
        assert not is_ignored("lm_head", found)
        assert not is_ignored(head, found)
    assert is_ignored(
        "lm_head", quantization_config(SCHEMES["channel"], [(f"{head}.weight", (64, 64))], fp8[1:], config)
    )


def test_layers_that_a_fused_parameter_is_split_into_are_ignored():
    kept = [("vision_model.transformer.resblocks.0.attn.in_proj_weight", (96, 32))]
    fp8, of_model = (
        ["vision_model.transformer.resblocks.0.mlp.c_fc"],
        {"vision_config": {"model_type": "step3p5_vision"}},
    )
    config = quantization_config(SCHEMES["channel"], kept, fp8, of_model)
    for part in "qkv":
        assert is_ignored(f"model.vision_model.layers.0.self_attn.{part}_proj", config)
    assert not is_ignored("model.vision_model.layers.0.mlp.fc1", config)


def test_modules_outside_of_layers_are_ignored_whatever_their_prefix_if_others_are_fp8():
    config = quantization_config(SCHEMES["channel"], [("head.proj.weight", (64, 64))], ["model.layers.0.proj", "fc"])
    assert is_ignored("model.head.proj", config)
    assert not is_ignored("model.layers.0.proj", config)
    assert not is_ignored("model.fc", config)
    config = quantization_config(SCHEMES["channel"], [("proj.weight", (64, 64))], ["model.layers.0.proj", "fc"])
    assert is_ignored("proj", config)
    assert not is_ignored("model.layers.0.proj", config)
