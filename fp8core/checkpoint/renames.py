"""The names that transformers gives to layers of some models in place of those in their checkpoints."""

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import count
from typing import Final

from fp8core.checkpoint.naming import WEIGHT, module_of

_Rules = tuple[tuple[str, str], ...]


def _split(whole: str, parts: str, *others: tuple[str, str]) -> tuple[_Rules, ...]:
    """Return a family for each of the parts, with spaces between them, into which transformers splits a layer."""
    return tuple(((whole, part), *others) for part in parts.split())


_QKV: Final = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_GATE_UP: Final = "mlp.gate_proj mlp.up_proj"
_DENSE: Final = (
    (r"attention\.output\.dense", "attention.o_proj"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
)
_NUMBERED: Final = ("1", "gate"), ("2", "down"), ("3", "up")
_BAILING: Final = (
    (r"layers\.(\d+)\.attention\.", r"layers.\1.self_attn."),
    (r"self_attn\.dense", "self_attn.o_proj"),
    (r"self_attn\.f_proj", "self_attn.forget_gate.f_proj"),
    (r"self_attn\.wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa"),
    (r"self_attn\.wkv_b", "self_attn.kv_b_proj"),
)
_MISTRAL_TOWER: Final = (
    (r"attention\.w([qkvo])\.", r"attention.\1_proj."),
    *((rf"feed_forward\.w{at}", f"feed_forward.{name}_proj") for at, name in _NUMBERED),
)
_GTE: Final = (r"encoder\.layer\.", "layers."), (r"attention\.o_proj", "self_attn.o_proj")
_MOLMO: Final = ("blocks", "layers"), ("attn_out", "o_proj"), ("ff_out", "down_proj")
RENAMES: Final = (
    *(
        (
            (r"encoder\.layer\.", layers),
            (rf"attention\.{within}\.query", "attention.q_proj"),
            (rf"attention\.{within}\.key", "attention.k_proj"),
            (rf"attention\.{within}\.value", "attention.v_proj"),
            *output,
        )
        for within, layers, output in (
            ("self", "encoder.layer.", _DENSE),  # Swin
            ("attention", "layers.", _DENSE),  # ViT, DeiT, ViViT, Pixio
            ("attention", "encoder.layer.", ((r"attention\.output(\.dense)?", "attention.o_proj"),)),  # LW-DETR, DINOv2
        )
    ),
    (  # DETR, MaskFormer, RT-DETR
        ("out_proj", "o_proj"),
        (r"layers\.(\d+)\.fc(\d)", r"layers.\1.mlp.fc\2"),
        (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
    ),
    (  # EXAONE
        (r"\.attn\.attention\.", ".self_attn."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"^transformer\.h\.", "model.layers."),
        (r"\.mlp\.c_fc_0\.", ".mlp.gate_proj."),
        (r"\.mlp\.c_fc_1\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    ),
    *_split(r"attn\.Wqkv", _QKV),
    (
        (r"attn\.out_proj", "self_attn.o_proj"),
        ("fc11", "up_proj"),
        ("fc12", "gate_proj"),
        ("fc2", "down_proj"),
    ),  # Nomic
    (("block_sparse_moe", "mlp"), (r"self_attn\.(f_[ab]_proj)", r"self_attn.forget_gate.\1")),  # Mixtral, MiniMax, Kimi
    *_split(r"attention\.query_key_value", "attention.q_proj attention.k_proj attention.v_proj", *_BAILING),  # Sarvam
    _BAILING,  # Bailing
    (*_MISTRAL_TOWER, ("feed_forward", "mlp"), *_BAILING),  # Mistral Large 4
    _MISTRAL_TOWER,
    (  # Cohere ASR
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
    ),
    ((r"self_attn\.to_([qkv])", r"self_attn.\1_proj"), (r"self_attn\.to_out", "self_attn.o_proj")),  # Cosmos 3
    (  # D-FINE
        ("out_proj", "o_proj"),
        (r"layers\.(\d+)\.fc1", r"layers.\1.mlp.layers.0"),
        (r"layers\.(\d+)\.fc2", r"layers.\1.mlp.layers.1"),
        (r"encoder\.encoder\.(\d+)\.layers", r"encoder.aifi.\1.layers"),
    ),
    (  # DeepSeek V4
        (r"attn\.indexer\.compressor", "attn.compressor.indexer"),
        (r"attn\.indexer\.weights_proj", "attn.compressor.indexer.scorer.weights_proj"),
        (r"attn\.indexer", "attn.compressor.indexer"),
        (r"\.attn\.(?=compressor|w)", ".self_attn."),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.w(kv|[qo]_[ab])\.", r".\1_proj."),
        (r"ffn\.shared_experts", "mlp.shared_experts"),
        *((rf"shared_experts\.w{at}\.", f"shared_experts.{name}_proj.") for at, name in _NUMBERED),
    ),
    ((r"self_attn\.g_proj", "self_attn.gate_proj"),),  # Dory
    ((r"self_attn\.gate_proj", "self_attn.g_proj"),),  # LFM 3
    (("linear_gate", "gate_proj"),),  # Hunyuan V4
    *_split(r"attention\.qkv_proj", _QKV, *_GTE),  # GTE
    *_split(r"mlp\.up_gate_proj", _GATE_UP, *_GTE),
    *_split(r"\battn\.gqkv_proj", f"{_QKV} self_attn.gate_proj"),  # HRM
    ((r"\battn\.o_proj", "self_attn.o_proj"),),
    *(  # Inkling, and Inkling 2
        (
            (r"\battn\.w([qkv])_d[uv]", rf"self_attn.\1_proj{linear}"),
            (r"\battn\.wo_ud", f"self_attn.o_proj{linear}"),
            (r"\battn\.wr_du", f"self_attn.{relative}"),
            (r"\battn\.attn_sink_proj", "self_attn.sink_proj"),
            (r"\battn\.gate_attn", "self_attn.o_proj.gate_proj"),
        )
        for linear, relative in (("", "r_proj"), (".linear", "relative_position_bias.linear"))
    ),
    *_split(r"mixer\.Wqkv", _QKV),  # Jina
    ((r"mixer\.out_proj", "self_attn.o_proj"),),
    *_split(  # Lara
        r"linear_attn\.in_proj\.", " ".join(f"linear_attn.in_proj_{part}." for part in ("a", "b", "qkv", "z"))
    ),
    *_split(r"self_attn\.att_proj", _QKV, *_MOLMO),  # Molmo 2
    *_split(r"mlp\.ff_proj", _GATE_UP, *_MOLMO),
    *_split(r"\battn\.w_qkv", _QKV, (r"ffn\.net\.0", "mlp.fc1"), (r"ffn\.net\.3", "mlp.fc2")),  # Nemo
    *(  # RADIO, TIPS, Sapiens
        family
        for gated in ("mlp.gate_proj", "mlp.up_proj")
        for family in _split(
            r"\battn\.qkv",
            "attention.q_proj attention.k_proj attention.v_proj",
            (r"\battn\.proj", "attention.o_proj"),
            (r"\battn\.w([qkv])", r"attention.\1_proj"),
            ("c_fc", "fc1"),
            ("c_proj", "fc2"),
            (r"ffn\.w3", "mlp.down_proj"),
            (r"ffn\.w12", gated),
            (r"\bblocks", "layer"),
        )
    ),
    (("resblocks", "layers"), (r"\battn\.out", "self_attn.out"), ("c_fc", "fc1"), ("c_proj", "fc2")),  # TIPS, Step
    ((r"share_expert\.", "mlp.shared_experts."),),
    (  # Segformer
        (r"encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
        (r"attention\.self\.query", "attention.q_proj"),
        (r"attention\.self\.key", "attention.k_proj"),
        (r"attention\.self\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"mlp\.dense(\d)", r"mlp.fc\1"),
        ("linear_c", "linear_projections"),
    ),
    (("ff0", "fc1"), ("ff1", "fc2")),  # TimesFM
    ((r"roberta\.encoder\.layer\.", "roberta.encoder.layers."),),  # AltCLIP
    (  # RF-DETR
        (r"backbone\.0\.encoder\.encoder", "backbone.backbone"),
        (r"attention\.attention\.query", "attention.q_proj"),
        (r"attention\.attention\.key", "attention.k_proj"),
        (r"attention\.attention\.value", "attention.v_proj"),
        (r"attention\.output\.dense", "attention.o_proj"),
        (r"layers\.(\d+)\.linear(\d)", r"layers.\1.mlp.fc\2"),
        ("pwconv1", "pointwise_conv"),
    ),
    ((r"\b(vit|visual|vision_model|vision_encoder|vision_backbone\.image_vit|sam_model)\.", "vision_tower."),),
    ((r"\bvision_encoder\.", "vision_model."),),
    ((r"\b(audio|audio_encoder)\.", "audio_tower."),),
)
"""For each family of models: what is replaced in the names of tensors, in this order.

A layer that is split has a family for each of its parts. In names of towers only the tower counts, in the last three.

Source: transformers' conversion_mapping.py, version 5.24.
"""
_LARGE: Final = re.compile(r"(?<![^.])\d{2,}(?![^.])")
_STANDS_FOR: Final = 9_000_001
"""The first of the numbers that stand for those of two digits and more, which no rule tells apart."""


def renamed(module: str) -> Iterator[str]:
    """Yield the names that transformers may give to a module, other than its own, whatever model it is of.

    The tens of thousands of modules of a mixture have some hundreds of names if large numbers are all alike.
    """
    numbers: list[str] = _LARGE.findall(module)
    place = count(_STANDS_FOR)
    for name in _renamed(_LARGE.sub(lambda _: str(next(place)), module)):
        for at, number in enumerate(numbers, _STANDS_FOR):
            name = name.replace(str(at), number)  # noqa: PLW2901
        yield name


@lru_cache(maxsize=4096)
def _renamed(module: str) -> tuple[str, ...]:
    tensor = module + WEIGHT
    found: dict[str, None] = {}
    for family in RENAMES:
        name = tensor
        for old, new in family:
            name = re.sub(old, new, name)
        if name != tensor:
            found[module_of(name)] = None
    return tuple(found)
