"""Tiny random models of transformers, dense and mixtures of experts, and how far results are apart."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fp8core.torch import Linear
from fp8core.transformers import GroupedExperts

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "vocab_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 160}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 160,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, attention_bias=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=32, decoder_sparse_step=1),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "biogpt": lambda: transformers.BioGptConfig(**SIZES),
    "phi3": lambda: transformers.Phi3Config(**SIZES, pad_token_id=0),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**{**SIZES, **LATENT}),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**SIZES),
    "gemma3n": lambda: transformers.Gemma3nTextConfig(
        **{**SIZES, "intermediate_size": [320, 320]},
        head_dim=32,
        vocab_size_per_layer_input=96,
        hidden_size_per_layer_input=16,
        num_kv_shared_layers=0,
        laurel_rank=8,
        altup_num_inputs=2,
        activation_sparsity_pattern=[0.0, 0.0],
        layer_types=["sliding_attention", "full_attention"],
    ),
    "falcon_h1": lambda: transformers.FalconH1Config(
        **SIZES, mamba_d_ssm=128, mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_chunk_size=8
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        head_dim=32,
        ssm_state_size=16,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        chunk_size=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        moe_shared_expert_intermediate_size=128,
    ),
}
TOKENS = torch.randint(0, 96, (2, 7), generator=torch.Generator().manual_seed(3))


def random_model(kind, seed=0):
    """A model in bfloat16, whose weights are large enough for activations to spread."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.bfloat16).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.7 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1)
    return model


def written(kind, folder, seed=0):
    """Write a random model in bfloat16, and return its logits."""
    model = random_model(kind, seed)
    model.save_pretrained(folder)
    return logits(model)


def logits(model, tokens=TOKENS):
    with torch.no_grad():
        return model(tokens).logits.float()


def distance(found, wanted):
    """The relative error of a token's logits, in the middle of all tokens: a few may be sent to other experts."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1)).median())


def fp8_layers(model):
    """The FP8 layers of a model by name, those of grouped experts as layers of their own."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            found[name] = module
        elif isinstance(module, GroupedExperts):
            apart = module.separate().named_modules()
            found |= {f"{name}.{part}": layer for part, layer in apart if isinstance(layer, Linear)}
    return found


def tensors_of(folder):
    """All tensors of a folder, by name."""
    found = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        found |= load_file(file)
    return found


def config_of(folder):
    return json.loads((Path(folder) / "config.json").read_text())


def same(one, other):
    """Whether two tensors have the same dtype, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def differing(stored, saved, model):
    """The names of the tensors that a model was saved with otherwise than they were stored.

    Tensors that transformers holds in float32 whatever the model's dtype are compared by their float32 values.
    """
    widened = tuple(model._keep_in_fp32_modules_strict or ())
    return [
        name
        for name, x in stored.items()
        if not same(x.float() if widened and name.endswith(widened) else x, saved[name])
    ]
