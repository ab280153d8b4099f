"""`claim_of`: what each of the configurations says, and of which modules."""

import pytest

from fp8core.checkpoint.formats.claims import NOTHING, claim_of
from fp8core.errors import CheckpointError
from fp8core.problem import BLOCK_128, GroupShape

CT = {"quant_method": "compressed-tensors"}
FP8 = {"quant_method": "fp8"}
CHANNEL = {"strategy": "channel"}


def of(found, **others):
    return claim_of({"quantization_config": found, **others}, {}, ())


def groups(*each, **others):
    """compressed-tensors' claim with these groups."""
    return of({**CT, "config_groups": {f"group_{at}": one for at, one in enumerate(each)}, **others})


def header(text):
    return claim_of({}, {}, [{}, {"_quantization_metadata": text}])


@pytest.mark.parametrize(
    ("claim", "fields"),
    [
        (of(FP8), {"format": "fp8", "variant": "fp8", "granularities": {"tensor"}, "group_shape": None, "kv_cache": ""}),
        (of({**FP8, "scale_fmt": "ue8m0"}), {"variant": "fp8, scales ue8m0"}),
        (of({**FP8, "weight_block_size": [128, 64]}), {"granularities": {"block"}, "group_shape": GroupShape(128, 64)}),
        (of({**FP8, "weight_block_size": [128, -1]}), {"granularities": {"block"}, "group_shape": GroupShape(128, -1)}),
        *((of({**FP8, "weight_block_size": [128, side]}), {"granularities": {"tensor"}, "group_shape": None})
          for side in (0, -2, 1 << 31, True, 1.0, "128")),
        (of({**FP8, "activation_scheme": "static"}), {"activations": "static"}),
        (of({**FP8, "activation_scheme": "other"}), {"activations": None}),
        (of({**FP8, "kv_cache_scheme": "static"}), {"kv_cache": "fp8"}),
        (of({**FP8, "modules_to_not_convert": ["a"], "ignored_layers": ["b"]}), {"ignore": ("a",)}),
        (of({**FP8, "modules_to_not_convert": [], "ignored_layers": ["b"]}), {"ignore": ("b",)}),
        (of({"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["a"]}),
         {"format": "fbgemm_fp8", "granularities": {"channel"}, "activations": "dynamic", "ignore": ("a",)}),
        (of({"quant_method": "mxfp8"}), {"format": "mxfp8", "variant": "mxfp8"}),
        (of({"quant_method": "gptq"}), {"format": None, "variant": "gptq"}),
        (of({"bits": 8}), {"format": None, "file": "config.json", "variant": ""}),
        (of({"config_groups": {"group_0": {"weights": CHANNEL}}}), {"format": "compressed-tensors"}),
        (of({"config_groups": {}, "quant_algo": "FP8"}), {"format": "modelopt", "granularities": {"tensor"}}),
        (of({"quant_algo": "FP8", "quant_method": "fp8"}), {"format": "fp8"}),
        *((of({"quant_method": method, "quant_algo": "FP8"}), {"format": "modelopt", "activations": "static"})
          for method in ("modelopt", "modelopt_fp8", "modelopt_mixed", "ModelOpt", "of tomorrow")),
        (of({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}),
         {"variant": "FP8_PB_WO", "granularities": {"block"}, "group_shape": BLOCK_128, "activations": None}),
        (of({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}),
         {"granularities": {"channel"}, "group_shape": None, "activations": "dynamic"}),
        (of({"quant_method": "modelopt", "quant_algo": "MXFP8"}),
         {"granularities": {"group"}, "group_shape": GroupShape(1, 32)}),
        (of({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["a"]}),
         {"granularities": set(), "ignore": ("a",), "kv_cache": ""}),
        (of({"quant_method": "modelopt", "exclude_modules": ["a"], "ignore": ["b"]}), {"ignore": ("a",)}),
        (of({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}), {"kv_cache": "FP8"}),
        (of({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}}), {"kv_cache": "FP8"}),
        (of({"quant_method": "modelopt", "quant_algo": "none", "quantization": {"quant_algo": "FP8"}}),
         {"variant": "FP8"}),
        (claim_of({"quantization_config": FP8}, {"quantization": {"quant_algo": "FP8"}}, ()),
         {"format": "fp8", "file": "config.json"}),
        (claim_of({}, {"quantization": {"quant_algo": "FP8"}}, ()),
         {"format": "modelopt", "file": "hf_quant_config.json"}),
        (claim_of({"compression_config": CT}, {}, (), "a.json"), {"format": "compressed-tensors", "file": "a.json"}),
        (claim_of({"text_config": {"quantization_config": FP8}}, {}, ()), {"format": "fp8"}),
        (claim_of({"text_config": 5, "quantization_config": None}, {"quantization": None}, ()), NOTHING._asdict()),
        (groups({"weights": CHANNEL, "input_activations": {"dynamic": True}}),
         {"granularities": {"channel"}, "group_shape": None, "activations": "dynamic", "groups": ()}),
        (groups({"weights": {"strategy": "block", "block_structure": [64, 128]}, "input_activations": {}}),
         {"granularities": {"block"}, "group_shape": GroupShape(64, 128), "activations": None}),
        (groups({"weights": {"strategy": "channel", "block_structure": [64, 128]}}), {"group_shape": None}),
        (groups({"weights": {"strategy": "group", "group_size": 32}}),
         {"granularities": {"group"}, "group_shape": GroupShape(1, 32)}),
        (groups({"weights": {"strategy": "group", "group_size": 32}}, {"weights": {"strategy": "group", "group_size": 64}}),
         {"granularities": {"group"}, "group_shape": None}),
        (groups({"weights": CHANNEL, "input_activations": {"dynamic": True}}, {"weights": CHANNEL}),
         {"activations": "dynamic"}),
        (groups({"weights": CHANNEL, "input_activations": {"dynamic": True}},
                {"weights": CHANNEL, "input_activations": {"dynamic": False}}), {"activations": None}),
        (groups(kv_cache_scheme={"type": "float", "num_bits": 8}), {"kv_cache": "float8"}),
        (groups(transform_config={"config_groups": {
            "R1": {"apply": [{"location": "weight_input"}, {"location": "weight_output"}]},
            "R2": {"apply": [{"location": "input"}]}, "R3": {"apply": [{"location": "q_attn"}]}, "R4": {}}}),
         {"transforms": ("R2", "R3", "R4")}),
        (groups(transform_config={"config_groups": {"R3": {"apply": [{"location": "q_attn"}, {"location": "k_cache"}]}}}),
         {"transforms": ()}),
        (header('{"layers": {"a": {"format": "float8_e4m3fn"}}}'),
         {"format": "comfyui", "granularities": {"tensor"}, "layers": {"a": "float8_e4m3fn"}, "file": "the header"}),
        (header('{"layers": {"a": {"format": "float8_e4m3fn"}, "b": {"format": "nvfp4"}}}'),
         {"granularities": set(), "variant": "float8_e4m3fn, nvfp4"}),
        (header('{"layers": {}}'), NOTHING._asdict()),
        *((header(text), {"format": "comfyui", "layers": {}, "granularities": set()})
          for text in ("{", "5", '{"layers": 5}', '{"layers": {"a": 5}}')),
    ],
)  # fmt: skip
def test_a_configuration_claims_what_it_says(claim, fields):
    assert {name: getattr(claim, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("claim", "ignored", "covered"),
    [
        (of({**FP8, "modules_to_not_convert": ["lm_head", "layers.1", "model.*"]}),
         ("lm_head", "model.lm_head", "model.layers.1.up"), ("my_lm_head", "model.layers.10.up", "model.layers.0.up")),
        (of({"quant_method": "modelopt", "ignore": ["*.gate", "re:.*[.]experts[.]"]}),
         ("layers.0.gate", "layers.0.experts.0.up"), ("gate", "layers.0.up")),
        (groups({"weights": CHANNEL, "targets": ["Linear"]}, ignore=["lm_head", "*.gate", "re:.*[.]up$"]),
         ("lm_head", "layers.0.up"), ("model.lm_head", "layers.0.gate")),
        (groups({"weights": CHANNEL, "targets": ["re:.*[.]up$", "layers.0.down"]}, ignore=["layers.1.up"]),
         ("layers.1.up",), ("layers.0.up", "layers.0.down")),
    ],
)  # fmt: skip
def test_a_list_names_modules_as_its_readers_match_them(claim, ignored, covered):
    for module in ignored:
        assert claim.ignores(module)
        assert not claim.covers(module)
    for module in covered:
        assert not claim.ignores(module)
        assert claim.covers(module)
        assert claim.may_cover(module)


def test_targets_that_are_no_classes_are_all_of_the_layers():
    claim = groups({"weights": CHANNEL, "targets": ["re:.*[.]up$", "layers.0.down"]})
    assert not claim.covers("layers.1.down")
    assert not claim.may_cover("layers.1.down")
    claim = groups({"weights": CHANNEL, "targets": ["AttentionOfSome", "layers.0.down"]})
    assert not claim.covers("layers.1.down")
    assert claim.may_cover("layers.1.down")
    assert not groups({"weights": CHANNEL, "targets": ["re:Attention"]}).may_cover("layers.1.down")


def test_the_group_of_a_module_is_the_one_that_names_it_or_the_only_one_of_its_class():
    block = {"weights": {"strategy": "block", "block_structure": [128, 128]}, "targets": ["Linear"], "format": "b"}
    channel, up = {"weights": CHANNEL, "targets": ["Linear"]}, {"weights": CHANNEL, "targets": ["re:.*[.]up$"]}
    claim = groups(block, up)
    assert claim.of("layers.0.up").granularities == {"channel"}
    assert (claim.of("layers.0.down").granularities, claim.of("layers.0.down").variant) == ({"block"}, "b")
    assert groups(block, channel).of("layers.0.up").granularities == {"block", "channel"}
    cache = {"weights": None, "targets": ["re:.*[.]up$"]}
    assert groups(cache, block).of("layers.0.up").granularities == {"block"}


def test_a_pattern_that_does_not_compile_is_refused():
    for claimed in ({**FP8, "ignored_layers": ["re:("]}, {**CT, "ignore": ["re:("]}):
        with pytest.raises(CheckpointError, match="list of modules that are not quantized needs regular expressions"):
            of(claimed)
    with pytest.raises(CheckpointError, match="targets in the configuration needs regular expressions"):
        groups({"weights": CHANNEL, "targets": ["re:("]})
    assert of({**CT, "ignore": "lm_head"}).ignore == ()
