"""`convert_checkpoint`: scales that are joined, made powers of two, and codes that change their format."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    open_checkpoint,
    plan_conversion,
    verify_checkpoint,
)
from fp8core.errors import CheckpointError
from support.converted import Q, bits, numbers_of

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402


def fused(tmp_path, scales):
    """A fused qkv weight [512, 96] with a scale for each of q, k and v."""
    generator = torch.Generator().manual_seed(3)
    codes = torch.randn(512, 96, generator=generator).mul(60).clamp(-448, 448).to(torch.float8_e4m3fn)
    folder = tmp_path / "in"
    folder.mkdir()
    name = "model.layers.0.self_attn.qkv_proj"
    save_file({f"{name}.weight": codes, f"{name}.weight_scale": torch.tensor(scales)}, folder / "model.safetensors")
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    return name, codes, torch.repeat_interleave(torch.tensor(scales), torch.tensor([256, 128, 128]))[:, None]


def test_fused_shards_become_channels_with_the_same_codes_and_the_same_numbers(tmp_path):
    name, codes, wide = fused(tmp_path, [0.5, 0.013, 0.25])
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="channel")
    assert not done.lossy
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(bits(found[f"{name}.weight"]), bits(codes))
    assert torch.equal(found[f"{name}.weight_scale"], wide)


def test_fused_shards_under_one_scale_are_the_packages_own_requantization(tmp_path):
    import fp8core

    name, codes, _ = fused(tmp_path, [0.5, 0.013, 0.25])
    done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to="tensor", lossy=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    raw = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    largest, want = fp8core.requantize_with_max_scale(
        raw.copy(), np.array([0.5, 0.013, 0.25], np.float32), [256, 128, 128]
    )
    assert float(largest) == 0.5
    assert found[f"{name}.weight_scale"].tolist() == [0.5]
    np.testing.assert_array_equal(found[f"{name}.weight"].view(torch.uint8).numpy(), want.view(np.uint8))
    assert 0 < done.errors[f"{name}.weight"] < 0.03


def test_scales_that_happen_to_be_equal_become_one_without_loss(tmp_path):
    name, codes, _ = fused(tmp_path, [0.25, 0.25, 0.25])
    assert not convert_checkpoint(tmp_path / "in", tmp_path / "a", to="block").lossy
    assert not convert_checkpoint(tmp_path / "a", tmp_path / "b", to="tensor").lossy
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert torch.equal(bits(found[f"{name}.weight"]), bits(codes))
    assert found[f"{name}.weight_scale"].tolist() == [0.25]


@pytest.mark.parametrize(("to", "kept"), [("channel", False), ("block", True)])
def test_weights_below_the_least_scale_of_channels_become_zeros(tmp_path, to, kept):
    """Per token, and so per channel, a scale is at least 1 / (448 * 512), as vLLM's kernels have it."""
    codes = torch.full((256, 256), 448.0).to(torch.float8_e4m3fn)
    name, folder = "model.layers.0.mlp.up_proj", tmp_path / "in"
    folder.mkdir()
    scales = torch.tensor([[1e-2, 5e-3], [9e-12, 8e-12]])
    save_file({f"{name}.weight": codes, f"{name}.weight_scale_inv": scales}, folder / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    convert_checkpoint(folder, tmp_path / "out", to=to, lossy=True)
    found = load_file(tmp_path / "out" / "model.safetensors")[f"{name}.weight"].float()
    assert (found[:128, :128] == 448).all()
    assert (found[128:] == (448 if kept else 0)).all()


@pytest.mark.parametrize("scales", ["ue8m0", "ue8m0_bytes"])
def test_powers_of_two_are_made_with_their_codes_and_cost_what_a_second_rounding_costs(tmp_path, scales):
    state = small_state(1024, 2048)  # 128 blocks a weight: of few, the error is by chance
    out = write_format(written.deepseek, tmp_path / "in", state)
    direct = write_format(written.deepseek_powers, tmp_path / "direct", state)
    with pytest.raises(CheckpointError, match="scales become powers of two"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="deepseek", scales=scales)
    convert_checkpoint(tmp_path / "in", tmp_path / "out", to="deepseek", scales=scales, lossy=True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, wide in numbers_of(tmp_path / "out").items():
        original = out.linears[name.removesuffix(".weight")].float()
        error = (wide - original).norm() / original.norm()
        least = (direct.expected[name] - original).norm() / original.norm()
        assert error <= 1.45 * least
        scale = found[name.replace("weight", "weight_scale_inv")]
        assert scale.dtype == (torch.float32 if scales == "ue8m0" else torch.float8_e8m0fnu)
        assert (torch.frexp(scale.float())[0] == 0.5).all()
    assert not verify_checkpoint(tmp_path / "out").faults
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["scale_fmt"] == "ue8m0"


@pytest.mark.parametrize("writer", [written.deepseek_powers, written.deepseek_v4])
def test_powers_of_two_change_their_form_without_loss(tmp_path, writer):
    out = write_format(writer, tmp_path / "in")
    for to, scales in (("deepseek", "ue8m0_bytes"), ("deepseek", "float32"), ("block", "ue8m0")):
        done = convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, scales=scales, force=True)
        assert not done.lossy
        assert all(torch.equal(wide, out.expected[name]) for name, wide in numbers_of(tmp_path / "out").items())


@pytest.mark.parametrize("writer", [written.ct_static, written.ct_channel, written.ct_block])
def test_fnuz_and_back_keeps_every_number(tmp_path, writer):
    out = write_format(writer, tmp_path / "in")
    there = convert_checkpoint(tmp_path / "in", tmp_path / "fnuz", to="compressed-tensors", e4m3="fnuz")
    assert not there.lossy
    fnuz = load_file(tmp_path / "fnuz" / "model.safetensors")
    assert fnuz[f"{Q}.weight"].dtype == torch.float8_e4m3fnuz
    assert all(torch.equal(wide, out.expected[name]) for name, wide in numbers_of(tmp_path / "fnuz").items())
    back = convert_checkpoint(tmp_path / "fnuz", tmp_path / "fn", to="compressed-tensors", e4m3="fn")
    assert not back.lossy
    assert all(torch.equal(wide, out.expected[name]) for name, wide in numbers_of(tmp_path / "fn").items())
    if writer is written.ct_static:
        assert fnuz[f"{Q}.input_scale"].tolist() == (2 * out.tensors[f"{Q}.input_scale"]).tolist()
        assert torch.equal(load_file(tmp_path / "fn" / "model.safetensors")[f"{Q}.input_scale"], torch.tensor([0.02]))


@pytest.mark.parametrize(
    ("stored", "e4m3", "factor"),
    [("e5m2", "fn", 1), ("e5m2", "fnuz", 2), ("e5m2fnuz", "fn", 0.5), ("e5m2fnuz", "fnuz", 1)],
)
def test_input_scales_double_in_a_fnuz_format_and_halve_where_one_is_left(tmp_path, stored, e4m3, factor):
    codes = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(getattr(torch, f"float8_{stored}"))
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(0.5), "a.input_scale": torch.tensor(0.02)}
    save_file(tensors, tmp_path / "in.safetensors")
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="tensor", e4m3=e4m3, lossy=True)
    assert load_file(tmp_path / "out.safetensors")["a.input_scale"] == factor * torch.tensor(0.02)


def test_formats_of_e4m3fn_alone_take_fnuz_back_to_it(tmp_path):
    out = write_format(written.ct_static, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "fnuz", to="tensor", e4m3="fnuz")
    for to in ("comfyui", "deepseek", "modelopt"):
        assert not convert_checkpoint(tmp_path / "fnuz", tmp_path / to, to=to).lossy
        assert {layer.dtype for layer in open_checkpoint(tmp_path / to).layers.values()} == {"float8_e4m3fn"}
        assert all(torch.equal(wide, out.expected[name]) for name, wide in numbers_of(tmp_path / to).items())
    assert load_file(tmp_path / "modelopt" / "model.safetensors")[f"{Q}.input_scale"] == torch.tensor(0.02)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_e4m3fn_does_not_have_are_made_anew(tmp_path, code):
    write_format(written.ct_channel, tmp_path / "in")
    convert_checkpoint(tmp_path / "in", tmp_path / "fnuz", to="channel", e4m3="fnuz")
    file = tmp_path / "fnuz" / "model.safetensors"
    tensors = load_file(file)
    tensors[f"{Q}.weight"].view(torch.uint8)[299, 199] = code
    save_file(tensors, file)
    (change,) = plan_conversion(tmp_path / "fnuz", to="channel", e4m3="fn").lossy
    assert (change.layer.name, "240" in change.why) == (Q, True)


@pytest.mark.parametrize(("stored", "e4m3", "scale"), [("e4m3fn", "fnuz", 3e38), ("e4m3fnuz", "fn", 2.0**-149)])
def test_scales_without_a_double_or_a_half_are_not_kept(tmp_path, stored, e4m3, scale):
    tensors = {
        "a.weight": torch.ones(64, 96).to(getattr(torch, f"float8_{stored}")),
        "a.weight_scale": torch.tensor(scale),
    }
    save_file(tensors, tmp_path / "in.safetensors")
    (change,) = plan_conversion(tmp_path / "in.safetensors", to="tensor", e4m3=e4m3).lossy
    assert "are not exact in float32" in change.why


def test_another_fp8_format_is_made_anew_and_comfyui_keeps_e5m2(tmp_path):
    codes = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).to(torch.float8_e5m2)
    tensors = {"a.weight": codes, "a.weight_scale": torch.tensor(0.5)}
    save_file(tensors, tmp_path / "in.safetensors")
    kept = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "comfy.safetensors", to="comfyui")
    assert not kept.lossy
    found = load_file(tmp_path / "comfy.safetensors")
    assert bytes(found["a.comfy_quant"].tolist()) == b'{"format": "float8_e5m2"}'
    done = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="channel", lossy=True)
    assert "float8_e5m2 becomes float8_e4m3fn" in done.lossy[0].why
    assert 0 < done.errors["a.weight"] < 0.03
