"""FP8 checkpoints that others wrote, loaded, run, saved and loaded again: every format, dense and with experts."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402 - after the skips

from fp8core.errors import CheckpointError  # noqa: E402
from fp8core.torch import Linear  # noqa: E402
from fp8core.transformers import Experts, GroupedExperts, config_for, from_pretrained  # noqa: E402
from fp8core.transformers.loading import _taken_from  # noqa: E402
from huggingface.cases import config_of, distance, fp8_layers, logits, same, tensors_of, written  # noqa: E402
from support import checkpoint_formats as formats  # noqa: E402

LOADED = (
    formats.deepseek,
    formats.deepseek_powers,
    formats.deepseek_v4,
    formats.hf_static,
    formats.ct_static,
    formats.ct_tensor,
    formats.ct_channel,
    formats.ct_block,
    formats.modelopt,
    formats.modelopt_in_config,
    formats.modelopt_channel,
    formats.modelopt_blocks,
    formats.fbgemm,
    formats.autofp8,
)
FAR = 0.15
"""The relative error of logits to the model in bfloat16, from which on a format is misread."""


def write(writer, kind, tmp_path):
    """Write a random model in bfloat16 and in a format; return logits of the first, and what was written."""
    wanted = written(kind, tmp_path / "wide")
    config = {name: value for name, value in config_of(tmp_path / "wide").items() if name != "quantization_config"}
    return wanted, formats.write_format(writer, tmp_path / "fp8", tensors_of(tmp_path / "wide"), config)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("writer", LOADED, ids=lambda writer: writer.__name__)
def test_a_format_is_loaded_run_and_saved(writer, kind, tmp_path):
    wanted, out = write(writer, kind, tmp_path)
    model, told = from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert not told["missing_keys"] | told["unexpected_keys"] | told["mismatched_keys"], told
    layers = {f"{name}.weight": layer for name, layer in fp8_layers(model).items()}
    assert layers.keys() == out.expected.keys()
    for name, layer in layers.items():
        assert torch.equal(layer.dequantized(torch.float32), out.expected[name]), name
        assert not any(parameter.requires_grad for parameter in layer.parameters())
    static = any(name.endswith(("input_scale", "activation_scale")) for name in out.tensors)
    for layer in layers.values():
        assert (layer.input_scale is not None) == static
        assert not static or layer.input_scale.tolist() == pytest.approx([0.02])
    found = logits(model)
    assert 0.001 < distance(found, wanted) < FAR

    model.save_pretrained(tmp_path / "again")
    saved = tensors_of(tmp_path / "again")
    assert saved.keys() == out.tensors.keys()
    assert [name for name in saved if not same(saved[name], out.tensors[name])] == []
    method = (out.config or {"quant_method": "modelopt"})["quant_method"]
    assert config_of(tmp_path / "again")["quantization_config"]["quant_method"] == method
    assert torch.equal(logits(from_pretrained(tmp_path / "again")), found)


@pytest.mark.parametrize("kind", ["qwen3", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("writer", [formats.deepseek, formats.modelopt], ids=lambda writer: writer.__name__)
def test_other_models_are_loaded_and_run(writer, kind, tmp_path):
    wanted, out = write(writer, kind, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "fp8", config=config_for(tmp_path / "fp8"))
    names = {name for name, layer in model.named_modules() if isinstance(layer, Linear)}
    assert {f"{name}.weight" for name in names} >= {name for name in out.expected if ".experts." not in name}
    assert 0.001 < distance(logits(model), wanted) < FAR


def one_layer_more(out):
    """Such as the layer of DeepSeek-V3 that predicts a token further ahead."""
    out.tensors |= {name.replace(".1.", ".2.", 1): x.clone() for name, x in out.tensors.items() if "layers.1." in name}


def one_more_in_fp8(out):
    formats.deepseek(out)
    out.tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(0.5)
    one_layer_more(out)


def one_more_alone_in_fp8(out):
    wide = {f"{module}.weight": x for module, x in out.linears.items() if ".experts." in module}
    one_more_in_fp8(out)
    out.tensors = {name: x for name, x in out.tensors.items() if name.removesuffix("_scale_inv") not in wide} | wide


def one_more_to_quantize(out):
    out.tensors |= {f"{module}.weight": weight for module, weight in out.linears.items()}
    one_layer_more(out)


@pytest.mark.filterwarnings("error:.*stays unquantized:RuntimeWarning")
@pytest.mark.parametrize("writer", [one_more_in_fp8, one_more_alone_in_fp8, one_more_to_quantize])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_layers_beyond_those_of_the_model_are_left_out(writer, kind, tmp_path):
    wanted, _ = write(writer, kind, tmp_path)
    model, told = from_pretrained(tmp_path / "fp8", output_loading_info=True)
    assert 0.001 < distance(logits(model), wanted) < FAR
    assert not told["missing_keys"]
    assert all(".layers.2." in name for name in told["unexpected_keys"])


def shards(out):
    """A scale for each layer in fused ones, as vLLM and AutoFP8 keep them."""
    widths = {"qkv_proj": (128, 64, 64), "gate_up_proj": (320, 320)}
    for name in [name for name in out.tensors if name.split(".")[-2] in widths]:
        parts = out.tensors.pop(name).split(widths[name.split(".")[-2]])
        coded = [formats.coded(part, len(part), part.shape[1]) for part in parts]
        out.tensors[name] = torch.cat([codes for codes, _ in coded])
        out.tensors[f"{name}_scale"] = torch.cat([scale.reshape(1) for _, scale in coded])
        out.expected[name] = torch.cat([codes.float() * scale for codes, scale in coded])
    formats.ct_tensor(out)


def test_scales_of_fused_layers_are_repeated_for_their_channels(tmp_path):
    wanted, out = write(shards, "phi3", tmp_path)
    model = from_pretrained(tmp_path / "fp8")
    fused = model.model.layers[0].self_attn.qkv_proj
    assert fused.scheme == "channel"
    stored = out.tensors["model.layers.0.self_attn.qkv_proj.weight_scale"]
    assert len(stored) == 3
    assert len(stored.unique()) > 1
    assert torch.equal(fused.weight_scale.flatten(), stored.repeat_interleave(torch.tensor([128, 64, 64])))
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            assert torch.equal(layer.dequantized(torch.float32), out.expected[f"{name}.weight"])
    assert 0.001 < distance(logits(model), wanted) < FAR
    model.save_pretrained(tmp_path / "again")
    saved = tensors_of(tmp_path / "again")
    assert saved.keys() == out.tensors.keys()
    assert all(same(saved[name], out.tensors[name]) for name in saved)


def silent(out):
    formats.ct_channel(out)
    out.config = None


@pytest.mark.parametrize("writer", [silent, formats.comfyui_old, formats.comfyui_new, formats.comfyui_header])
def test_fp8_weights_are_found_without_a_configuration_that_names_them(writer, tmp_path):
    wanted, out = write(writer, "llama", tmp_path)
    model = from_pretrained(tmp_path / "fp8")
    found = logits(model)
    assert 0.001 < distance(found, wanted) < FAR
    model.save_pretrained(tmp_path / "again")
    assert tensors_of(tmp_path / "again").keys() == out.tensors.keys() - {"scaled_fp8"}
    assert config_of(tmp_path / "again")["quantization_config"]["quant_method"] == "fp8core"
    assert torch.equal(logits(from_pretrained(tmp_path / "again")), found)


def test_the_configuration_of_a_text_model_is_moved_to_the_top(tmp_path):
    """Models of images and text may say it in text_config; what is saved says it at the top."""
    write(formats.deepseek, "llama", tmp_path)
    config = config_for(tmp_path / "fp8")
    nested = type(config)(**{**config.to_dict(), "quantization_config": None})
    nested.get_text_config = lambda *_, **__: config
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    del nested.quantization_config
    assert _taken_from(nested) == {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert not hasattr(config, "quantization_config")


def test_transformers_itself_reads_saved_blocks(tmp_path):
    """transformers reads what was saved, and the same model comes out within its rounding."""
    write(formats.deepseek, "qwen3_moe", tmp_path)
    model = from_pretrained(tmp_path / "fp8")
    model.save_pretrained(tmp_path / "again")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "again", dtype=torch.bfloat16)
    assert not any(isinstance(module, Linear | Experts | GroupedExperts) for module in theirs.modules())
    assert distance(logits(model), logits(theirs)) < 0.1


def refused(writer, kind, tmp_path, text):
    """Write a model in a format of which no model can be made, and load it; its error is ``text``."""
    write(writer, kind, tmp_path)
    with pytest.raises(CheckpointError, match=text):
        from_pretrained(tmp_path / "fp8")


def stacked_experts(out):
    formats.ct_channel(out)
    for layer in range(2):
        place = f"model.layers.{layer}.mlp.experts"
        for part in ("gate_proj", "up_proj", "down_proj"):
            names = [f"{place}.{at}.{part}.weight" for at in range(4)]
            out.tensors[f"{place}.{part}"] = torch.stack([out.tensors.pop(name) for name in names])
            out.tensors[f"{place}.{part}_scale"] = torch.stack([out.tensors.pop(f"{n}_scale") for n in names])
        both = [out.tensors.pop(f"{place}.{part}") for part in ("gate_proj", "up_proj")]
        out.tensors[f"{place}.gate_up_proj"] = torch.cat(both, 1)
        scales = [out.tensors.pop(f"{place}.{part}_scale") for part in ("gate_proj", "up_proj")]
        out.tensors[f"{place}.gate_up_proj_scale"] = torch.cat(scales, 1)


def lost_scale(out):
    formats.deepseek(out)
    del out.tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]


def zero_input_scales(out):
    formats.ct_static(out)
    for name in [name for name in out.tensors if name.endswith("input_scale")]:
        out.tensors[name] = out.tensors[name] * 0


def static_shards(out):
    formats.ct_static(out)
    out.tensors["model.layers.1.mlp.up_proj.input_scale"] = torch.tensor([0.02, 0.03])


def fewer_rows(out):
    formats.modelopt(out)
    out.tensors["model.layers.1.mlp.up_proj.weight"] = out.tensors["model.layers.1.mlp.up_proj.weight"][:16].clone()


def static_blocks(out):
    formats.deepseek(out)
    out.tensors["model.layers.1.mlp.up_proj.activation_scale"] = torch.ones(1)


def gptq(out):
    out.tensors |= {f"{module}.weight": weight for module, weight in out.linears.items()}
    out.config = {"quant_method": "gptq", "bits": 4}


@pytest.mark.parametrize(
    ("writer", "kind", "text"),
    [
        (
            formats.modelopt_mxfp8,
            "llama",
            r"_proj.weight needs scales .* got scales by group \(1, 32\): fp8core convert",
        ),
        (formats.ct_mxfp8, "llama", "needs scales per tensor, per channel or by blocks of 128x128"),
        (
            *(stacked_experts, "qwen3_moe"),
            r"experts\.down_proj needs .* Qwen3MoeForCausalLM, got 4 experts in one .*--split-",
        ),
        (
            *(lost_scale, "llama"),
            r"model\.layers\.1\.mlp\.up_proj\.weight of model\.safetensors needs a scale, got none",
        ),
        (
            *(zero_input_scales, "llama"),
            r"input_scale needs finite scales above 0, got 0\.0 \(and 13 other scales\)",
        ),
        (static_shards, "llama", r"1\.mlp\.up_proj\.input_scale needs to be one number, got shape \[2\]"),
        (static_blocks, "llama", r"up_proj\.activation_scale needs a weight with scales per tensor .*, got bl"),
        (fewer_rows, "llama", r"1\.mlp\.up_proj\.weight needs the shape \[320, 128\], got \[16, 128\]"),
        (gptq, "llama", "needs FP8 weights, got none; its quant_method is gptq"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_checkpoint_is_refused_that_no_model_can_be_made_of(writer, kind, text, tmp_path):
    refused(writer, kind, tmp_path, text)


@pytest.mark.parametrize(
    ("writer", "kind", "name", "number", "got"),
    [
        (formats.ct_channel, "llama", "layers.1.mlp.up_proj.weight_scale", float("nan"), "nan"),
        (formats.ct_channel, "qwen3_moe", "layers.0.mlp.experts.3.down_proj.weight_scale", 0, r"0\.0"),
        (formats.ct_static, "llama", "layers.0.self_attn.q_proj.input_scale", float("inf"), "inf"),
        (formats.modelopt, "llama", "layers.1.mlp.down_proj.weight_scale", -1.5, r"-1\.5"),
        (formats.deepseek, "qwen3_moe", "layers.1.mlp.experts.0.up_proj.weight_scale_inv", float("-inf"), "-inf"),
        (formats.deepseek_powers, "llama", "layers.0.mlp.up_proj.weight_scale_inv", float("nan"), "nan"),
    ],
)
def test_a_scale_that_no_weight_can_have_is_refused(writer, kind, name, number, got, tmp_path):
    def spoilt(out):
        writer(out)
        scale = out.tensors[f"model.{name}"]
        out.tensors[f"model.{name}"] = scale.clone()
        out.tensors[f"model.{name}"].view(-1)[-1] = number

    refused(spoilt, kind, tmp_path, rf"^model\.{name} needs finite scales above 0, got {got}: fp8core verify")
