"""`quantization_config` of a model, against what quantizing the checkpoint of the same model writes."""

import json

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402 - after the skip
from torch import nn  # noqa: E402

from fp8core.checkpoint import quantize_checkpoint  # noqa: E402
from fp8core.errors import CheckpointError  # noqa: E402
from fp8core.torch import quantization_config, quantize_model_  # noqa: E402
from pytorch.tensors import bits  # noqa: E402

WIDTH = 128


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(WIDTH, WIDTH, bias=name == "q_proj"))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)  # a router
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp, self.input_layernorm = Attention(), Mlp(), nn.RMSNorm(WIDTH)


class Model(nn.Module):
    """The names of a decoder, as transformers gives them."""

    def __init__(self, tied):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(16, WIDTH)
        self.model.layers = nn.ModuleList(Layer() for _ in range(2))
        self.model.register_buffer("positions", torch.arange(4), persistent=False)
        self.lm_head = nn.Linear(WIDTH, 16, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight


def stored(model):
    """Return a model's state as it is saved: tied tensors once."""
    kept = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not any(tensor is other for other in kept.values()):
            kept[name] = tensor
    return {name: tensor.detach().clone() for name, tensor in kept.items()}


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("exclude", [(), ("*.0.mlp.*", "re:.*o_proj")])
def test_it_is_what_quantizing_the_checkpoint_writes(tmp_path, scheme, tied, exclude):
    torch.manual_seed(0)
    model = Model(tied).bfloat16()
    source = tmp_path / "source"
    source.mkdir()
    save_file(stored(model), source / "model.safetensors", {"format": "pt"})
    (source / "config.json").write_text(json.dumps({"model_type": "llama"}))
    quantize_checkpoint(source, tmp_path / "fp8", scheme=scheme, exclude=exclude)
    quantize_model_(model, scheme=scheme, exclude=exclude)
    written = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert json.loads(json.dumps(quantization_config(model))) == written
    want, got = load_file(tmp_path / "fp8" / "model.safetensors"), stored(model)
    assert want.keys() == got.keys()
    assert all(bits(want[name]) == bits(got[name]) for name in want)


def test_static_scales_are_said():
    model = Model(False)
    scales = dict.fromkeys((n for n, x in model.named_modules() if isinstance(x, nn.Linear) and "layers" in n), 0.5)
    scales = {name: scale for name, scale in scales.items() if not name.endswith("gate")}
    quantize_model_(model, scheme="channel", input_scales=scales)
    group = quantization_config(model)["config_groups"]["group_0"]
    assert group["weights"]["strategy"] == "channel"
    activations = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    assert group["input_activations"] == activations
    validated = pytest.importorskip("compressed_tensors.quantization").QuantizationConfig.model_validate(
        quantization_config(model)
    )
    assert validated.config_groups["group_0"].input_activations.dynamic is False


def test_layers_of_several_kinds_have_no_config():
    model = Model(False)
    with pytest.raises(CheckpointError, match=r"model needs FP8 layers of one scheme, .*, got no FP8 layer"):
        quantization_config(model)
    quantize_model_(model, include=["*.q_proj"], input_scales={"model.layers.0.self_attn.q_proj": 1.0})
    with pytest.raises(CheckpointError, match=r"got channel of torch.float8_e4m3fn, channel of .*, static"):
        quantization_config(model)
    quantize_model_(model, include=["*.k_proj"], scheme="block")
    with pytest.raises(CheckpointError, match=r"got block of torch.float8_e4m3fn, channel"):
        quantization_config(model)
    other = Model(False)
    quantize_model_(other, weight_dtype=torch.float8_e5m2)
    with pytest.raises(CheckpointError, match=r"model needs weights of float8_e4m3fn, .*got torch.float8_e5m2"):
        quantization_config(other)
