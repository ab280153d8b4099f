"""FP8 files without any scale, as a plain cast leaves them: values only where the caller says so."""

import pytest

from fp8core.checkpoint import convert_checkpoint, open_checkpoint, verify_checkpoint
from fp8core.errors import CheckpointError
from support.command_line import runner

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402


@pytest.fixture
def cast(tmp_path):
    """Weights, a convolution and a bias, cast to FP8."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"double_blocks.0.up.weight": (64, 96), "conv.weight": (8, 4, 3, 3), "double_blocks.0.up.bias": (64,)}
    tensors = {name: torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "in.safetensors")
    return tensors


def test_it_is_refused_and_told_unless_it_is_asked_for(tmp_path, cast):
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    assert open_checkpoint(source).format == "unscaled"
    assert {fault.tensor for fault in verify_checkpoint(source).faults} == {"double_blocks.0.up.weight", "conv.weight"}
    with pytest.raises(CheckpointError, match="needs a scale, got none"):
        convert_checkpoint(source, target, to="bf16")
    assert not verify_checkpoint(source, unscaled=True).faults
    convert_checkpoint(source, target, to="bf16", unscaled=True)
    found = load_file(target)
    assert {name: one.dtype for name, one in found.items()} == dict.fromkeys(cast, torch.bfloat16)
    assert all(torch.equal(found[name], one.bfloat16()) for name, one in cast.items())


def test_a_bias_that_is_fp8_does_not_stay_fp8_in_bf16(tmp_path):
    """Beside weights that have scales, a cast bias is the only tensor without one."""
    codes = {"up.weight": torch.ones(64, 96), "up.bias": torch.ones(64)}
    tensors = {name: one.to(torch.float8_e4m3fn) for name, one in codes.items()}
    save_file({**tensors, "up.weight_scale": torch.full((64, 1), 0.5)}, tmp_path / "in.safetensors")
    source, target = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    with pytest.raises(CheckpointError, match=r"up\.bias needs .* unscaled .*, got F8_E4M3 \[64\]"):
        convert_checkpoint(source, target, to="bf16")
    convert_checkpoint(source, target, to="bf16", unscaled=True)
    assert {name: (one.dtype, one[0].max().item()) for name, one in load_file(target).items()} == {
        "up.weight": (torch.bfloat16, 0.5), "up.bias": (torch.bfloat16, 1.0),
    }  # fmt: skip


@pytest.mark.parametrize("to", ["comfyui", "channel"])
def test_as_fp8_the_codes_stay_and_scales_of_one_join_them(tmp_path, cast, to):
    done = convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to=to, unscaled=True)
    assert not done.lossy
    found = load_file(tmp_path / "out.safetensors")
    for name in ("double_blocks.0.up.weight", "conv.weight"):
        assert torch.equal(found[name].view(torch.uint8), cast[name].view(torch.uint8))
        assert (found[f"{name}_scale"] == 1).all()
    assert torch.equal(found["double_blocks.0.up.bias"], cast["double_blocks.0.up.bias"].bfloat16())


def test_a_matrix_that_is_no_modules_weight_is_refused_by_its_name(tmp_path):
    save_file({"pos_embed": torch.ones(16, 32).to(torch.float8_e4m3fn)}, tmp_path / "in.safetensors")
    for to, wanted in (("comfyui", "for comfyui"), ("channel", "for compressed-tensors")):
        with pytest.raises(CheckpointError, match=rf"pos_embed needs .* {wanted}, got a name without \.weight"):
            convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to=to, unscaled=True)
    convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="deepseek", unscaled=True)


def test_the_commands_have_the_option(tmp_path, cast, capsys, monkeypatch):
    fp8core = runner(capsys, monkeypatch)
    source = tmp_path / "in.safetensors"
    assert fp8core("verify", source)[0] == 1
    assert fp8core("verify", source, "--unscaled")[0] == 0
    assert fp8core("convert", source, tmp_path / "out.safetensors", "--unscaled")[0] == 0
    assert load_file(tmp_path / "out.safetensors")["conv.weight"].dtype == torch.bfloat16
