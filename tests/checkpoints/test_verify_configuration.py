"""`verify_checkpoint` compares a configuration with the tensors."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import open_checkpoint, open_files, quantize_checkpoint, verify_checkpoint
from fp8core.checkpoint.reading.faults import header_faults
from support.checkpoints import write

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from checkpoints.faulty import DOWN, K, Q, changed, found  # noqa: E402
from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import small_state, write_format  # noqa: E402


def test_the_configuration_is_compared_with_the_tensors(tmp_path):
    folder = tmp_path / "model"
    write_format(written.ct_channel, folder)
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]

    def told(change):
        changed = json.loads(json.dumps(config))
        change(changed["quantization_config"], changed["quantization_config"]["config_groups"]["group_0"])
        (folder / "config.json").write_text(json.dumps(changed))
        return {fault.tensor: fault.text for fault in verify_checkpoint(folder).faults}

    assert not told(lambda whole, group: None)
    blocks = told(lambda whole, group: group["weights"].update(strategy="block", block_structure=[128, 128]))
    assert "says one scale per block" in blocks[f"{Q}.weight"]
    assert "has none" in told(lambda whole, group: group["input_activations"].update(dynamic=False))[f"{Q}.weight"]
    assert set(told(lambda whole, group: whole.update(ignore=["re:.*self_attn"]))) == {
        f"{Q}.weight", "model.layers.0.self_attn.k_proj.weight"
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert found(folder) == [("config", f"{DOWN}.weight")]
    assert group


@pytest.mark.parametrize(
    ("writer", "name", "says"),
    [
        *((one, None, "has none") for one in (written.ct_static, written.hf_static, written.autofp8, written.modelopt)),
        *((one, "input_scale", "are dynamic") for one in (written.ct_channel, written.deepseek, written.fbgemm)),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_the_configuration_says_how_inputs_are_scaled(tmp_path, writer, name, says):
    def change(tensors):
        if name is not None:
            tensors[f"{Q}.{name}"] = torch.tensor(0.02)
        else:
            del tensors[next(one for one in tensors if one in (f"{Q}.input_scale", f"{Q}.activation_scale"))]

    faults = {fault.tensor: fault.text for fault in verify_checkpoint(changed(tmp_path / "in", change, writer)).faults}
    assert set(faults) == {f"{Q}.weight"}
    assert says in faults[f"{Q}.weight"]


def test_a_layer_is_compared_with_the_group_that_targets_it(tmp_path):
    """By name first, then by class, as compressed-tensors and vLLM look for the group of a layer."""

    def in_two_groups(out):
        for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"):
            codes, scale = written.coded(out.linears[module], 1, 200)
            out.add(module, codes, scale, 1, -1, scale, "weight_scale")
        module = "model.layers.0.mlp.down_proj"
        codes, scale = written.coded(out.linears[module], 64, 128)
        out.add(module, codes, scale, 64, 128, scale, "weight_scale")
        out.config = written.compressed(
            {"strategy": "channel"}, {"strategy": "token", "dynamic": True}, "mixed-precision"
        )
        blocks = written.compressed({"strategy": "block", "block_structure": [64, 128]}, {"dynamic": True})
        blocks = {**blocks["config_groups"]["group_0"], "targets": ["re:.*mlp.*"], "format": "float-quantized"}
        out.config["config_groups"]["group_1"] = blocks

        cache = {"targets": ["re:.*_proj$"], "weights": None, "output_activations": {"num_bits": 8, "type": "float"}}
        out.config["config_groups"] = {"cache": cache, **out.config["config_groups"]}

    folder = tmp_path / "model"
    written.write_format(in_two_groups, folder)
    assert not found(folder)
    assert open_checkpoint(folder).layers["model.layers.0.mlp.down_proj"].group_shape == (64, 128)
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["targets"], groups["group_1"]["targets"] = ["re:.*mlp.*"], ["Linear"]
    (folder / "config.json").write_text(json.dumps(config))
    assert set(found(folder)) == {
        ("scale shape", f"{DOWN}.weight"), ("config", f"{Q}.weight"), ("config", "model.layers.0.self_attn.k_proj.weight")
    }  # fmt: skip
    groups["group_0"]["format"] = "int-quantized"
    (folder / "config.json").write_text(json.dumps(config))
    told = {fault.tensor: fault.text for fault in verify_checkpoint(folder).faults}
    assert told[f"{DOWN}.weight"] == f"config.json says int-quantized, but {DOWN}.weight is FP8"


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "fp8_pb_wo"])
@pytest.mark.parametrize("file", ["hf_quant_config.json", "config.json"])
def test_all_that_modelopt_writes_is_read(tmp_path, algorithm, file):
    """It writes some algorithms in lower case, and older files have the content of its own file in config.json."""
    folder = tmp_path / "model"
    write_format(written.modelopt_blocks, folder)
    content = json.loads((folder / "hf_quant_config.json").read_text())
    content["quantization"] |= {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").unlink()
    whole = content if file != "config.json" else {"quantization_config": {"quant_method": "modelopt", **content}}
    (folder / file).write_text(json.dumps(whole))
    claim = open_checkpoint(folder).claim
    assert (claim.file, claim.variant, claim.kv_cache, claim.ignore) == (file, "FP8_PB_WO", "FP8", ("lm_head",))
    assert claim.granularities == {"block"}
    assert not found(folder)


def with_one_unquantized(folder, state):
    """A folder in compressed-tensors' format, of whose linear layers ``Q`` is not FP8."""

    def change(tensors):
        del tensors[f"{Q}.weight_scale"]
        tensors[f"{Q}.weight"] = state[f"{Q}.weight"]

    return changed(folder, change, written.ct_channel, state=state)


def test_a_linear_layer_that_is_not_fp8_has_to_be_on_the_list(tmp_path):
    state = small_state()
    folder = with_one_unquantized(tmp_path / "model", state)
    assert found(folder) == [("config", f"{Q}.weight")]
    (tmp_path / "made").mkdir()
    save_file(state, tmp_path / "bf16.safetensors", {"format": "pt"})
    quantize_checkpoint(tmp_path / "bf16.safetensors", tmp_path / "made" / "model.safetensors", exclude=[Q, "*.k_proj"])
    assert not found(tmp_path / "made" / "model.safetensors")


@pytest.mark.parametrize(
    ("targets", "reported"),
    [
        (["Linear"], [Q]),
        (["re:.*q_proj$"], [DOWN, K, Q]),
        (["re:.*k_proj$", "re:.*mlp.*"], []),
        ([DOWN], [K]),
        ([DOWN, "AClass"], []),
    ],
)
def test_targets_name_the_layers_that_are_fp8_and_no_others(tmp_path, targets, reported):
    folder = with_one_unquantized(tmp_path / "model", small_state())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["targets"] = targets
    (folder / "config.json").write_text(json.dumps(config))
    assert found(folder) == [("config", f"{module}.weight") for module in reported]


def test_fp8_weights_contradict_a_configuration_of_integers(tmp_path):
    folder = changed(tmp_path / "model", lambda tensors: None, written.ct_channel)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["format"] = "int-quantized"
    (folder / "config.json").write_text(json.dumps(config))
    faults = verify_checkpoint(folder).faults
    assert f"config.json says int-quantized, but {Q}.weight is FP8" in {fault.text for fault in faults}


def test_claims_of_comfyui_name_layers(tmp_path):
    folder = changed(tmp_path / "model", lambda tensors: None, written.comfyui_header)
    tensors = load_file(folder / "model.safetensors")
    layers = {module: {"format": "float8_e4m3fn"} for module in (Q, DOWN, "absent")}
    metadata = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    save_file(tensors, folder / "model.safetensors", metadata)
    assert found(folder) == [("config", "absent.weight")]


F32, E4M3 = np.float32, ml_dtypes.float8_e4m3fn


def claimed(strategy, targets=("Linear",), variant="float-quantized", **others):
    """The config.json of compressed-tensors with one group for each of the targets."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, **others}
    groups = {f"group_{at}": {"targets": [one], "weights": weights} for at, one in enumerate(targets)}
    return {"quantization_config": {"quant_method": "compressed-tensors", "format": variant, "config_groups": groups}}


def of_comfyui(**layers):
    return {"_quantization_metadata": json.dumps({"layers": {name: {"format": one} for name, one in layers.items()}})}


CHANNEL, TENSOR, BLOCK = claimed("channel"), claimed("tensor"), claimed("block", block_structure=[128, 128])
MIXED = claimed("block", ["Linear", "RowLinear"], block_structure=[128, 128])
MIXED["quantization_config"]["config_groups"]["group_1"]["weights"] = {"strategy": "channel"}
FP8_LAYER = {"layers.0.up.weight": ((64, 32), E4M3), "layers.0.up.weight_scale": ((64, 1), F32)}
PACKED = {"layers.0.down.weight_packed": ((64, 4), np.int64), "layers.0.down.weight_scale": ((64, 1), F32)}
EMBEDDING = {"embed.weight": ((64, 32), F32), "layers.0.norm.weight": ((64,), F32)}
ONE_ROW = {"layers.0.up.weight": ((1, 32), E4M3), "layers.0.up.weight_scale": ((1,), F32)}
BY_COLUMNS = ((64, 32), E4M3), ((1, 32), F32)


@pytest.mark.parametrize(
    ("tensors", "config", "metadata", "faulty"),
    [
        ({**FP8_LAYER, **PACKED}, CHANNEL, None, []),
        ({**FP8_LAYER, "scaled_fp8": ((2,), E4M3)}, {"model_type": "llama"}, None, []),
        (FP8_LAYER, {"model_type": "llama"}, None, ["layers.0.up.weight"]),
        (FP8_LAYER, {"quantization_config": {"quant_method": "of tomorrow"}}, None, []),
        ({**PACKED, "layers.0.up.weight": ((64, 32), F32)}, claimed("group", variant="pack-quantized"), None, []),
        (EMBEDDING, claimed("group", variant="mxfp8-quantized"), None, [""]),
        (EMBEDDING, CHANNEL, None, [""]),
        (EMBEDDING, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, None, []),
        (EMBEDDING, {}, of_comfyui(embed="nvfp4"), []),
        (EMBEDDING, {}, of_comfyui(embed="nvfp4", norm="float8_e4m3fn"), ["norm.weight"]),
        (FP8_LAYER, {}, of_comfyui(**{"layers.0.up": "float8_e4m3fn", "embed": "nvfp4"}), []),
        ({**FP8_LAYER, "layers.0.down.weight": ((32, 64), F32)}, CHANNEL, None, ["layers.0.down.weight"]),
        ({**FP8_LAYER, "layers.0.down.weight": ((32, 64), F32)},
         {"quantization_config": {"quant_method": "fbgemm_fp8"}}, None, []),
        ({**FP8_LAYER, "adapter.weight": ((32, 64), F32)}, CHANNEL, None, []),
        ({"layers.0.gate_up_proj.weight": ((64, 32), E4M3), "layers.0.gate_up_proj.weight_scale": ((2,), F32)},
         TENSOR, None, []),
        (dict(zip(FP8_LAYER, BY_COLUMNS, strict=True)), CHANNEL, None, ["layers.0.up.weight"]),
        ({"layers.0.experts.up_proj": ((2, 64, 32), E4M3), "layers.0.experts.up_proj_scale": ((2, 1, 32), F32)},
         CHANNEL, None, []),
        ({"layers.0.experts.up_proj": ((2, 64, 32), E4M3), "layers.0.experts.up_proj_scale": ((2, 64, 1), F32),
          "layers.0.experts.up_proj_input_scale": ((2,), F32)}, CHANNEL, None, []),
        (ONE_ROW, CHANNEL, None, []),
        ({"layers.0.experts.up_proj": ((2, 1, 32), E4M3), "layers.0.experts.up_proj_scale": ((2,), F32)},
         CHANNEL, None, []),
        (FP8_LAYER, TENSOR, None, ["layers.0.up.weight"]),
        (FP8_LAYER, MIXED, None, []),
        (FP8_LAYER, BLOCK, None, ["layers.0.up.weight"]),
    ],
)  # fmt: skip
def test_a_configuration_contradicts_what_it_says_of_fp8_weights_alone(tmp_path, tensors, config, metadata, faulty):
    made = {name: np.ones(shape, F32).astype(dtype) for name, (shape, dtype) in tensors.items()}
    file = write(tmp_path / "model.safetensors", made, metadata)
    assert [fault.tensor for fault in header_faults(open_files([file], config))] == faulty


def test_the_configuration_beside_a_file_of_another_name_is_another_s(tmp_path):
    file = write(tmp_path / "one.safetensors", {name: np.ones(s, F32).astype(d) for name, (s, d) in FP8_LAYER.items()})
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not [*header_faults(open_checkpoint(file))]
