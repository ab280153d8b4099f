"""Writes FP8 checkpoints as other programs do, in every format, from the format's own documents and with torch only.

Nothing here comes from fp8core: torch's cast makes the codes, a division the scales, and safetensors.torch the files.
"""

import json
import math

import torch
from safetensors.torch import save_file

E4M3 = torch.float8_e4m3fn
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def small_state(rows=300, cols=200):
    """Return the tensors of a model with one layer, whose sizes are not multiples of the block's."""
    generator = torch.Generator().manual_seed(0)
    state = {"model.embed_tokens.weight": torch.randn(64, cols, generator=generator).bfloat16()}
    for part in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        weight = torch.randn(rows, cols, generator=generator) * torch.rand(rows, 1, generator=generator)
        state[f"model.layers.0.{part}.weight"] = weight.bfloat16()
    state["model.layers.0.input_layernorm.weight"] = torch.ones(cols).bfloat16()
    state["model.layers.0.self_attn.q_proj.bias"] = torch.randn(rows, generator=generator).bfloat16()
    return state


def is_linear(name, tensor):
    return tensor.ndim == 2 and name.endswith(".weight") and name.split(".")[-2] in LINEARS


def up_to_power(scale):
    return torch.exp2(torch.ceil(torch.log2(scale)))


def e8m0(scale):
    """Return the exponents of powers of two as bytes."""
    return (torch.log2(scale) + 127).round().to(torch.uint8)


def blocks_of(weight, rows, cols):
    """Return the tiles of a padded weight, one float32 scale for each block, and the padded shape."""
    n, k = weight.shape
    nb, kb = math.ceil(n / rows), math.ceil(k / cols)
    padded = torch.zeros(nb * rows, kb * cols)
    padded[:n, :k] = weight.float()
    tiles = padded.reshape(nb, rows, kb, cols)
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-4) / 448
    return tiles, scale, (nb * rows, kb * cols)


def coded(weight, rows, cols, powers=False, round_scale=None):
    """Return codes [n, k] and scales [nb, kb] for blocks of ``rows`` x ``cols``."""
    tiles, scale, whole = blocks_of(weight, rows, cols)
    if powers:
        scale = up_to_power(scale)
    if round_scale is not None:
        scale = scale.to(round_scale)
    codes = (tiles / scale.float()[:, None, :, None]).clamp(-448, 448).to(E4M3).reshape(whole)
    return codes[: weight.shape[0], : weight.shape[1]].contiguous(), scale


def values(codes, scale, rows, cols):
    """Return the dequantized values in float32: one product, rounded once."""
    wide = scale.float().repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return codes.float() * wide[: codes.shape[0], : codes.shape[1]]


GROUP = {"num_bits": 8, "type": "float", "symmetric": True}


def compressed(weights, activations, name="float-quantized"):
    group = {
        "targets": ["Linear"], "weights": {**GROUP, "dynamic": False, **weights},
        "input_activations": {**GROUP, **activations}, "output_activations": None,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": name, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


class Written:
    """Collects the tensors of a checkpoint and the values of its weights."""

    def __init__(self, state):
        self.tensors, self.expected, self.linears = {}, {}, {}
        self.config, self.extra, self.metadata = None, {}, {"format": "pt"}
        for name, tensor in state.items():
            if is_linear(name, tensor):
                self.linears[name.removesuffix(".weight")] = tensor
            else:
                self.tensors[name] = tensor

    def add(self, module, codes, scale, rows, cols, stored, name):
        n, k = codes.shape
        rows, cols = n if rows < 0 else rows, k if cols < 0 else cols
        self.tensors[f"{module}.weight"] = codes
        self.tensors[f"{module}.{name}"] = stored
        self.expected[f"{module}.weight"] = values(codes, scale, rows, cols)

    def each(self, rows, cols, name, store=lambda scale: scale, **keywords):
        """Quantize every linear layer."""
        for module, weight in self.linears.items():
            n, k = weight.shape
            codes, scale = coded(weight, n if rows < 0 else rows, k if cols < 0 else cols, **keywords)
            self.add(module, codes, scale, rows, cols, store(scale).contiguous(), name)

    def beside(self, name, value):
        for module in self.linears:
            self.tensors[f"{module}.{name}"] = value.clone()


def deepseek(out):
    out.each(128, 128, "weight_scale_inv")
    out.config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    }  # fmt: skip


def deepseek_powers(out):
    """DeepSeek-V3.1: scales are powers of two, stored as float32."""
    out.each(128, 128, "weight_scale_inv", powers=True)
    out.config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }  # fmt: skip


def deepseek_v4(out):
    """DeepSeek-V4: the scales are named ``scale`` and stored as exponents in bytes."""
    out.each(128, 128, "scale", lambda scale: e8m0(scale).view(torch.float8_e8m0fnu), powers=True)
    out.config = {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "scale_fmt": "ue8m0",
    }  # fmt: skip


def hf_static(out):
    """Hugging Face's fp8 with one scale per weight, and a static scale for activations (Ministral)."""
    out.each(-1, -1, "weight_scale_inv", lambda scale: scale.reshape(()))
    out.beside("activation_scale", torch.tensor(0.02))
    out.config = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}


def ct_static(out):
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(1))
    out.beside("input_scale", torch.tensor([0.02]))
    out.config = compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False})


def ct_tensor(out):
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(1))
    out.config = compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True})


def ct_channel(out):
    """llm-compressor's FP8_DYNAMIC: the scales are bfloat16."""
    out.each(1, -1, "weight_scale", round_scale=torch.bfloat16)
    out.config = compressed({"strategy": "channel"}, {"strategy": "token", "dynamic": True})


def ct_block(out):
    out.each(128, 128, "weight_scale", round_scale=torch.bfloat16)
    weights = {"strategy": "block", "block_structure": [128, 128]}
    out.config = compressed(weights, {"strategy": "group", "group_size": 128, "dynamic": True})


def modelopt(out):
    """ModelOpt with hf_quant_config.json only, scalar scales, and scales of the KV cache."""
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(()))
    out.beside("input_scale", torch.tensor(0.02))
    for module in [one for one in out.linears if one.endswith(".k_proj")]:
        for part in ("k", "v"):
            out.tensors[f"{module.removesuffix('k_proj')}{part}_proj.{part}_scale"] = torch.tensor(0.5)
    out.extra["hf_quant_config.json"] = {
        "producer": {"name": "modelopt", "version": "0.33"},
        "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]},
    }


def modelopt_in_config(out):
    modelopt(out)
    out.extra.clear()
    out.config = {
        "quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"],
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"}, "targets": ["Linear"],
            }
        },
    }  # fmt: skip


def modelopt_blocks(out):
    out.each(128, 128, "weight_scale", lambda scale: scale[:, None, :, None])
    out.extra["hf_quant_config.json"] = {
        "producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO", "exclude_modules": ["lm_head"]},
    }  # fmt: skip


def modelopt_channel(out):
    out.each(1, -1, "weight_scale", lambda scale: scale[:, 0])
    quantization = {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]}
    out.extra["hf_quant_config.json"] = {"producer": {"name": "modelopt"}, "quantization": quantization}


def modelopt_mxfp8(out):
    out.each(1, 32, "weight_scale", e8m0, powers=True)
    out.extra["hf_quant_config.json"] = {
        "producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8", "exclude_modules": ["lm_head"]},
    }  # fmt: skip


def fbgemm(out):
    out.each(1, -1, "weight_scale")
    out.beside("input_scale_ub", torch.tensor([1200.0]))
    out.config = {
        "quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"],
    }  # fmt: skip


def autofp8(out):
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(()))
    out.beside("input_scale", torch.tensor(0.02))
    out.config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def comfyui_old(out):
    out.each(-1, -1, "scale_weight", lambda scale: scale.reshape(()))
    out.beside("scale_input", torch.tensor(0.02))
    out.tensors["scaled_fp8"] = torch.zeros(2).to(E4M3)


def comfyui_new(out):
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(()))
    out.beside("input_scale", torch.tensor(0.02))
    out.beside("comfy_quant", torch.tensor(list(b'{"format": "float8_e4m3fn"}'), dtype=torch.uint8))


def comfyui_header(out):
    out.each(-1, -1, "weight_scale", lambda scale: scale.reshape(()))
    layers = {module: {"format": "float8_e4m3fn"} for module in out.linears}
    out.metadata["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})


def mistral(out):
    out.each(-1, -1, "qscale_weight", lambda scale: scale.reshape(()))
    out.beside("qscale_act", torch.tensor(0.02))


def mxfp8(out):
    """MXFP8 without a configuration: the 1x32 groups and the exponents identify the format."""
    out.each(1, 32, "weight_scale", e8m0, powers=True)


def ct_mxfp8(out):
    out.each(1, 32, "weight_scale", e8m0, powers=True)
    group = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    out.config = compressed(group, {"strategy": "group", "group_size": 32, "dynamic": True}, "mxfp8-quantized")


FORMATS = {
    # writer: (format, granularity, how the scales are stored)
    deepseek: ("fp8", "block", "float32"),
    deepseek_powers: ("fp8", "block", "float32"),
    deepseek_v4: ("fp8", "block", "e8m0"),
    hf_static: ("fp8", "tensor", "float32"),
    ct_static: ("compressed-tensors", "tensor", "float32"),
    ct_tensor: ("compressed-tensors", "tensor", "float32"),
    ct_channel: ("compressed-tensors", "channel", "bfloat16"),
    ct_block: ("compressed-tensors", "block", "bfloat16"),
    modelopt: ("modelopt", "tensor", "float32"),
    modelopt_in_config: ("modelopt", "tensor", "float32"),
    modelopt_blocks: ("modelopt", "block", "float32"),
    modelopt_channel: ("modelopt", "channel", "float32"),
    modelopt_mxfp8: ("modelopt", "group", "e8m0"),
    fbgemm: ("fbgemm_fp8", "channel", "float32"),
    autofp8: ("autofp8", "tensor", "float32"),
    comfyui_old: ("comfyui", "tensor", "float32"),
    comfyui_new: ("comfyui", "tensor", "float32"),
    comfyui_header: ("comfyui", "tensor", "float32"),
    mistral: ("mistral", "tensor", "float32"),
    mxfp8: ("mxfp8", "group", "e8m0"),
    ct_mxfp8: ("compressed-tensors", "group", "e8m0"),
}


def write_format(writer, folder, state=None, config=None):
    """Write a checkpoint folder in a format, and return its `Written`."""
    out = Written(small_state() if state is None else state)
    writer(out)
    folder.mkdir(parents=True, exist_ok=True)
    known = {"model_type": "llama"} if config is None else dict(config)
    if out.config is not None:
        known["quantization_config"] = out.config
    documents = {"config.json": known} if out.config or out.extra or config else {}
    for name, value in {**documents, **out.extra}.items():
        (folder / name).write_text(json.dumps(value))
    save_file(out.tensors, folder / "model.safetensors", out.metadata)
    return out
