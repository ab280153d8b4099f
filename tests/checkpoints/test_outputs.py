"""The granularity, names and configuration that conversions choose for each format."""

from types import SimpleNamespace

import pytest

from fp8core.checkpoint.conversion.changes import Goal
from fp8core.checkpoint.conversion.outputs import (
    configuration,
    granularity_for,
    input_scale_named,
    keeps_static_scales,
    kv_scale_named,
    modelopt_file,
    scale_named,
)
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, PER_CHANNEL, PER_TENSOR, GroupShape

GROUP_MX, SMALL = GroupShape(1, 32), GroupShape(64, 64)


def layer(granularity="channel", group_shape=PER_CHANNEL, k=64, scales="float32", name="up.weight", experts=None):
    return SimpleNamespace(
        granularity=granularity, group_shape=group_shape, matrix_shape=(64, k), scale_kind=scales,
        name=name.removesuffix(".weight"), weight=SimpleNamespace(name=name), experts=experts,
    )  # fmt: skip


CHANNEL, TENSOR, BLOCK = layer(), layer("tensor", PER_TENSOR), layer("block", BLOCK_128)
OTHER, MX = layer("block", SMALL), layer("group", GROUP_MX, scales="e8m0")
ODD, PLAIN = layer("group", GROUP_MX, 80, "e8m0"), layer("group", GROUP_MX)


@pytest.mark.parametrize(
    ("targets", "layers", "static", "found"),
    [
        ("channel", [BLOCK], False, ("channel", PER_CHANNEL)),
        ("comfyui", [BLOCK], False, ("tensor", PER_TENSOR)),
        ("deepseek", [CHANNEL], False, ("block", BLOCK_128)),
        ("mxfp8 modelopt-mxfp8", [CHANNEL], False, ("group", GROUP_MX)),
        ("compressed-tensors modelopt", [BLOCK, BLOCK], False, ("block", BLOCK_128)),
        ("compressed-tensors modelopt", [BLOCK, CHANNEL], False, ("channel", PER_CHANNEL)),
        ("compressed-tensors deepseek block", [OTHER, OTHER], False, ("block", SMALL)),
        ("modelopt", [OTHER], False, ("block", BLOCK_128)),
        ("compressed-tensors deepseek block", [OTHER, BLOCK], False, ("block", BLOCK_128)),
        ("deepseek block", [OTHER, CHANNEL], False, ("block", BLOCK_128)),
        ("deepseek block", [MX], False, ("block", BLOCK_128)),
        ("compressed-tensors modelopt", [MX, MX], False, ("group", GROUP_MX)),
        ("compressed-tensors modelopt", [MX, CHANNEL], False, ("channel", PER_CHANNEL)),
        ("compressed-tensors modelopt", [ODD], False, ("channel", PER_CHANNEL)),
        ("compressed-tensors modelopt", [PLAIN], False, ("channel", PER_CHANNEL)),
        ("compressed-tensors", [TENSOR], False, ("tensor", PER_TENSOR)),
        ("compressed-tensors modelopt", [TENSOR], True, ("tensor", PER_TENSOR)),
        ("modelopt", [TENSOR], False, ("channel", PER_CHANNEL)),
        ("compressed-tensors modelopt", [TENSOR, CHANNEL], True, ("channel", PER_CHANNEL)),
    ],
)
def test_layers_keep_their_granularity_if_the_format_has_it_for_all(targets, layers, static, found):
    for target in targets.split():
        assert granularity_for(target, layers, static, None) == found
        assert granularity_for(target, iter(layers), static, None) == found
        assert granularity_for(target, layers, static, GroupShape(32, 32)) == ("block", (32, 32))


def test_static_scales_stay_beside_scales_per_tensor_and_where_there_are_some_per_channel():
    stays = {(output, one) for output in ("compressed-tensors", "modelopt", "comfyui")
             for one in ("tensor", "channel", "block", "group") if keeps_static_scales(output, one)}  # fmt: skip
    assert stays == {
        ("compressed-tensors", "tensor"), ("compressed-tensors", "channel"), ("modelopt", "tensor"),
        ("comfyui", "tensor"), ("comfyui", "channel"),
    }  # fmt: skip


def goal(granularity, shape=PER_CHANNEL, scale_format="float32"):
    return Goal(granularity, shape, scale_format, "float8_e4m3fn")


@pytest.mark.parametrize(
    ("output", "granularity", "found"),
    [
        ("compressed-tensors", "channel", ("up.weight_scale", (3, 2))),
        ("compressed-tensors", "tensor", ("up.weight_scale", (1,))),
        ("modelopt", "tensor", ("up.weight_scale", ())),
        ("modelopt", "channel", ("up.weight_scale", (3,))),
        ("modelopt", "block", ("up.weight_scale", (3, 1, 2, 1))),
        ("modelopt", "group", ("up.weight_scale", (3, 2))),
        ("comfyui", "tensor", ("up.weight_scale", ())),
        ("deepseek", "block", ("up.weight_scale_inv", (3, 2))),
    ],
)
def test_scales_have_the_names_and_shapes_of_their_format(output, granularity, found):
    assert scale_named(output, layer(), goal(granularity), (3, 2)) == found
    assert input_scale_named(output, layer()) == ("up.input_scale", (1,) if output == "compressed-tensors" else ())


def test_scales_beside_what_is_no_module_s_weight_have_a_name_in_deepseek_s_format_alone():
    for name, experts, found in (
        ("experts.up_proj", 4, ("experts.up_proj_scale_inv", (4, 3, 2))),
        ("experts.weight", 4, ("experts.weight_scale_inv", (4, 3, 2))),
        ("table", None, ("table_scale_inv", (3, 2))),
    ):
        one = layer(name=name, experts=experts)
        assert scale_named("deepseek", one, goal("block"), (3, 2)) == found
        for output in ("compressed-tensors", "modelopt", "comfyui"):
            with pytest.raises(CheckpointError, match=rf"{name} needs to be the weight of one module for {output}"):
                scale_named(output, one, goal("tensor"), (3, 2))


def test_scales_of_the_cache_are_one_number_except_in_compressed_tensors():
    for shape in ((), (1,), (1, 1)):
        assert kv_scale_named("compressed-tensors", "attn.k_scale", shape) == ("attn.k_scale", (1,))
        assert kv_scale_named("deepseek", "attn.q_scale", shape) == ("attn.q_scale", (1,))
        for one in "kv":
            assert kv_scale_named("modelopt", f"attn.{one}_scale", shape) == (f"attn.{one}_proj.{one}_scale", ())
        assert kv_scale_named("modelopt", "attn.q_scale", shape) == ("attn.q_scale", shape)
    assert kv_scale_named("compressed-tensors", "attn.k_scale", (8,)) == ("attn.k_scale", (8,))
    for output in ("modelopt", "deepseek", "comfyui"):
        with pytest.raises(
            CheckpointError, match=rf"attn\.k_scale needs to be one number for {output}, got shape \[8\]"
        ):
            kv_scale_named(output, "attn.k_scale", (8,))


def made(output, granularity, shape=PER_CHANNEL, *, scale_format="float32", static=False, kv_cache=None):
    kept = [("re:gate.weight", (8, 64)), ("norm.weight", (64,)), ("table", (8, 8)), ("up.weight", (8, 8))]
    how = goal(granularity, shape, scale_format)
    return configuration(output, how, iter(kept), iter(["layers.0.up", "up"]), {}, static=static, kv_cache=kv_cache)


def test_a_configuration_says_what_is_stored():
    assert made("comfyui", "tensor") is None
    found = made("deepseek", "block", SMALL)
    assert (found["weight_block_size"], found["modules_to_not_convert"]) == ([64, 64], ["lm_head", "re:gate"])
    assert "scale_fmt" not in found
    for scale_format in ("ue8m0", "ue8m0_bytes"):
        assert made("deepseek", "block", SMALL, scale_format=scale_format)["scale_fmt"] == "ue8m0"
    group = made("compressed-tensors", "block", SMALL)["config_groups"]["group_0"]
    assert (group["weights"]["strategy"], group["weights"]["block_structure"]) == ("block", [64, 64])
    for static in (True, False):
        group = made("compressed-tensors", "channel", static=static)["config_groups"]["group_0"]
        assert group["input_activations"]["dynamic"] is not static
        assert "block_structure" not in group["weights"]
    for kv_cache in (None, "tensor", "attn_head"):
        scheme = made("compressed-tensors", "channel", kv_cache=kv_cache)["kv_cache_scheme"]
        assert (scheme and scheme["strategy"]) == kv_cache
    for granularity, algorithm in (
        ("tensor", "FP8"), ("channel", "FP8_PER_CHANNEL_PER_TOKEN"), ("block", "FP8_PB_WO"), ("group", "MXFP8"),
    ):  # fmt: skip
        assert made("modelopt", granularity)["quant_algo"] == algorithm
    for kv_cache, name in (("tensor", "FP8"), (None, None)):
        found = made("modelopt", "tensor", kv_cache=kv_cache)
        assert found["ignore"] == ["lm_head", "[r]e:gate"]  # patterns, of which none begins with re:
        assert modelopt_file(found)["quantization"] == {
            "quant_algo": "FP8", "kv_cache_quant_algo": name, "exclude_modules": found["ignore"],
        }  # fmt: skip
