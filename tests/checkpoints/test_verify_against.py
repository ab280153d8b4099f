"""`verify_checkpoint` with ``against``: a checkpoint is compared with its original."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import quantize_checkpoint, verify_checkpoint

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from checkpoints.faulty import DOWN, found  # noqa: E402
from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402
from support.checkpoints import write  # noqa: E402


def test_what_is_the_original_is_not_suspected(tmp_path):
    save_file({name: one * 1e-4 for name, one in small_state().items()}, tmp_path / "tiny.safetensors")
    quantize_checkpoint(tmp_path / "tiny.safetensors", tmp_path / "fp8.safetensors")
    assert {kind for kind, _ in found(tmp_path / "fp8.safetensors")} == {"scale squared"}
    assert not found(tmp_path / "fp8.safetensors", against=tmp_path / "tiny.safetensors")
    save_file(small_state(), tmp_path / "usual.safetensors")
    against = found(tmp_path / "fp8.safetensors", against=tmp_path / "usual.safetensors")
    assert {kind for kind, _ in against} == {"scale squared", "difference"}


def test_against_another_model_the_weights_differ(tmp_path):
    write_format(written.deepseek, tmp_path / "fp8")
    state = small_state()
    state[f"{DOWN}.weight"] = state[f"{DOWN}.weight"] * 1.5
    state["model.layers.0.input_layernorm.weight"] = state["model.layers.0.input_layernorm.weight"] * 2
    del state["model.layers.0.self_attn.k_proj.weight"]
    save_file(state, tmp_path / "bf16.safetensors")
    assert found(tmp_path / "fp8", against=tmp_path / "bf16.safetensors") == [
        ("difference", f"{DOWN}.weight"), ("difference", "model.layers.0.self_attn.k_proj.weight"),
        ("difference", "model.layers.0.input_layernorm.weight"),
    ]  # fmt: skip


def test_against_a_checkpoint_that_is_fp8_the_dtype_is_named(tmp_path):
    write_format(written.deepseek, tmp_path / "fp8")
    faults = verify_checkpoint(tmp_path / "fp8", against=tmp_path / "fp8").faults
    text = {fault.tensor: fault.text for fault in faults}[f"{DOWN}.weight"]
    assert "of F64, F32, F16, BF16, got [" in text
    assert f"of F8_E4M3 in {tmp_path / 'fp8'}" in text


BUFFERS = {
    "model.norm.weight": np.ones(8, np.float32),
    "model.mask": np.array([0, -np.inf, 1], np.float32),
    "model.unset": np.array([np.nan, 1], np.float32),
    "model.position_ids": np.arange(4),
    "model.frequencies": np.array([1, 1e200], np.float64),
    "model.rotary_emb.inv_freq": np.ones(4, np.float32),
    "lm_head.weight": np.ones((4, 8), np.float32),
}


def against_buffers(folder, change, config=None):
    """What verify reports of a copy whose tensors beside the FP8 weight are changed."""
    codes = {"up.weight": np.ones((4, 8), ml_dtypes.float8_e4m3fn), "up.weight_scale": np.ones((4, 1), np.float32)}
    tensors = {**codes, **BUFFERS}
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = np.asarray(value)
    folder.mkdir()
    write(folder / "fp8.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(config or {}))
    write(folder / "original.safetensors", {"up.weight": np.ones((4, 8), np.float32), **BUFFERS})
    return found(folder / "fp8.safetensors", against=folder / "original.safetensors")


def test_the_same_tensors_have_no_difference_whatever_their_numbers(tmp_path):
    assert not against_buffers(tmp_path / "model", {})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.norm.weight", None),
        ("lm_head.weight", None),
        ("model.position_ids", [0, 1, 3, 2]),
        ("model.position_ids", np.arange(4, dtype=np.float32)),
        ("model.mask", np.array([5, -np.inf, 1], np.float32)),
        ("model.mask", np.array([0, np.inf, 1], np.float32)),
        ("model.frequencies", np.array([1 + 2.0**-52, 1e200], np.float64)),
        ("model.frequencies", np.array([1, 1e201], np.float64)),
        ("model.unset", np.array([np.nan, 2], np.float32)),
        ("model.unset", np.array([1, 1], np.float32)),
        ("up.bias", np.ones(4, np.float32)),
    ],
)
def test_a_tensor_that_is_missing_added_or_differs_is_told(tmp_path, name, value, recwarn):
    assert against_buffers(tmp_path / "model", {name: value}) == [("difference", name)]
    assert not recwarn.list


def test_tensors_that_models_make_themselves_may_be_missing_or_added(tmp_path):
    tied = {"tie_word_embeddings": True}
    left_out = {"lm_head.weight": None, "model.rotary_emb.inv_freq": None}
    assert not against_buffers(tmp_path / "model", left_out, tied)
    added = {"output.weight": np.ones((4, 8), np.float32), "layers.0.rotary_emb.inv_freq": np.ones(4, np.float32)}
    assert not against_buffers(tmp_path / "added", added, tied)
    assert against_buffers(tmp_path / "untied", added) == [("difference", "output.weight")]


@pytest.mark.parametrize(
    "name", ["k_scale", "k_proj.output_scale", "k_fake_quantizer.qscale_act", "o_proj.input_scale"]
)
def test_tensors_of_the_quantization_may_be_added(tmp_path, name):
    assert not against_buffers(tmp_path / "model", {f"model.layers.0.self_attn.{name}": np.ones(1, np.float32)})


def test_what_is_quantized_otherwise_is_not_missing(tmp_path):
    write_format(written.ct_channel, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    for name in ("qweight", "qzeros"):
        tensors[f"model.layers.0.mlp.up_proj.{name}"] = torch.ones(4, 8, dtype=torch.int32)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    save_file({**small_state(), "model.layers.0.mlp.up_proj.weight": torch.ones(8, 8)}, tmp_path / "bf16.safetensors")
    assert not found(tmp_path / "fp8", against=tmp_path / "bf16.safetensors")


@pytest.mark.parametrize("transposed", [False, True])
def test_split_experts_are_compared_with_stacked_ones(tmp_path, transposed):
    random, shapes = np.random.default_rng(0), {"gate_up_proj": (3, 2 * 64, 96), "down_proj": (3, 96, 64)}
    tensors = {
        f"model.layers.{layer}.mlp.experts.{name}": random.standard_normal(shape, np.float32) / 16
        for layer in range(2)
        for name, shape in shapes.items()
    }
    if transposed:
        tensors = {name: np.ascontiguousarray(one.swapaxes(1, 2)) for name, one in tensors.items()}
    original = tmp_path / "bf16"
    original.mkdir()
    write(original / "model.safetensors", tensors)
    (original / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "hidden_size": 96}))
    quantize_checkpoint(original, tmp_path / "fp8", split_experts=True, exclude=["*.layers.1.*"])
    verified = verify_checkpoint(tmp_path / "fp8", against=original)
    assert not verified.faults
    assert len(verified.errors) == 9
    assert all(0.01 < error < 0.04 for error in verified.errors.values())
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.experts.down_proj"][layer + 1] *= 2
    write(original / "model.safetensors", tensors)
    assert found(tmp_path / "fp8", against=original) == [
        ("difference", f"model.layers.{layer}.mlp.experts.{layer + 1}.down_proj.weight") for layer in range(2)
    ]
