"""The table of the names that transformers gives to layers of some models in place of those in their checkpoints."""

from collections.abc import Mapping
from typing import Final

Rules = tuple[tuple[str, ...], ...]
"""Regular expressions for parts of tensor names, each with the text in its place; with several for a split layer."""

_QKV: Final = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
_ATTENTION_QKV: Final = "attention.q_proj", "attention.k_proj", "attention.v_proj"
_GATE_UP: Final = "mlp.gate_proj", "mlp.up_proj"
_IN_PROJ: Final = (r"(self_)?attn\.in_proj_weight", *(f"{part}.weight" for part in _QKV))
_OF_VIT: Final = tuple(
    (rf"attention\.(attention|self)\.{name}", f"attention.{name[0]}_proj") for name in ("query", "key", "value")
)
_MLP_OF_VIT: Final = (
    (r"attention\.output\.dense", "attention.o_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
)
_OF_COSMOS: Final = (r"self_attn\.to_([qkv])", r"self_attn.\1_proj"), (r"self_attn\.to_out", "self_attn.o_proj")
_OF_DETR: Final = (
    (r"\bout_proj", "o_proj"),
    (r"layers\.(\d+)\.fc(\d)", r"layers.\1.mlp.fc\2"),
    (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
)
_NUMBERED: Final = (r"\.w1\b", ".gate_proj"), (r"\.w2\b", ".down_proj"), (r"\.w3\b", ".up_proj")
_OF_RADIO: Final = (
    (r"\battn\.qkv", *_ATTENTION_QKV),
    (r"\battn\.proj", "attention.o_proj"),
    (r"\bblocks", "layer"),
)
_FORGET_GATE: Final = (r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1")
_C_FC: Final = ("c_fc", "fc1"), ("c_proj", "fc2")

RENAMES: Final[Mapping[str, Rules]] = {
    "altclip": ((r"layer\.", "layers."),),
    "audio-spectrogram-transformer beit deit ijepa pixio vit vit_mae vit_msn vivit": (
        (r"encoder\.layer\.", "layers."),
        *_OF_VIT,
        *_MLP_OF_VIT,
    ),
    "axk2": (("W_down", "mlp.fc1"), ("W_up", "mlp.fc2"), (r"self_attn\.q_b_proj", "self_attn.q_gate_proj")),
    "bailing_hybrid": (
        (r"layers\.(\d+)\.attention\.", r"layers.\1.self_attn."),
        (r"self_attn\.dense", "self_attn.o_proj"),
        (r"self_attn\.f_proj", "self_attn.forget_gate.f_proj"),
    ),
    "cohere_asr": (
        (r"transf_decoder\._decoder\.", "decoder."),
        ("first_sub_layer", "self_attn"),
        ("second_sub_layer", "encoder_attn"),
        (r"third_sub_layer\.dense_in", "mlp.fc1"),
        (r"third_sub_layer\.dense_out", "mlp.fc2"),
        ("query_net", "q_proj"),
        ("key_net", "k_proj"),
        ("value_net", "v_proj"),
        ("out_projection", "o_proj"),
        (r"self_attn\.linear_([qkv])", r"self_attn.\1_proj"),
        (r"self_attn\.linear_out", "self_attn.o_proj"),
        (r"self_attn\.linear_pos", "self_attn.relative_k_proj"),
        (r"log_softmax\.mlp\.layer0", "proj_out"),
    ),
    "conditional_detr": (
        *_OF_DETR,
        (r"\bsa_(q|k)(content|pos)_proj", r"self_attn.\1_\2_proj"),
        (r"\bca_(q|k)(content|pos|pos_sine)_proj", r"encoder_attn.\1_\2_proj"),
        (r"\bsa_v_proj", "self_attn.v_proj"),
        (r"\bca_v_proj", "encoder_attn.v_proj"),
    ),
    "cosmos3_edge": (
        (r"^layers\.", "language_model.layers."),
        (r"mlp\.up_proj", "mlp.fc1"),
        (r"mlp\.down_proj", "mlp.fc2"),
        *_OF_COSMOS,
    ),
    "cosmos3_omni": _OF_COSMOS,
    "d_fine": (
        ("out_proj", "o_proj"),
        (r"layers\.(\d+)\.fc1", r"layers.\1.mlp.layers.0"),
        (r"layers\.(\d+)\.fc2", r"layers.\1.mlp.layers.1"),
        _OF_DETR[-1],
    ),
    "deepseek_ocr2": (
        (r"\bsam_model\.blocks", "vision_tower.sam_encoder.layers"),
        (r"\bqwen2_model\.model\.model", "vision_tower.vision_encoder"),
        (r"\bprojector\.layers", "multi_modal_projector"),
    ),
    "deepseek_v4": (
        (r"^head\.", "lm_head."),
        (r"attn\.indexer\.compressor", "attn.compressor.indexer"),
        (r"attn\.indexer\.weights_proj", "attn.compressor.indexer.scorer.weights_proj"),
        (r"attn\.indexer", "attn.compressor.indexer"),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.w(kv|[qo]_[ab])\.", r".\1_proj."),
        *((rf"shared_experts{old}", f"shared_experts{new}") for old, new in _NUMBERED),
    ),
    "deformable_detr detr maskformer pp_doclayout_v2 pp_doclayout_v3 pp_doclayout_v4 rt_detr rt_detr_v2": _OF_DETR,
    "dinov2 dinov2_with_registers": (
        *_OF_VIT,
        _MLP_OF_VIT[0],
        (r"mlp\.weights_in", *_GATE_UP),
        (r"mlp\.weights_out", "mlp.down_proj"),
    ),
    "dory": ((r"self_attn\.g_proj", "self_attn.gate_proj"),),
    "dots3_note": (
        (r"^model\.layers", "model.language_model.layers"),
        (r"\baudio_adapter\.proj\.1", "adapter.fc1"),
        (r"\baudio_adapter\.proj\.3", "adapter.fc2"),
        (r"\baudio_encoder\.dots_encoder\.speech_encoder\.", "audio_tower."),
        (r"\baudio_encoder\.", "audio_tower."),
        (r"\bvision_encoder\.", "vision_tower."),
        (r"audio_tower\.(.*)\.out_proj", r"audio_tower.\1.o_proj"),
        (r"(audio_tower\..*layers\.\d+)\.fc1", r"\1.mlp.gate_up_proj"),
        (r"(audio_tower\..*layers\.\d+)\.fc2", r"\1.mlp.down_proj"),
        *(
            (rf"(vision_tower\..*blocks\.\d+\.mlp)\.fc{at}", rf"\1.{to}_proj")
            for at, to in enumerate(("gate", "down", "up"), 1)
        ),
    ),
    "ernie4_5_vl_moe": (
        ("vision_model", "vision_tower"),
        (r"(spatial|temporal)_linear\.0", r"\1_linear.fc1"),
        (r"(spatial|temporal)_linear\.2", r"\1_linear.fc2"),
    ),
    "exaone": (
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    "glm5_next glm5_next_text": (_FORGET_GATE,),
    "gradium_phonon_tts": (
        (r"\badaLN_modulation\.1", "adaln_proj"),
        (r"\bflow_lm\.flow_net\.", "flow_head."),
        (r"\bres_blocks\b", "layers"),
        (r"\btime_embed\b", "timestep_embeddings"),
        (r"\b(layers|timestep_embeddings)\.(\d+)\.mlp\.0", r"\1.\2.fc1"),
        (r"\b(layers|timestep_embeddings)\.(\d+)\.mlp\.2", r"\1.\2.fc2"),
        (r"\bcond_embed\b", "cond_proj"),
        (r"\bself_attn\.in_proj", *_QKV),
        (r"\bself_attn\.out_proj", "self_attn.o_proj"),
        (r"\blayers\.(\d+)\.linear(\d)", r"layers.\1.mlp.fc\2"),
    ),
    "gpt_neox": ((r"^embed_out\.", "lm_head."),),
    "granitemoe granitemoehybrid granitemoeshared minimax minimax_m2 mixtral phimoe": (("block_sparse_moe", "mlp"),),
    "gte": (
        (r"encoder\.layer\.", "layers."),
        (r"attention\.qkv_proj", *_QKV),
        (r"attention\.o_proj", "self_attn.o_proj"),
        (r"mlp\.up_gate_proj", *_GATE_UP),
    ),
    "hrm_text": (
        (r"mlp\.gate_up_proj", *_GATE_UP),
        (r"\battn\.gqkv_proj", *_QKV, "self_attn.gate_proj"),
        (r"\battn\.o_proj", "self_attn.o_proj"),
    ),
    "hunyuan_vl hy_v4_vl": (
        (r"^model\.layers", "model.language_model.layers"),
        ("dense_h_to_4h", "fc1"),
        ("dense_4h_to_h", "fc2"),
        (r"^(model\.)?vit\.", "model.vision_tower."),
    ),
    "hy_v3": (("shared_mlp", "shared_experts"),),
    "hy_v4 hy_v4_vl_text": (("linear_gate", "gate_proj"),),
    "inkling2 inkling2_loop": (
        (r"\b(visual|vision_tower)\.(backbone\.)?", "vision_tower."),
        (r"vision_tower\.proj_in", "vision_tower.merger.linear_1"),
        (r"vision_tower\.proj_out", "vision_tower.merger.linear_2"),
        *_C_FC,
    ),
    "inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_mm_model": (
        (r"\bmodel\.llm\.unembed", "lm_head"),
    ),
    "inkling2_loop_text inkling2_text": (
        (r"\battn\.w([qkv])_d[uv]", r"self_attn.\1_proj.linear"),
        (r"\battn\.wo_ud", "self_attn.o_proj.linear"),
        (r"\battn\.wr_du", "self_attn.relative_position_bias.linear"),
        (r"\battn\.attn_sink_proj", "self_attn.sink_proj"),
        (r"\battn\.gate_attn", "self_attn.o_proj.gate_proj"),
    ),
    "inkling_mm_model": (
        (r"\battn\.w([qkv])_d[uv]", r"self_attn.\1_proj"),
        (r"\battn\.wo_ud", "self_attn.o_proj"),
        (r"\battn\.wr_du", "self_attn.r_proj"),
        (r"\bmodel\.audio\.", "model.audio_tower."),
        (r"\bmodel\.visual\.", "model.vision_tower."),
        (r"vision_tower\.layers\.linear_(\d+)", r"vision_tower.encoder_layers.\1.projection"),
    ),
    "jina_embeddings_v3": ((r"mixer\.Wqkv", *_QKV), (r"mixer\.out_proj", "self_attn.o_proj")),
    "kimi_k25": (
        (r"blocks\.(\d+)\.mlp\.fc1", r"blocks.\1.mlp.fc2"),
        (r"blocks\.(\d+)\.mlp\.fc0", r"blocks.\1.mlp.fc1"),
        (r"\bwo\b", "attn.proj"),
        (r"\bwqkv\b", "attn.q_proj", "attn.k_proj", "attn.v_proj"),
        (r"\bblocks\b", "layers"),
        (r"mm_projector\.proj\.0", "mm_projector.in_proj"),
        (r"mm_projector\.proj\.2", "mm_projector.out_proj"),
    ),
    "kimi_linear": (("block_sparse_moe", "mlp"), _FORGET_GATE),
    "laguna": ((r"shared_expert\.", "shared_experts."),),
    "lara_mini": ((r"linear_attn\.in_proj\.", *(f"linear_attn.in_proj_{part}." for part in ("a", "b", "qkv", "z"))),),
    "lfm3": ((r"self_attn\.gate_proj", "self_attn.g_proj"),),
    "lw_detr": (*_OF_VIT, (r"attention\.output", "attention.o_proj")),
    "minimax_m3_vl": (
        (r"block_sparse_moe\.shared_experts\.(gate|up)_proj", "mlp.shared_experts.gate_up_proj"),
        ("block_sparse_moe", "mlp"),
        (r"\bpatch_merge_mlp\.", "model.multi_modal_projector.merge_"),
        (r"self_attn\.index_([qk])_proj", r"self_attn.indexer.\1_proj"),
    ),
    "mistral_large4": (
        (r"^output\.", "lm_head."),
        (r"\bvision_encoder\.", "vision_tower."),
        (r"\bpatch_merger\.", "multi_modal_projector.patch_merger."),
        (r"\bvision_language_adapter\.w_in", "multi_modal_projector.linear_1"),
        (r"\bvision_language_adapter\.w_out", "multi_modal_projector.linear_2"),
        (r"attention\.w([qkvo])\.", r"attention.\1_proj."),
        *_NUMBERED,
    ),
    "mistral_large4_text": (
        (r"\.attention\.", ".self_attn."),
        (r"\.w([qo])\.", r".\1_proj."),
        (r"\.wkv_a_with_mqa\.", ".kv_a_proj_with_mqa."),
        (r"\.wkv_b\.", ".kv_b_proj."),
        ("feed_forward", "mlp"),
        (r"layers\.(\d+)\.shared_experts", r"layers.\1.mlp.shared_experts"),
        *_NUMBERED,
    ),
    "molmo2": (
        (r"\bvision_backbone\.image_vit\.transformer\.resblocks", "vision_tower.layers"),
        (r"\bvision_backbone\.image_vit", "vision_tower"),
        (r"\bvision_backbone\.(?=image_)", "multi_modal_projector."),
        (r"\.attention\.w([qkvo])", r".self_attn.\1_proj"),
        (r"\.feed_forward\.w([12])", r".mlp.fc\1"),
    ),
    "molmo2 molmo2_text": (
        (r"self_attn\.att_proj", *_QKV),
        (r"mlp\.ff_proj", *_GATE_UP),
        ("blocks", "layers"),
        ("attn_out", "o_proj"),
        ("ff_out", "down_proj"),
    ),
    "nemo_speechlm": (
        (r"^perception\.encoder\.", "model.audio_tower."),
        (r"\battn\.w_qkv", *_QKV),
        (r"\battn\.out_proj", "self_attn.o_proj"),
        (r"ffn\.net\.0", "mlp.fc1"),
        (r"ffn\.net\.3", "mlp.fc2"),
    ),
    "nemotron_h_omni qianfan_ocr": (
        (r"^mlp1\.1\.", "multi_modal_projector.linear_1."),
        (r"^mlp1\.3\.", "multi_modal_projector.linear_2."),
    ),
    "nomic_bert": (
        (r"attn\.Wqkv", *_QKV),
        (r"attn\.out_proj", "self_attn.o_proj"),
        ("fc11", "up_proj"),
        ("fc12", "gate_proj"),
        ("fc2", "down_proj"),
    ),
    "pp_doclayout_v4": (
        (r"decoder_roor_order_head\.", "decoder.successor_order_head.proj."),
        (r"decoder_order_head\.", "decoder.relative_order_head.proj."),
    ),
    "qianfan_ocr": (
        ("vision_model", "vision_tower"),
        (r"\battn\.proj", "attention.projection_layer"),
        (r"\battn\.qkv", *_ATTENTION_QKV),
    ),
    "radio": _OF_RADIO,
    "rf_detr": (
        (r"backbone\.0\.encoder\.encoder", "backbone.backbone"),
        (r"^transformer\.decoder", "decoder"),
        *_OF_VIT,
        _MLP_OF_VIT[0],
        (r"self_attn\.out_proj", "self_attn.o_proj"),
        (r"layers\.(\d+)\.linear(\d)", r"layers.\1.mlp.fc\2"),
        _IN_PROJ,
        ("pwconv1", "pointwise_conv"),
        (r"^segmentation_head\.(query_features_block)\.layers\.0", r"\1.mlp.fc1"),
        (r"^segmentation_head\.(query_features_block)\.layers\.2", r"\1.mlp.fc2"),
    ),
    "sam3_tracker sam3_tracker_video": ((r"\btracker_model\.", ""),),
    "sapiens2": (
        (r"\battn\.w([qkv])", r"attention.\1_proj"),
        (r"ffn\.w3", "mlp.down_proj"),
        (r"ffn\.w12", *_GATE_UP),
        *_OF_RADIO,
    ),
    "sarvam_moe": ((r"attention\.query_key_value", *_QKV), (r"attention\.dense", "self_attn.o_proj")),
    "segformer": (
        (r"encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
        *_OF_VIT,
        _MLP_OF_VIT[0],
        (r"mlp\.dense(\d)", r"mlp.fc\1"),
        ("linear_c", "linear_projections"),
    ),
    "step3p5_vision": ((r"transformer\.resblocks", "layers"), (r"\battn\.", "self_attn."), _IN_PROJ, *_C_FC),
    "step3p7": ((r"share_expert\.", "mlp.shared_experts."), (r"\bvit_large_projector", "multi_modal_projector")),
    "swin": (*_OF_VIT, *_MLP_OF_VIT),
    "timesfm2_5": (("ff0", "fc1"), ("ff1", "fc2")),
    "tipsv2": ((r"\bvision_encoder\.", "vision_model."),),
    "tipsv2_dpt": (
        (r"\bvision_encoder\.", "backbone."),
        *_OF_RADIO,
        *_C_FC,
        (r"\breassemble\.readout_projects\.(\d+)", r"reassemble_stage.readout_projects.\1.layers.0"),
    ),
    "tipsv2_text_model": (("resblocks", "layers"), _IN_PROJ, (r"\battn\.out", "self_attn.out"), *_C_FC),
    "tipsv2_vision_model": (*_OF_RADIO, *_C_FC),
    "ultrabert": ((r"^cls\.", "head.decoder."),),
    "unlimited_ocr": (
        (r"\bsam_model\.blocks", "vision_tower.sam_encoder.layers"),
        (r"\bvision_model\.transformer", "vision_tower.vision_encoder.encoder"),
        (r"\bself_attn\.qkv_proj", *_QKV),
        (r"\bprojector\.layers", "multi_modal_projector"),
    ),
}
"""By model types, with spaces between them: what is replaced in the names of tensors, in this order.

Source: transformers' conversion_mapping.py, version 5.24.
"""
