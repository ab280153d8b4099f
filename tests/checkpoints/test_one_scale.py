"""Weights so small that several granularities have scales of one shape: what the configuration says of them counts."""

import json

import numpy as np
import pytest

from fp8core.checkpoint import convert_checkpoint, open_checkpoint, quantize_checkpoint, verify_checkpoint

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYER = "model.layers.0"


def folder(path, tensors, quantization=None):
    path.mkdir()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    config = {"model_type": "llama"} | ({} if quantization is None else {"quantization_config": quantization})
    (path / "config.json").write_text(json.dumps(config))
    return path


def codes(*shape):
    torch.manual_seed(0)
    return (torch.randn(shape) * 100).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("scheme", ["channel", "tensor", "block", "mxfp8"])
@pytest.mark.parametrize("n", [1, 64])
@pytest.mark.parametrize("k", [32, 128])
def test_what_quantize_writes_has_no_fault(tmp_path, scheme, n, k):
    torch.manual_seed(0)
    state = {f"{LAYER}.o_proj.weight": torch.randn(n, k), f"{LAYER}.down_proj.weight": torch.randn(256, 384)}
    source = folder(tmp_path / "wide", state)
    summary = quantize_checkpoint(source, tmp_path / "fp8", scheme=scheme)
    assert summary.quantized or (scheme == "block" and k == 32)
    assert not verify_checkpoint(tmp_path / "fp8", against=source).faults


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("extents", [(1, 64), (64, 64), (128, 128)])
def test_one_number_is_that_of_a_block_where_blocks_are_claimed(tmp_path, shape, extents):
    state = {f"{LAYER}.up_proj.weight": codes(*extents), f"{LAYER}.up_proj.weight_scale_inv": torch.full(shape, 0.25)}
    large = {f"{LAYER}.down_proj.weight": codes(256, 384), f"{LAYER}.down_proj.weight_scale_inv": torch.ones(2, 3)}
    source = folder(tmp_path / "in", state | large, BLOCKS)
    layer = open_checkpoint(source).layers[f"{LAYER}.up_proj"]
    assert (layer.granularity, layer.group_shape, layer.scale_shape) == ("block", (128, 128), (1, 1))
    assert layer.scales().tolist() == [[0.25]]
    assert not verify_checkpoint(source).faults
    done = convert_checkpoint(source, tmp_path / "out", to="compressed-tensors")
    assert not done.lossy
    assert load_file(tmp_path / "out" / "model.safetensors")[f"{LAYER}.up_proj.weight_scale"].shape == (1, 1)


@pytest.mark.parametrize("extents", [(1, 96), (64, 64), (128, 160)])
def test_one_row_of_scales_of_stacked_experts_is_one_of_blocks(tmp_path, extents):
    n, k = extents
    blocks = -(-k // 128)
    scales = torch.arange(1, 1 + 4 * blocks).float().reshape(4, 1, blocks) / 64
    name = f"{LAYER}.mlp.experts.down_proj"
    state = {name: codes(4, n, k), f"{name}_scale_inv": scales}
    source = folder(tmp_path / "in", state, BLOCKS)
    layer = open_checkpoint(source).layers[name]
    assert (layer.granularity, layer.group_shape) == ("block", (128, 128))
    np.testing.assert_array_equal(layer.scales(), scales.numpy())
    assert not [fault for fault in verify_checkpoint(source).faults if fault.kind == "config"]


def test_groups_that_span_the_rows_are_groups(tmp_path):
    state = {f"{LAYER}.down_proj.weight": torch.randn(64, 32), f"{LAYER}.up_proj.weight": torch.randn(64, 96)}
    quantize_checkpoint(folder(tmp_path / "wide", state), tmp_path / "fp8", scheme="mxfp8")
    assert {layer.granularity for layer in open_checkpoint(tmp_path / "fp8").layers.values()} == {"group"}
    done = convert_checkpoint(tmp_path / "fp8", tmp_path / "out", to="modelopt")
    assert not done.lossy
    assert done.quantization_config["quant_algo"] == "MXFP8"
