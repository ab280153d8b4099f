"""What the shape of a scale says of a weight, alone and beside what the configuration names."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import open_checkpoint
from fp8core.checkpoint.formats.granularity import shard_widths
from fp8core.errors import CheckpointError
from support.checkpoints import fp8, write

E = "model.layers.0.mlp.experts"
SHAPES = [
    # weight, its name, the scale's shape -> granularity, group, shape of scales()
    ((300, 200), "a.weight", (3, 2), "block", (128, 128), (3, 2)),
    ((300, 200), "a.weight", (3, 1, 2, 1), "block", (128, 128), (3, 2)),
    ((300, 200), "a.weight", (300,), "channel", (1, -1), (300, 1)),
    ((300, 200), "a.weight", (300, 1), "channel", (1, -1), (300, 1)),
    ((300, 200), "a.weight", (), "tensor", (-1, -1), (1, 1)),
    ((300, 200), "a.weight", (1, 1), "tensor", (-1, -1), (1, 1)),
    ((300, 256), "a.weight", (300, 2), "group", (1, 128), (300, 2)),
    ((300, 200), "a.weight", (5, 4), "block", (64, 64), (5, 4)),
    ((100, 100), "a.weight", (1, 1), "tensor", (-1, -1), (1, 1)),
    ((100, 400), "a.weight", (1, 4), "block", (128, 128), (1, 4)),
    ((300, 200), "a.weight", (7, 5), None, None, ()),
    ((300, 200), "a.weight", (2,), None, None, ()),
    ((300, 200), "a.weight", (300, 2, 2), None, None, ()),
    ((300, 200), "a.weight", (3, 2, 2, 1), None, None, ()),
    ((3, 64, 5), "a.weight", (3, 1, 1), "channel", (1, -1), (3, 1)),
    ((300, 200), "a.gate_up_proj.weight", (2,), "shard", (1, -1), (300, 1)),
    ((512, 256), "a.qkv_proj.weight", (3,), "shard", (1, -1), (512, 1)),
    ((500, 256), "a.qkv_proj.weight", (3,), None, None, ()),
    ((512, 256), "a.qkv_proj.weight", (2,), None, None, ()),
    ((300, 200), "a.gate_up_proj.weight", (3,), None, None, ()),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 2, 2), "block", (128, 128), (4, 2, 2)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 256, 1), "channel", (1, -1), (4, 256, 1)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 1, 192), "column", (-1, 1), (4, 1, 192)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 192, 1), "column", (-1, 1), (4, 1, 192)),
    ((4, 256, 256), f"{E}.gate_up_proj", (4, 256, 1), "channel", (1, -1), (4, 256, 1)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4,), "tensor", (-1, -1), (4, 1, 1)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 1, 1), "tensor", (-1, -1), (4, 1, 1)),
    ((4, 256, 192), f"{E}.gate_up_proj", (), "tensor", (-1, -1), (4, 1, 1)),
    ((4, 192, 256), f"{E}.gate_up_proj", (4, 2), "shard", (1, -1), (4, 192, 1)),
    ((4, 256, 256), f"{E}.gate_up_proj", (4, 2, 1), "shard", (1, -1), (4, 256, 1)),
    ((4, 256, 192), f"{E}.gate_up_proj", (4, 2), None, None, ()),
    ((4, 256, 192), f"{E}.gate_up_proj", (3, 2, 2), None, None, ()),
]


@pytest.mark.parametrize(("shape", "name", "scale", "granularity", "group", "wide"), SHAPES)
def test_the_shape_of_a_scale_tells_its_granularity(tmp_path, shape, name, scale, granularity, group, wide):
    numbers = np.random.default_rng(0).random(scale, np.float32) + 1
    write(tmp_path / "model.safetensors", {name: fp8(*shape), f"{name}_scale": np.asarray(numbers, np.float32)})
    config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert (layer.granularity, layer.group_shape, layer.scale_shape) == (granularity, group, wide)
    block = "block" if group == (128, 128) else None
    schemes = {"tensor": "tensor", "channel": "channel", "shard": "channel", "block": block}
    assert layer.scheme == schemes.get(granularity)
    if granularity is None:
        assert "fit" in layer.fault()
        with pytest.raises(CheckpointError, match="fit"):
            layer.scales()
        return
    found = layer.scales()
    assert found.shape == wide
    if granularity == "shard":
        widths = {"qkv_proj": [256, 128, 128]}.get(name.split(".")[-2], [shape[-2] // 2] * 2)
        experts = numbers.reshape(-1, len(widths))
        np.testing.assert_array_equal(found.reshape(len(experts), -1), [np.repeat(one, widths) for one in experts])
    else:
        np.testing.assert_array_equal(found.ravel(), np.broadcast_to(np.ravel(numbers), found.size))


def test_a_block_size_of_the_configuration_counts_where_it_fits(tmp_path):
    write(
        tmp_path / "model.safetensors", {"a.weight": fp8(256, 256), "a.weight_scale_inv": np.ones((2, 4), np.float32)}
    )
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert (layer.granularity, layer.group_shape, layer.scheme) == ("block", (128, 64), None)
    one_block = {"a.weight": fp8(64, 64), "a.weight_scale_inv": np.ones((1, 1), np.float32)}
    write(tmp_path / "model.safetensors", one_block)
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert (layer.granularity, layer.group_shape) == ("block", (128, 64))


def _groups(weights):
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    "claimed",
    [
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        {"quant_method": "fp8", "weight_block_size": [128, -2]},
        {"quant_method": "fp8", "weight_block_size": [128, 128.0]},
        _groups({"strategy": "block", "block_structure": [0, 0]}),
        _groups({"strategy": "group", "group_size": 0}),
        _groups(8),
    ],
    ids=str,
)
def test_a_block_size_that_is_none_counts_for_nothing(tmp_path, claimed):
    write(
        tmp_path / "model.safetensors", {"a.weight": fp8(256, 256), "a.weight_scale_inv": np.ones((2, 2), np.float32)}
    )
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": claimed}))
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert (layer.granularity, layer.group_shape) == ("block", (128, 128))


def test_a_side_that_spans_the_axis_leaves_channels_channels(tmp_path):
    write(tmp_path / "model.safetensors", {"a.weight": fp8(256, 256), "a.weight_scale": np.ones((256, 1), np.float32)})
    claimed = _groups({"strategy": "channel", "num_bits": 8, "type": "float", "group_size": -1})
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": claimed}))
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert (layer.granularity, layer.group_shape) == ("channel", (1, -1))


@pytest.mark.parametrize(("sides", "scale"), [([128, 1 << 31], (2, 1)), ([True, 96], (256, 3))])
def test_nor_do_sides_that_no_group_has(tmp_path, sides, scale):
    tensors = {"a.weight": fp8(256, 256), "a.weight_scale_inv": np.ones(scale, np.float32)}
    write(tmp_path / "model.safetensors", tensors)
    claimed = {"quant_method": "fp8", "weight_block_size": sides}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": claimed}))
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert layer.fault()


@pytest.mark.parametrize(
    ("config", "widths"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64}, (64, 16, 16)),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 999}, (64, 16, 16)),
        ({"text_config": {"num_attention_heads": 4, "num_key_value_heads": None, "hidden_size": 32}}, (32, 32, 32)),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 65}, (64, 16, 16)),
        ({"num_attention_heads": [4, 8], "num_key_value_heads": 1, "hidden_size": 64}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": [1, 2], "hidden_size": 64}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": "1", "hidden_size": 64}, None),
        ({"num_attention_heads": 6, "num_key_value_heads": [1], "head_dim": 16}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": "16"}, None),
        ({"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16.0}, None),
        ({"num_attention_heads": -4, "num_key_value_heads": 10, "head_dim": 6}, None),
        ({"num_attention_heads": True, "hidden_size": 32}, None),
        ({}, None),
    ],
)
def test_the_rows_of_q_k_and_v_are_those_of_the_heads_or_not_known(config, widths):
    """Some models have a list of heads, one number for each layer."""
    assert shard_widths("a.qkv_proj.weight", 96, 3, config) == widths


def test_each_part_of_a_model_has_its_own_heads():
    config = {"text_config": {"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 64},
              "vision_config": {"num_attention_heads": 4, "hidden_size": 32}}  # fmt: skip
    for module, widths in (("model", (64, 16, 16)), ("model.vision_tower", (32, 32, 32))):
        assert shard_widths(f"{module}.layers.0.self_attn.qkv_proj.weight", 96, 3, config) == widths


def test_gate_and_up_are_halves():
    assert [shard_widths("a.gate_up_proj.weight", rows, 2, {}) for rows in (96, 97)] == [(48, 48), None]


@pytest.mark.parametrize("dtype", [np.int64, np.int8, ml_dtypes.float8_e4m3fn])
def test_scales_of_other_dtypes_are_none(tmp_path, dtype):
    write(tmp_path / "model.safetensors", {"a.weight": fp8(64, 32), "a.weight_scale": np.ones((64, 1), dtype)})
    (layer,) = open_checkpoint(tmp_path).layers.values()
    assert layer.granularity is None
    with pytest.raises(
        CheckpointError, match=r"a\.weight_scale of model\.safetensors needs a shape and dtype that fit"
    ):
        layer.scales()
