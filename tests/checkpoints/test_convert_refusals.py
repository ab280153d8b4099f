"""What `convert_checkpoint` refuses: options, faults of a checkpoint, and names that two tensors would have."""

import re

import pytest

from fp8core.checkpoint import convert_checkpoint
from fp8core.errors import CheckpointError
from support.checkpoints import left_in
from support.converted import Q

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402


def test_two_tensors_that_would_have_one_name_are_refused(tmp_path):
    write_format(written.modelopt, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.25)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"got 2 that would be model\.layers\.0\.self_attn\.k_scale"):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="tensor")


@pytest.mark.parametrize("name", [f"{Q}.input_scale", "model.layers.0.self_attn.k_proj.k_scale"])
@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_static_scales_that_are_no_positive_numbers_are_refused(tmp_path, name, scale):
    write_format(written.modelopt, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    assert name in tensors
    save_file({**tensors, name: torch.tensor(scale)}, tmp_path / "in" / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"{re.escape(name)} needs finite scales above 0, got .*: fp8core verify says where"
    ):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to="tensor")
    assert left_in(tmp_path) == ["in"]
    convert_checkpoint(tmp_path / "in", tmp_path / "bf16", to="bf16")  # has no place for them


REFUSED = [
    ({"to": "fp4"}, "to needs one of bf16, channel"),
    ({"to": "block", "scales": "bf16"}, "scales needs one of float32, ue8m0"),
    ({"to": "block", "e4m3": "e5m2"}, "e4m3 needs one of fn, fnuz, got 'e5m2'"),
    (
        {"to": "bf16", "e4m3": "fn"},
        r"to needs an FP8 format where scales or e4m3 \(--fn, --fnuz\) are given, got 'bf16'",
    ),
    ({"to": "channel", "scales": "ue8m0_bytes"}, "which only deepseek has"),
    ({"to": "deepseek", "e4m3": "fnuz"}, r"e4m3 needs fn \(--fn\) for deepseek"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_conversions_that_no_format_allows_are_refused(tmp_path, options, message):
    write_format(written.deepseek, tmp_path / "in")
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", **options)
    assert left_in(tmp_path) == ["in"]


@pytest.mark.parametrize(
    ("change", "to", "message"),
    [
        (
            lambda tensors: tensors.pop(f"{Q}.weight_scale_inv"),
            "bf16",
            "q_proj.weight of model.safetensors needs a scale, got none",
        ),
        (
            lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(0),
            "block",
            r"needs finite scales above 0, got 0\.0: ",
        ),
        (
            lambda tensors: tensors[f"{Q}.weight_scale_inv"].fill_(torch.nan),
            "bf16",
            "weight_scale_inv needs finite scales, got (nan|inf): ",
        ),
        (lambda tensors: tensors[f"{Q}.weight"].view(torch.uint8).fill_(0x7F), "channel", "needs finite numbers"),
        (lambda tensors: tensors.pop(f"{Q}.weight"), "bf16", f"{Q}.weight_scale_inv needs an FP8 weight, got none"),
        (
            lambda tensors: tensors.update({f"{Q}.weight": torch.ones(300, 200).bfloat16()}),
            "channel",
            f"{Q}.weight_scale_inv needs an FP8 weight, got none: the weight of the scale .* is BF16",
        ),
        (
            lambda tensors: tensors.update({f"{Q}.weight_scale_inv": torch.ones(5, 4)}),  # also fits 60x50
            "bf16",
            r"q_proj\.weight needs blocks of 128x128, as config\.json says, got a scale that fits 64x64",
        ),
    ],
)
def test_faults_are_refused_and_nothing_is_left(tmp_path, change, to, message):
    write_format(written.deepseek, tmp_path / "in")
    tensors = load_file(tmp_path / "in" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(tmp_path / "in", tmp_path / "out", to=to, lossy=True)
    assert left_in(tmp_path) == ["in"]


def test_an_unquantized_checkpoint_is_refused(tmp_path):
    save_file(small_state(), tmp_path / "in.safetensors")
    with pytest.raises(CheckpointError, match="needs FP8 weights to be converted, got none: quantize makes them"):
        convert_checkpoint(tmp_path / "in.safetensors", tmp_path / "out.safetensors", to="bf16")
