"""`verify_checkpoint` names the tensor of every fault, and finds none where there is none."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import (
    inspect_checkpoint,
    open_checkpoint,
    plan_conversion,
    quantize_checkpoint,
    verify_checkpoint,
)
from fp8core.errors import CheckpointError

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import FORMATS, small_state, write_format  # noqa: E402
from support.checkpoints import write  # noqa: E402

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"


def found(path, **keywords):
    return [(fault.kind, fault.tensor) for fault in verify_checkpoint(path, **keywords).faults]


@pytest.mark.parametrize("writer", FORMATS, ids=lambda writer: writer.__name__)
def test_what_other_code_wrote_has_no_fault_and_is_its_original_within_rounding(tmp_path, writer):
    out = write_format(writer, tmp_path / "fp8")
    save_file(small_state(), tmp_path / "bf16.safetensors")
    seen = verify_checkpoint(tmp_path / "fp8", against=tmp_path / "bf16.safetensors")
    assert not seen.faults
    originals = {module + ".weight": weight.float() for module, weight in out.linears.items()}
    for name, error in seen.errors.items():
        difference = (out.expected[name] - originals[name]).norm() / originals[name].norm()
        assert error == pytest.approx(float(difference), rel=1e-5)
    assert set(seen.errors) == set(originals)


def changed(folder, change, writer=written.deepseek, **keywords):
    """A folder in some format with something changed."""
    write_format(writer, folder, **keywords)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def set_code(value):
    def change(tensors):
        tensors[f"{Q}.weight"].view(torch.uint8)[7, 9] = value

    return change


def set_scale(value, suffix="weight_scale_inv"):
    def change(tensors):
        tensors[f"{Q}.{suffix}"].view(-1)[-1] = value

    return change


def drop(name):
    return lambda tensors: tensors.pop(name)


def replace(name, make):
    def change(tensors):
        tensors[name] = make(tensors[name]).contiguous()

    return change


def raised(tensors):
    """The fault of transformers#47030: scales go up to powers of two, codes stay."""
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        tensors[name] = written.up_to_power(tensors[name])


SCALE = f"{Q}.weight_scale_inv"
FAULTS = {
    "the scale is missing": (drop(SCALE), "scale missing", f"{Q}.weight"),
    "the weight is missing": (drop(f"{Q}.weight"), "scale left over", SCALE),
    "the scale is inverted": (replace(SCALE, lambda scale: 1 / scale), "scale inverted", f"{Q}.weight"),
    "the scale is squared": (replace(SCALE, lambda scale: scale**2), "scale squared", f"{Q}.weight"),
    "the scales were raised": (raised, "scale raised", f"{Q}.weight"),
    "a code is NaN": (set_code(0x7F), "NaN code", f"{Q}.weight"),
    "a code is -NaN": (set_code(0xFF), "NaN code", f"{Q}.weight"),
    "a scale is NaN": (set_scale(float("nan")), "scale value", SCALE),
    "a scale is infinite": (set_scale(float("inf")), "scale value", SCALE),
    "a scale is zero": (set_scale(0.0), "scale value", SCALE),
    "a scale is negative": (set_scale(-0.01), "scale value", SCALE),
    "a shape fits nothing": (replace(SCALE, lambda scale: torch.ones(7, 5)), "scale shape", f"{Q}.weight"),
    "a scale is of integers": (replace(SCALE, lambda scale: scale.int()), "scale shape", f"{Q}.weight"),
    "channels, and blocks are claimed": (replace(SCALE, lambda s: torch.full((600, 1), 0.01)), "config", f"{Q}.weight"),
    "other blocks are claimed": (replace(SCALE, lambda s: torch.full((10, 8), 0.01)), "config", f"{Q}.weight"),
    "a weight is bf16": (
        replace(f"{Q}.weight", lambda codes: codes.bfloat16()), "scale left over", SCALE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_named_with_its_tensor(tmp_path, name):
    change, kind, tensor = FAULTS[name]
    state = {key: value / 16 if "proj.weight" in key else value for key, value in small_state(600, 500).items()}
    faults = found(changed(tmp_path / "model", change, state=state))
    assert (kind, tensor) in faults
    if name != "the scales were raised":
        assert {one for _, one in faults} <= {tensor, SCALE, f"{Q}.weight"}, faults


@pytest.mark.parametrize("numbers", [[np.inf, -np.inf], [0x7FA00000, 0x7FA00000]], ids=["infinities", "signaling NaN"])
def test_numbers_that_are_faults_cause_no_warning(tmp_path, numbers, recwarn):
    scale = np.array(numbers, np.float32) if np.inf in numbers else np.array(numbers, np.uint32).view(np.float32)
    codes = np.ones((2, 64), ml_dtypes.float8_e4m3fn)
    write(tmp_path / "model.safetensors", {"up.weight": codes, "up.weight_scale": scale[:, None]})
    assert found(tmp_path / "model.safetensors") == [("scale value", "up.weight_scale")]
    assert not recwarn.list


@pytest.mark.parametrize("suffix", ["input_scale", "weight_scale"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_static_scales_are_looked_at(tmp_path, suffix, value):
    folder = changed(tmp_path / "model", set_scale(value, suffix), written.ct_static)
    assert ("scale value", f"{Q}.{suffix}") in found(folder)


def test_static_scales_of_several_layers_in_one_are_named(tmp_path):
    """A fused weight may have a scale for each layer in it, but its product has one input."""
    several = replace(f"{Q}.input_scale", lambda scale: scale.new_tensor([0.02, 0.03]))
    assert found(changed(tmp_path / "model", several, written.ct_static)) == [("scale shape", f"{Q}.input_scale")]
    with pytest.raises(CheckpointError, match=r"input_scale needs to be one number, got shape \[2\]: bf16, and"):
        plan_conversion(tmp_path / "model", to="tensor")
    assert plan_conversion(tmp_path / "model", to="bf16").left_out.keys() >= {f"{Q}.input_scale"}


def test_scales_of_keys_are_looked_at_and_bytes_of_exponents_can_be_nan(tmp_path):
    name = "model.layers.0.self_attn.k_proj.k_scale"
    folder = changed(tmp_path / "a", replace(name, lambda scale: scale * 0), written.modelopt)
    assert found(folder) == [("scale value", name)]
    folder = changed(tmp_path / "b", set_scale(255, "weight_scale"), written.mxfp8)
    assert ("scale value", f"{Q}.weight_scale") in found(folder)


@pytest.mark.parametrize("module", [Q, DOWN])
def test_an_inverted_layer_is_told_from_its_neighbours_and_all_of_them_from_what_is_usual(tmp_path, module):
    def inverted(tensors):
        for name in [one for one in tensors if one.endswith("weight_scale")]:
            tensors[name] = 1 / tensors[name]

    one = changed(tmp_path / "one", replace(f"{module}.weight_scale", lambda scale: 1 / scale), written.ct_channel)
    assert found(one) == [("scale inverted", f"{module}.weight")]
    every = changed(tmp_path / "all", inverted, written.ct_channel)
    assert set(found(every)) >= {("scale inverted", f"{one}.weight") for one in (Q, DOWN)}


def test_one_decayed_weight_of_many_is_no_fault_but_half_of_them_are(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weights = {f"model.layers.{n}.mlp.up_proj.weight": torch.randn(64, 96, generator=generator) / 32 for n in range(4)}

    def told(number):
        state = {name: one * (1e-4 if at < number else 1) for at, (name, one) in enumerate(weights.items())}
        write_format(written.ct_channel, tmp_path / "model", state)
        return found(tmp_path / "model")

    assert not told(0)
    assert not told(1)
    assert [kind for kind, _ in told(2)] == ["scale squared"] * 2


def test_what_is_the_original_is_not_suspected(tmp_path):
    save_file({name: one * 1e-4 for name, one in small_state().items()}, tmp_path / "tiny.safetensors")
    quantize_checkpoint(tmp_path / "tiny.safetensors", tmp_path / "fp8.safetensors")
    assert {kind for kind, _ in found(tmp_path / "fp8.safetensors")} == {"scale squared"}
    assert not found(tmp_path / "fp8.safetensors", against=tmp_path / "tiny.safetensors")
    save_file(small_state(), tmp_path / "usual.safetensors")
    against = found(tmp_path / "fp8.safetensors", against=tmp_path / "usual.safetensors")
    assert {kind for kind, _ in against} == {"scale squared", "difference"}


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


def sharded(folder, twice=None, index=None):
    write_format(written.deepseek, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for file, held in parts.items():
        more = [] if twice is None or file != twice[0] else [twice[1]]
        save_file({name: tensors[name] for name in {*held, *more}}, folder / file)
    weight_map = {name: file for file, held in parts.items() for name in held}
    text = json.dumps({"weight_map": weight_map}) if index is None else index(weight_map)
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


def written_twice(weight_map):
    name = next(iter(weight_map))
    return json.dumps({"weight_map": weight_map}).replace(
        '"weight_map": {', f'"weight_map": {{"{name}": "b.safetensors", '
    )


def moved(weight_map):
    return json.dumps({"weight_map": {**weight_map, SCALE: "a.safetensors"}})


def elsewhere(weight_map):
    return json.dumps({"weight_map": {**weight_map, SCALE: "c.safetensors"}})


def without(weight_map):
    return json.dumps({"weight_map": {name: file for name, file in weight_map.items() if name != SCALE}})


def test_an_index_that_is_right_has_no_fault(tmp_path):
    assert not found(sharded(tmp_path / "model"))


@pytest.mark.parametrize(("index", "name"), [(moved, SCALE), (elsewhere, SCALE), (without, SCALE)])
def test_an_index_that_is_wrong_is_told_with_the_tensor(tmp_path, index, name):
    assert ("index", name) in found(sharded(tmp_path / "model", index=index))


def test_a_fault_of_an_index_is_told_with_its_name(tmp_path):
    folder = sharded(tmp_path / "model", index=without)
    (folder / "model.safetensors.index.json").rename(folder / "diffusion.safetensors.index.json")
    texts = [fault.text for fault in verify_checkpoint(folder).faults if fault.kind == "index"]
    assert texts == [f"diffusion.safetensors.index.json does not name {SCALE}, which is in b.safetensors"]


def test_an_index_that_names_a_tensor_twice_is_told(tmp_path):
    folder = sharded(tmp_path / "model", index=written_twice)
    name = min(name for file in folder.glob("*.safetensors") for name in load_file(file))
    assert ("index", name) in found(folder)
    assert next(f.text for f in verify_checkpoint(folder).faults if f.kind == "index").endswith(
        "b.safetensors and a.safetensors"
    )


def test_a_tensor_in_two_files_without_an_index_is_told(tmp_path):
    folder = sharded(tmp_path / "model", twice=("a.safetensors", SCALE))
    (folder / "model.safetensors.index.json").unlink()
    assert ("index", SCALE) in found(folder)


def test_an_index_whose_files_are_all_elsewhere_is_called_so(tmp_path):
    """The folder does hold a safetensors file."""
    write_format(written.deepseek, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"model.safetensors.index.json names no file that is there"):
        verify_checkpoint(tmp_path / "model")


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
        ("model.unset", np.array([np.nan, 2], np.float32)),
        ("model.unset", np.array([1, 1], np.float32)),
    ],
)
def test_a_tensor_that_is_missing_or_differs_is_told(tmp_path, name, value, recwarn):
    assert against_buffers(tmp_path / "model", {name: value}) == [("difference", name)]
    assert not recwarn.list


def test_tensors_that_models_make_themselves_may_be_missing(tmp_path):
    left_out = {"lm_head.weight": None, "model.rotary_emb.inv_freq": None}
    assert not against_buffers(tmp_path / "model", left_out, {"tie_word_embeddings": True})


def test_what_is_quantized_otherwise_is_not_missing(tmp_path):
    write_format(written.ct_channel, tmp_path / "fp8")
    tensors = load_file(tmp_path / "fp8" / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"] = torch.ones(4, 8, dtype=torch.int32)
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


def test_progress_ends_with_all_bytes(tmp_path):
    write_format(written.deepseek, tmp_path / "fp8")
    save_file(small_state(), tmp_path / "bf16.safetensors")
    calls = []
    verify_checkpoint(
        tmp_path / "fp8", against=tmp_path / "bf16.safetensors", progress=lambda *call: calls.append(call)
    )
    assert [done for _, done, _ in calls] == sorted(done for _, done, _ in calls)
    assert len({total for *_, total in calls}) == 1
    assert calls[0][1] == 300 * 200


def test_scales_of_zero_weights_and_fnuz_nan(tmp_path):
    from support.checkpoints import write

    codes = np.zeros((4, 8), np.uint8).view(ml_dtypes.float8_e4m3fn)
    write(tmp_path / "model.safetensors", {"a.weight": codes, "a.weight_scale": np.ones((4, 1), np.float32)})
    assert not found(tmp_path / "model.safetensors")


def test_inspection_counts_kinds_and_bytes_and_is_json(tmp_path):
    out = write_format(written.modelopt, tmp_path / "model")
    seen = inspect_checkpoint(open_checkpoint(tmp_path / "model"))
    assert json.loads(json.dumps(seen.to_json()))["format"] == "modelopt"
    (layers,) = seen.layers
    assert (layers.what, layers.scales, layers.activations, layers.number) == ("e4m3fn", "tensor, float32", "static", 3)
    assert layers.elements == 3 * 300 * 200
    assert layers.nbytes == layers.elements + 3 * 8
    whole = sum(tensor.nbytes for tensor in out.tensors.values())
    assert sum(kind.nbytes for kind in (*seen.layers, *seen.others)) == whole
    assert seen.kv_scales == 2
