"""`convert_checkpoint`: bfloat16 to the bit, codes that stay where they can, and what goes with them."""

import json

import numpy as np
import pytest

import fp8core
from fp8core.checkpoint import (
    convert_checkpoint,
    inspect_checkpoint,
    open_checkpoint,
    plan_conversion,
    quantize_checkpoint,
    verify_checkpoint,
)
from fp8core.checkpoint.disk import files
from fp8core.errors import CheckpointError
from support.checkpoints import left_in
from support.converted import Q, bits, numbers_of

torch = pytest.importorskip("torch")
from safetensors import safe_open  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import FORMATS, small_state, write_format  # noqa: E402

ALL = pytest.mark.parametrize("writer", FORMATS, ids=lambda writer: writer.__name__)
NESTED = {"tensor": {"tensor", "channel", "block"}, "channel": {"channel"}, "block": {"block"}, "group": {"group"}}
"""Where groups of one granularity lie in groups of another."""


POWERS = written.deepseek_powers, written.deepseek_v4
TARGETS = "channel", "block", "tensor"
FORMATS_OF_FOUR = "deepseek", "compressed-tensors", "modelopt", "comfyui"
CASES = [(writer, to) for writer in FORMATS for to in TARGETS] + [
    (writer, to)
    for writer in (written.deepseek, written.ct_static, written.ct_channel, written.modelopt, written.mxfp8)
    for to in FORMATS_OF_FOUR
]


@ALL
def test_bf16_is_code_times_scale_rounded_once_in_every_byte(tmp_path, writer):
    out = write_format(writer, tmp_path / "fp8")
    done = convert_checkpoint(tmp_path / "fp8", tmp_path / "bf16", to="bf16")
    found = load_file(tmp_path / "bf16" / "model.safetensors")
    weights = {name: wide.bfloat16() for name, wide in out.expected.items()}
    others = {name: one for name, one in small_state().items() if name not in weights}
    assert set(found) == {*weights, *others}
    for name, wide in {**weights, **others}.items():
        assert found[name].dtype == wide.dtype
        assert torch.equal(bits(found[name]), bits(wide)), name
    left = set(out.tensors) - set(found) - {one.scale.name for one in done.source.layers.values()}
    assert {one for one in done.left_out if "comfy_quant" not in one} == {
        one for one in left if "comfy_quant" not in one
    }
    config = tmp_path / "bf16" / "config.json"
    assert not config.exists() or "quantization_config" not in json.loads(config.read_text())
    assert not (tmp_path / "bf16" / "hf_quant_config.json").exists()
    wide_checkpoint = open_checkpoint(tmp_path / "bf16")
    assert wide_checkpoint.format == "unquantized"
    assert not inspect_checkpoint(wide_checkpoint).faults


@pytest.mark.parametrize("to", ["bf16", "compressed-tensors"])
def test_the_configuration_beside_files_of_mistral_claims_nothing_any_more(tmp_path, to):
    """vLLM reads the quantization from params.json: it would look for qscale_weight."""
    write_format(written.mistral, tmp_path / "fp8")
    params = {"dim": 200, "n_layers": 1, "rope": {"quantization": 1}}
    for name, more in (("fp8", {"quantization": {"qformat_weight": "fp8_e4m3"}}), ("plain", {})):
        (tmp_path / "fp8" / "params.json").write_text(json.dumps({**params, **more}))
        convert_checkpoint(tmp_path / "fp8", tmp_path / f"{name}-out", to=to)
        assert json.loads((tmp_path / f"{name}-out" / "params.json").read_text()) == params
        record = json.loads((tmp_path / f"{name}-out" / "fp8core.json").read_text())
        assert "params.json" in record["files"]
        assert ("params.json" in record["left_out"]) == (name == "fp8")


@pytest.mark.parametrize(("writer", "to"), CASES, ids=lambda one: getattr(one, "__name__", one))
def test_codes_stay_where_groups_are_nested_and_every_target_is_a_checkpoint_without_faults(tmp_path, writer, to):
    out = write_format(writer, tmp_path / "in")
    planned = plan_conversion(tmp_path / "in", to=to)
    goals = {change.goal.granularity for change in planned.changes}
    assert len(goals) == 1
    granularity = goals.pop()
    kept = {change.layer.weight.name for change in planned.changes if change.exact}
    if granularity in NESTED[FORMATS[writer][1]]:
        assert kept == set(out.expected)
    else:  # powers of two may happen to be equal
        assert len(kept) < len(out.expected) if writer in POWERS else not kept
    if len(kept) < len(out.expected):
        with pytest.raises(CheckpointError, match=r"needs lossy \(--lossy\), as it has to be requantized: "):
            convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to)
        assert left_in(tmp_path) == ["in"]
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, lossy=True)
    opened = open_checkpoint(tmp_path / "out")
    formats = {"deepseek": "fp8", "modelopt": "modelopt", "comfyui": "comfyui"}
    assert opened.format == formats.get(to, "compressed-tensors")
    assert {layer.granularity for layer in opened.layers.values()} == {granularity}
    assert not verify_checkpoint(tmp_path / "out").faults
    found = load_file(tmp_path / "out" / "model.safetensors")
    now = numbers_of(tmp_path / "out")
    assert set(now) == set(out.expected)
    for name, wide in out.expected.items():
        if name in kept:
            assert torch.equal(bits(found[name]), bits(out.tensors[name]))
            assert torch.equal(now[name], wide)
        else:
            error = float((now[name] - wide).double().norm() / wide.double().norm())
            assert error == pytest.approx(done.errors[name], rel=1e-4, abs=1e-9)
            assert error < 0.03
    assert set(done.errors) == set(out.expected) - kept
    for name, tensor in small_state().items():
        if name not in now:
            assert torch.equal(bits(found[name]), bits(tensor))
    assert planned.bytes_after == done.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    record = json.loads((tmp_path / "out" / "fp8core.json").read_text())
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "out").iterdir() if file.name != "fp8core.json"}
    assert record["files"] == sizes


def test_scales_of_keys_and_values_for_each_head_are_said_to_be_so(tmp_path):
    """A reader that expects one number for a layer would not take them; other formats cannot say it."""
    write_format(written.ct_channel, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors |= {f"model.layers.0.self_attn.{key}_scale": torch.full((4, 1, 1), 0.25) for key in "kv"}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="channel")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["kv_cache_scheme"]["strategy"] == "attn_head"
    assert load_file(tmp_path / "out" / "model.safetensors")["model.layers.0.self_attn.k_scale"].shape == (4, 1, 1)
    with pytest.raises(CheckpointError, match=r"self_attn\.k_scale needs to be one number for modelopt, got shape \[4"):
        plan_conversion(tmp_path / "in", to="modelopt")


def test_static_scales_and_those_of_keys_and_values_go_with_their_layers(tmp_path):
    write_format(written.modelopt, tmp_path / "in")
    for to in ("tensor", "channel"):
        convert_checkpoint(tmp_path / "in", tmp_path / to, to=to)
        found = load_file(tmp_path / to / "model.safetensors")
        assert found[f"{Q}.input_scale"].tolist() == [pytest.approx(0.02)]
        assert float(found["model.layers.0.self_attn.k_scale"]) == 0.5
        config = json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
        assert config["kv_cache_scheme"]["num_bits"] == 8
        assert config["config_groups"]["group_0"]["input_activations"] == {
            "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False
        }  # fmt: skip
    done = convert_checkpoint(tmp_path / "tensor", tmp_path / "back", to="modelopt")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found[f"{Q}.input_scale"].shape == found[f"{Q}.weight_scale"].shape == ()
    assert float(found["model.layers.0.self_attn.v_proj.v_scale"]) == 0.5
    said = json.loads((tmp_path / "back" / "hf_quant_config.json").read_text())["quantization"]
    assert (said["quant_algo"], said["kv_cache_quant_algo"]) == ("FP8", "FP8")
    assert not done.left_out
    blocks = convert_checkpoint(tmp_path / "tensor", tmp_path / "blocks", to="deepseek")
    assert set(blocks.left_out) == {
        name for name in load_file(tmp_path / "in" / "model.safetensors") if name.endswith("input_scale")
    }


def test_static_scales_stay_behind_where_modelopt_scales_activations_per_token(tmp_path):
    write_format(written.ct_static, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "channel", to="channel")
    done = convert_checkpoint(tmp_path / "channel", tmp_path / "out", to="modelopt")
    assert done.quantization_config["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    static = {name for name in load_file(tmp_path / "channel" / "model.safetensors") if name.endswith("input_scale")}
    assert static
    assert set(done.left_out) == static
    assert not verify_checkpoint(tmp_path / "out").faults


def test_a_bound_of_dynamic_scales_stays_behind_where_static_ones_are_kept(tmp_path):
    write_format(written.ct_static, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    save_file({**tensors, f"{Q}.input_scale_ub": torch.ones(1)}, tmp_path / "in" / "model.safetensors")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="tensor")
    assert set(done.left_out) == {f"{Q}.input_scale_ub"}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found[f"{Q}.input_scale"], tensors[f"{Q}.input_scale"])


def test_codes_that_are_nan_are_kept_with_the_others(tmp_path):
    write_format(written.ct_channel, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors[f"{Q}.weight"].view(torch.uint8)[299, 199] = 0x7F
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "out", to="modelopt").lossy
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(bits(found[f"{Q}.weight"]), bits(tensors[f"{Q}.weight"]))


def test_a_dynamic_checkpoint_with_one_scale_a_tensor_is_modelopts_per_channel(tmp_path):
    write_format(written.ct_tensor, tmp_path / "in")
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="modelopt")
    assert not done.lossy
    assert done.quantization_config["quant_algo"] == "FP8_PER_CHANNEL_PER_TOKEN"
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{Q}.weight_scale"].shape == (300,)


def test_shards_stay_shards_and_scales_go_to_their_weights(tmp_path):
    out = write_format(written.deepseek, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    (tmp_path / "in" / "model.safetensors").unlink()
    scales = {name: one for name, one in tensors.items() if "scale" in name}
    others = {name: one for name, one in tensors.items() if "scale" not in name}
    weight_map = {}
    for file, held in (("a.safetensors", others), ("b.safetensors", scales | {"extra": torch.ones(3)})):
        save_file(held, tmp_path / "in" / file, {"format": "pt", "note": file})
        weight_map |= dict.fromkeys(held, file)
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "in" / "tokenizer.json").write_text("{}")
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="block")
    assert left_in(tmp_path / "out") == [
        "a.safetensors", "b.safetensors", "config.json", "fp8core.json", "model.safetensors.index.json", "tokenizer.json"
    ]  # fmt: skip
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    there = {file: set(load_file(tmp_path / "out" / file)) for file in ("a.safetensors", "b.safetensors")}
    assert there["b.safetensors"] == {"extra"}
    for file in there:
        with safe_open(tmp_path / "out" / file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "note": file, "fp8core": fp8core.__version__}
    assert index["weight_map"] == {name: file for file, names in there.items() for name in names}
    assert not verify_checkpoint(tmp_path / "out").faults
    assert all(torch.equal(wide, out.expected[name]) for name, wide in numbers_of(tmp_path / "out").items())


def test_a_file_gets_its_configuration_beside_it_and_bfloat16_none(tmp_path):
    write_format(written.deepseek, tmp_path / "in")
    source, target = tmp_path / "in" / "model.safetensors", tmp_path / "out.safetensors"
    convert_checkpoint(source, target, to="block")
    assert open_checkpoint(target).claim.group_shape == (128, 128)
    convert_checkpoint(source, target, to="bf16", force=True)
    assert left_in(tmp_path) == ["in", "out.safetensors"]


def experts(folder, **keywords):
    generator = torch.Generator().manual_seed(1)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights = torch.randn(3, 256, 200, generator=generator)
    codes, scales = zip(*(written.coded(one, 128, 128) for one in weights), strict=True)
    folder.mkdir()
    tensors = {name: torch.stack(codes), f"{name}_scale_inv": torch.stack(scales)}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}}))  # fmt: skip
    return name, torch.stack([written.values(*one, 128, 128) for one in zip(codes, scales, strict=True)])


def test_stacked_experts_become_bfloat16_and_powers_of_two_and_nothing_that_has_no_name_for_them(tmp_path):
    name, wide = experts(tmp_path / "in")
    assert not verify_checkpoint(tmp_path / "in").faults
    convert_checkpoint(tmp_path / "in", tmp_path / "bf16", to="bf16")
    assert torch.equal(load_file(tmp_path / "bf16" / "model.safetensors")[name], wide.bfloat16())
    done = convert_checkpoint(tmp_path / "in", tmp_path / "powers", to="deepseek", scales="ue8m0", lossy=True)
    (layer,) = open_checkpoint(tmp_path / "powers").layers.values()
    assert layer.scale.shape == (3, 2, 2)
    scale = layer.scales().repeat(128, 1).repeat(128, 2)[:, :, :200]
    now = layer.weight.read().astype(np.float32) * scale
    assert np.linalg.norm(now - wide.numpy()) / wide.norm() == pytest.approx(done.errors[name], rel=1e-3)
    with pytest.raises(CheckpointError, match="got experts in one tensor: split_experts"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="block")


@pytest.mark.parametrize("to", ["bf16", "channel", "block", "tensor", "deepseek"])
@pytest.mark.parametrize("writer", [written.deepseek, written.ct_channel, written.mxfp8, written.ct_tensor])
def test_parts_that_are_read_one_by_one_give_the_same_bytes(tmp_path, monkeypatch, writer, to):
    write_format(writer, tmp_path / "in", small_state(700, 200))
    whole = convert_checkpoint(tmp_path / "in", tmp_path / "whole", to=to, lossy=True)
    monkeypatch.setattr(files, "AT_ONCE", 128 * 200 * 8)
    calls = []
    parts = convert_checkpoint(
        tmp_path / "in", tmp_path / "parts", to=to, lossy=True, progress=lambda *call: calls.append(call)
    )
    file = "model.safetensors"
    assert (tmp_path / "parts" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert len(calls) > 6
    assert calls[-1][1] == calls[-1][2] == sum(one.nbytes for one in load_file(tmp_path / "in" / file).values())
    assert parts.errors == pytest.approx(whole.errors)


def test_what_quantize_writes_is_converted_there_and_back(tmp_path):
    save_file(small_state(256, 256), tmp_path / "bf16.safetensors", {"format": "pt"})
    for scheme in ("channel", "tensor", "block"):
        one, two, three = (tmp_path / f"{scheme}{number}.safetensors" for number in range(3))
        quantize_checkpoint(tmp_path / "bf16.safetensors", one, scheme=scheme)
        convert_checkpoint(one, two, to={"channel": "modelopt", "tensor": "comfyui", "block": "deepseek"}[scheme])
        convert_checkpoint(two, three, to="compressed-tensors")
        first, last = load_file(one), load_file(three)
        assert set(first) == set(last)
        assert all(torch.equal(bits(first[name]), bits(last[name])) for name in first)
        for beside in (one, three):
            assert not verify_checkpoint(beside, against=tmp_path / "bf16.safetensors").faults
        assert json.loads(three.with_suffix(".config.json").read_text()) == json.loads(
            one.with_suffix(".config.json").read_text()
        )


@pytest.mark.parametrize(("to", "listed"), [("deepseek", "modules_to_not_convert"), ("modelopt", "ignore")])
@pytest.mark.parametrize("head", ["lm_head", "language_model.lm_head", "score"])
def test_lm_head_is_listed_unless_it_is_fp8(tmp_path, to, listed, head):
    """transformers and vLLM match whole parts of the names that DeepSeek's format lists."""
    (tmp_path / "in").mkdir()
    tensors = {f"{head}.weight": torch.ones(128, 128), "model.layers.0.mlp.up_proj.weight": torch.ones(128, 128)}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    quantize_checkpoint(tmp_path / "in", tmp_path / "fp8", scheme="block", include=[head, "*.up_proj"])
    config = convert_checkpoint(tmp_path / "fp8", tmp_path / "out", to=to).quantization_config
    assert ("lm_head" in config[listed]) == (head == "score")
    assert not verify_checkpoint(tmp_path / "out").faults
