"""Classifies modules by the names that models give them.

Only weights of plain linear layers can be FP8: readers (vLLM, transformers with compressed-tensors) look for no other
scales. The names were collected from all models of transformers 5.23 (tests/checkpoints/test_quantize_kinds.py compares
the table with their modules) and from vLLM's sources, where a layer that is made without a quantization config has no
place for a scale.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, Final, NamedTuple


class Kind(NamedTuple):
    """A kind of module."""

    name: str
    reason: str
    """Why its weight is not quantized; empty for linear layers."""
    able: bool = False
    """Whether some readers support it in FP8, so that a user may request it by name."""


LINEAR: Final = Kind("linear layer", "", able=True)
EMBEDDING: Final = Kind("embedding", "readers look up its rows without scales")
CONV1D: Final = Kind("Conv1D", "stored [in, out]: readers have no FP8 layer for it")
MAYBE_CONV1D: Final = Kind("Conv1D or linear layer", "may be stored [in, out]: a config.json would tell", able=True)
ROUTER: Final = Kind("router or gate", "readers have no place for its scale")
SCAN: Final = Kind("state space layer", "readers read its weight without its scale")
ATTENTION: Final = Kind("torch.nn.MultiheadAttention", "readers read its weight without its scale")
SPECIAL: Final = Kind("special linear layer", "readers have no FP8 layer for it")
CAST: Final = Kind("layer that decides its input's dtype", "transformers casts it to the weight's dtype", able=True)
READ: Final = Kind("layer whose weight the model reads", "transformers reads its weight without its scale")
READ_IN_TRAINING: Final = Kind(
    "layer whose weight training reads", "transformers reads its weight without its scale in training", able=True
)
SHARED: Final = Kind("layer of a block that several layers share", "transformers ties its weight, but not its scale")
ADAPTER: Final = Kind("LoRA adapter", "readers read its weight without its scale")
MTP: Final = Kind("projection of multi-token prediction", "vLLM has no place for its scale", able=True)
HEAD: Final = Kind("head or pooler", "vLLM has no place for its scale", able=True)
TOWER: Final = Kind("vision or audio tower or projector", "vLLM has no place for the scales of many", able=True)
OUTSIDE: Final = Kind("outside of the layers", "embeddings, heads and poolers are there", able=True)


class Rule(NamedTuple):
    """Patterns for the names of one kind of modules, in some model types.

    A pattern is a glob that matches the whole name of a module, or any number of its last parts.
    """

    kind: Kind
    patterns: tuple[str, ...]
    models: tuple[str, ...] = ("*",)
    """Globs over the model_type in config.json, which is empty if it is unknown."""


_CONV1D: Final = ("c_attn", "c_proj", "c_fc", "q_attn")

RULES: Final = (
    Rule(EMBEDDING, ("w",), ("ctrl",)),
    Rule(CONV1D, _CONV1D, ("gpt2", "gpt-sw3", "openai-gpt", "imagegpt", "clvp*", "decision_transformer")),
    Rule(MAYBE_CONV1D, _CONV1D, ("",)),
    Rule(SPECIAL, ("*",), ("ibert",)),
    Rule(SPECIAL, ("o_a_proj", "wo_a"), ("deepseek_v4",)),  # by groups; the second is its name in checkpoints
    Rule(SHARED, ("shared_transf.*", "shared_transformer.*"), ("zamba", "zamba2")),
    Rule(
        CAST,
        ("wo",),
        ("t5", "mt5", "umt5", "longt5", "switch_transformers", "udop", "pop2piano", "pix2struct*", "kosmos-2.5*"),
    ),
    Rule(CAST, ("fc2",), ("seamless_m4t*", "nllb-moe")),
    Rule(CAST, ("project_q",), ("wav2vec2*", "unispeech*")),
    Rule(ATTENTION, tuple(f"attention.{part}_proj" for part in ("q", "k", "v", "out")), ("wavlm",)),
    Rule(SPECIAL, ("attention.output", "feed_forward.value"), ("rwkv",)),  # RWKV divides these weights in place
    Rule(SCAN, ("mixer.*",), ("mamba", "mamba2", "falcon_mamba")),
    Rule(READ_IN_TRAINING, ("mixer.out_proj",), ("nemotron_h*",)),  # by the kernel of its scan, as Mamba 2's is
    Rule(READ_IN_TRAINING, ("altup.*_coefs",), ("gemma3n*",)),  # clamped
    Rule(READ, ("query_key", "self_attention.value"), ("reformer",)),
    Rule(READ, ("rel_pos_bias", "rel_pos_x_bias", "rel_pos_y_bias"), ("layoutlm*",)),
    Rule(CAST, ("*_message_gate.down_proj",), ("inkling2_loop*",)),
    Rule(SPECIAL, ("lm_head",), ("idefics",)),
    Rule(ADAPTER, tuple(f"lora_{part}{tail}" for part in ("A", "B", "down", "mid", "up") for tail in ("", ".*"))),
    Rule(MTP, ("eh_proj", "mtp_layers.*.input_proj", "mtp_linear_proj.*")),  # DeepSeek-V3 and GLM, MiMo, Ernie
    Rule(
        ROUTER, ("gate", "gate.*", "*router", "*router.*", "router_mlp.*", "shared_expert_gate", "shared_experts_gate")
    ),
    Rule(ROUTER, ("expert_gate", "moe_gate", "gating", "gate_network*", "weights_proj")),
    Rule(HEAD, ("*lm_head", "lm_head.*", "embed_out", "lm_loss", "logits_proj", "proj_out", "vocab_projector")),
    Rule(HEAD, ("unembed*",)),
    Rule(HEAD, ("score", "score.*", "classifier", "classifier.*", "pre_classifier", "classification_head.*")),
    Rule(HEAD, ("qa_outputs", "cls.*", "predictions.*", "*_predictions.*", "pooler", "pooler.*", "heads.*")),
    Rule(EMBEDDING, ("shared", "wte", "wpe", "*embed", "*embeds", "*embed_in", "*embed_tokens", "*embed_positions")),
    Rule(
        EMBEDDING,
        ("*embedding", "*embeddings", "*embedding_table", "embed_*", "*_emb", "emb", "*embedder", "codebook*"),
    ),
    Rule(EMBEDDING, ("norm.scale", "norm.shift")),  # of WavTokenizer's adaptive norm
    Rule(EMBEDDING, ("*_embeds_layer", "*_embeds_layers.*", "*_embed.*", "*embeddings_table")),
    Rule(EMBEDDING, ("*embeddings.*", "*relative_attention_bias", "bias_values", "reference_points")),
    Rule(EMBEDDING, ("presence_token", "*_token", "mask_tokens", "query_feat", "queries_features")),
    Rule(SCAN, ("mamba.*", "dt_proj", "x_proj", "bcdt_proj", "conv1d")),
    Rule(HEAD, ("output", "output_layer", "model.output", "transformer.output_layer", "head")),
)
"""The first rule that matches a module decides. A module that none matches is linear if it is in a numbered layer."""

_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")

TOWERS: Final = (
    *("vision_*", "visual", "visual_*", "image_encoder", "vit", "audio_*", "speech_encoder"),
    *("multi_modal_projector", "mm_projector*", "aligner", "embed_tokens_extend"),
)
"""Globs over parts of names: all modules under such a part belong to a tower or projector."""
IN_TOWER: Final = rf"(.*\.)?({'|'.join(one.replace('*', '[^.]*') for one in TOWERS)})(\.|$)"
"""A regular expression for the beginning of the names of modules under such a part."""


class Names(NamedTuple):
    """The facts about a checkpoint that the kinds of its modules depend on."""

    model_type: str
    layered: bool
    """Whether some modules are numbered, as layers are; then modules outside of numbered ones are not layers."""
    rows_of_vocabulary: int | None
    """The vocabulary size in config.json, which is the number of rows of embeddings and heads."""
    attentions: frozenset[str]
    """The modules of class torch.nn.MultiheadAttention, recognized by their in_proj_weight."""
    mixtures: frozenset[str]
    """The modules that hold a router; those of Granite and JetMoE have stacked experts of other names beside it."""
    tower: bool
    """Whether all layers are in towers: then the model is a vision or audio model, and its layers are no tower's."""


def sizes_of(config: Mapping[str, Any], module: str = "") -> dict[str, Any]:
    """Return a config.json with the fields of nested configurations at its top: those that are about a module.

    A part of the module's name begins with theirs: ``thinker.model`` has thinker_config, ``vision_tower`` has
    vision_config. If there are none it is text_config, which models of several modes have.
    """
    nested = {name.removesuffix("_config"): one for name, one in config.items() if isinstance(one, dict)}
    named = [one for name, one in nested.items() if any(part.startswith(name) for part in module.split("."))]
    sizes = dict(config)
    for one in named or [one for name, one in nested.items() if name == "text"]:
        sizes |= sizes_of(one, module)
    return sizes


def names_of(modules: Iterable[str], tensors: Iterable[str], config: Mapping[str, Any]) -> Names:
    """Return the facts about a checkpoint, from the names of its modules and tensors and from its config.json."""
    modules, rows, attention = tuple(modules), sizes_of(config).get("vocab_size"), ".in_proj_weight"
    layers = {without_numbers(module) for module in modules if numbered(module)}
    return Names(
        model_type=str(config.get("model_type", "")),
        layered=bool(layers),
        rows_of_vocabulary=rows if isinstance(rows, int) else None,
        attentions=frozenset(name.removesuffix(attention) for name in tensors if name.endswith(attention)),
        mixtures=modules_with_routers(modules),
        tower=bool(layers) and "text_config" not in config and all(map(tower_of, layers)),
    )


def is_router(module: str) -> bool:
    """Return whether a module is a router or gate, by its name."""
    return _by_name(without_numbers(module), "") is ROUTER


def modules_with_routers(modules: Iterable[str]) -> frozenset[str]:
    """Return the modules that hold a router: ``mlp`` holds ``mlp.gate``, and ``moe`` holds ``moe.router.layer``."""
    found: set[str] = set()
    for module in filter(is_router, modules):
        parts = module.split(".")
        found.update(".".join(parts[:at]) for at, part in enumerate(parts) if part.endswith(("gate", "router")))
    return frozenset(found)


def kind_of(module: str, shape: tuple[int, ...], names: Names) -> Kind:
    """Return the kind of a module whose weight is a matrix of this shape."""
    name = without_numbers(module)
    known = _by_name(name, names.model_type)
    if not names.tower and (known is None or known.able) and tower_of(name) is not None:
        known = TOWER
    if module.rpartition(".")[0] in names.attentions and (known is None or known.able):
        return ATTENTION
    if known is not None:
        return known
    if names.layered and not numbered(module):
        return EMBEDDING if shape[0] == names.rows_of_vocabulary else OUTSIDE
    return LINEAR


@lru_cache(maxsize=4096)
def _by_name(module: str, model_type: str) -> Kind | None:
    """Return the kind that the rules give a module, or None if none matches.

    The caller replaces all numbers of layers and experts by 0, so that the tens of thousands of modules of a mixture
    have some tens of names.
    """
    parts = module.split(".")
    tails = [".".join(parts[at:]) for at in range(len(parts))]
    for kind, patterns, models in RULES:
        if any(fnmatchcase(model_type, one) for one in models) and any(
            fnmatchcase(tail, pattern) for pattern in patterns for tail in tails
        ):
            return kind
    return None


def tower_of(module: str) -> str | None:
    """Return the part of a module's name that makes it part of a tower, or None."""
    return next(filter(_is_tower, module.split(".")), None)


@lru_cache(maxsize=4096)
def _is_tower(part: str) -> bool:
    return any(fnmatchcase(part, one) for one in TOWERS)


def numbered(module: str) -> bool:
    """Return whether a module is in a numbered layer, or is one."""
    return any(part.isdigit() for part in module.split("."))


def without_numbers(name: str) -> str:
    """Return a name with 0 in place of the numbers of layers and experts."""
    return _NUMBER.sub("0", name)
