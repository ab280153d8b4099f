"""Checkpoints with weights of other quantizations, alone or beside FP8: they are named, and nothing half is written."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import (
    convert_checkpoint,
    inspect_checkpoint,
    open_checkpoint,
    plan_conversion,
    quantize_checkpoint,
    verify_checkpoint,
)
from fp8core.errors import CheckpointError
from support.checkpoints import left_in, normal, write
from support.command_line import (
    fp8core_,  # noqa: F401
)

UP, DOWN, OUT = (f"layers.0.{part}_proj" for part in ("mlp.up", "mlp.down", "self_attn.o"))
BYTES, CODES = np.zeros((64, 32), np.uint8), np.ones((64, 64), ml_dtypes.float8_e4m3fn)
GROUPS = np.ones((64, 4), ml_dtypes.float8_e4m3fn)
INTEGERS = np.zeros((64, 32), np.int8)
ONE = np.ones((), np.float32)
OTHERS = {
    "GPTQ or AWQ": {f"{UP}.qweight": np.zeros((8, 64), np.uint8), f"{UP}.scales": np.ones((1, 64), np.float16)},
    "packed integers of compressed-tensors": {f"{UP}.weight_packed": np.zeros((64, 8), np.uint8)},
    "NVFP4": {f"{UP}.weight": BYTES, f"{UP}.weight_scale": GROUPS, f"{UP}.weight_scale_2": ONE},
    "bitsandbytes": {f"{UP}.weight": BYTES.reshape(-1, 1), f"{UP}.weight.absmax": np.ones(64, np.float32)},
    "scaled integers or packed FP4": {f"{UP}.weight": INTEGERS, f"{UP}.weight_scale": np.ones((64, 1), np.float32)},
    "asymmetric quantization": {f"{UP}.weight_zero_point": np.ones((64, 1), np.int8)},
    "ModelOpt's AWQ or SmoothQuant": {f"{UP}.pre_quant_scale": np.ones(64, np.float32)},
    "torchao": {f"{UP}._weight_qdata": CODES, f"{UP}._weight_scale": np.ones((64, 1), np.float32)},
    "sparse weights of compressed-tensors": {f"{UP}.bitmask": BYTES, f"{UP}.compressed": np.ones((64, 32), np.float32)},
    "MXFP4": {f"{UP}_blocks": np.zeros((2, 64, 2, 16), np.uint8), f"{UP}_scales": np.zeros((2, 64, 2), np.uint8)},
}
every = pytest.mark.parametrize("what", OTHERS)


def folder(path, tensors, **config):
    path.mkdir()
    write(path / "model.safetensors", tensors)
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    return path


def dtypes_in(path):
    return {name: tensor.dtype for name, tensor in open_checkpoint(path).all_tensors.items()}


@every
def test_what_is_quantized_otherwise_is_not_quantized_in_part(tmp_path, what, fp8core_):
    source = folder(tmp_path / "in", {**OTHERS[what], f"{OUT}.weight": normal(64, 64)})
    with pytest.raises(CheckpointError, match=r"in is quantized already: layers\.0\..* is "):
        quantize_checkpoint(source, tmp_path / "out")
    assert left_in(tmp_path) == ["in"]
    status, out, _ = fp8core_("inspect", source)
    assert (status, out.splitlines()[0].split(", 1 file")[0]) == (0, f"{source}: no FP8, but {what}")


@every
@pytest.mark.parametrize("to", ["bf16", "channel"])
def test_fp8_beside_it_is_not_converted_alone(tmp_path, what, to, fp8core_):
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    source = folder(tmp_path / "in", {**OTHERS[what], **fp8})
    for convert in (convert_checkpoint, plan_conversion):
        with pytest.raises(CheckpointError, match=rf"all of its quantized weights in FP8, got .*, which is of {what}"):
            convert(source, tmp_path / "out", to=to)
    assert left_in(tmp_path) == ["in"]
    assert f", some weights {what}, 1 file" in fp8core_("inspect", source)[1]


@every
def test_verify_says_what_it_does_not_check(tmp_path, what, fp8core_):
    fp8 = {f"{DOWN}.weight": normal(64, 64).astype(ml_dtypes.float8_e4m3fn), f"{DOWN}.weight_scale": ONE / 64}
    claimed = {"quant_method": "compressed-tensors", "format": "mixed-precision"}
    source = folder(tmp_path / "in", {**OTHERS[what], **fp8}, quantization_config=claimed)
    name = open_checkpoint(source).other[0]
    status, out, _ = fp8core_("verify", source)
    unverified = f"Not verified: {name}, which is of {what}, and all others like it."
    assert (status, out.splitlines()) == (0, [unverified, f"{source}: no fault in 1 FP8 layer (compressed-tensors)"])
    alone = folder(tmp_path / "alone", OTHERS[what])
    with pytest.raises(CheckpointError, match=f"needs FP8 weights to be verified, got only {name}, which is of {what}"):
        verify_checkpoint(alone)


def test_one_fp8_weight_is_not_called_weights(tmp_path):
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    (fault,) = verify_checkpoint(folder(tmp_path / "in", fp8)).faults
    assert fault.text == f"config.json names no quantization, but {DOWN}.weight is FP8"


@pytest.mark.parametrize("scheme", [{"scheme": "channel"}, {"scheme": "static", "input_scales": {OUT: 0.5}}], ids=str)
def test_a_wide_weight_with_a_scale_of_its_inputs_is_refused(tmp_path, scheme):
    """The new scale would have its name."""
    tensors = {f"{OUT}.weight": normal(64, 64), f"{OUT}.input_scale": ONE}
    with pytest.raises(CheckpointError, match=rf"quantized already: {OUT}.weight has a scale, {OUT}.input_scale"):
        quantize_checkpoint(folder(tmp_path / "in", tensors), tmp_path / "out", **scheme)
    norm = {f"{OUT}.weight": normal(64, 64), "layers.0.norm.weight": normal(64), "layers.0.norm.input_scale": ONE}
    assert quantize_checkpoint(folder(tmp_path / "norm", norm), tmp_path / "out", **scheme).quantized


def test_a_method_without_fp8_is_named(tmp_path, fp8core_):
    source = folder(tmp_path / "in", {f"{OUT}.weight": normal(64, 64)}, quantization_config={"quant_method": "torchao"})
    with pytest.raises(CheckpointError, match=r"to be converted, got none: config\.json says torchao"):
        convert_checkpoint(source, tmp_path / "out", to="bf16")
    assert fp8core_("inspect", source)[1].startswith(f"{source}: no FP8 weights, 1 file")


def transforms(**places):
    """A quantization_config with a transform for each name, applied at a location each."""
    groups = {
        name: {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": places[name]}]} for name in places
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"strategy": "tensor"}}},
        "transform_config": {"config_groups": groups},
    }


@pytest.mark.parametrize("location", ["input", "output", "somewhere", "q_attn", "k_cache"])
def test_transforms_of_activations_are_not_left_out(tmp_path, location, fp8core_):
    """The stored weight is that of a transformed input, or only queries or only keys are transformed."""
    config = transforms(R1="weight_input", R4=location)
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    source = folder(tmp_path / "in", fp8, quantization_config=config)
    with pytest.raises(
        CheckpointError, match=r"got R4 in the transform_config of config\.json, which is of compressed-tensors"
    ):
        convert_checkpoint(source, tmp_path / "out", to="channel")
    assert "some weights compressed-tensors' transforms of activations" in fp8core_("inspect", source)[1]


def test_transforms_that_weights_contain_or_that_cancel_change_nothing(tmp_path):
    config = transforms(R1="weight_input", R2="weight_output", R3="q_attn", K="k_cache")
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    convert_checkpoint(folder(tmp_path / "in", fp8, quantization_config=config), tmp_path / "out", to="channel")


def test_two_scales_of_one_weight_are_refused(tmp_path, fp8core_):
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE, f"{DOWN}.weight_scale_inv": ONE}
    source = folder(tmp_path / "in", fp8)
    both = rf"{DOWN}.weight needs one scale of a kind, got {DOWN}.weight_scale_inv and {DOWN}.weight_scale"
    with pytest.raises(CheckpointError, match=both):
        convert_checkpoint(source, tmp_path / "out", to="channel")
    layer = open_checkpoint(source).layers[DOWN]
    with pytest.raises(CheckpointError, match=both):
        layer.scales()
    status, out, _ = fp8core_("verify", source)
    assert (status, out.count("scale left over")) == (1, 1)
    assert inspect_checkpoint(open_checkpoint(source)).layers[0].scales == "two of a kind"


@pytest.mark.parametrize("shape", [(64,), (0, 64)])
def test_a_scale_of_codes_that_are_no_matrix_is_left_over(tmp_path, shape):
    fp8 = {f"{UP}.weight": np.ones(shape, ml_dtypes.float8_e4m3fn), f"{UP}.weight_scale": ONE}
    found = verify_checkpoint(folder(tmp_path / "in", fp8)).faults
    assert [(one.tensor, one.kind) for one in found] == [(f"{UP}.weight_scale", "scale left over")]
    assert found[0].text == f"the weight of the scale {UP}.weight_scale is no matrix, but F8_E4M3 {list(shape)}"


NARROW = {
    "DeepSeek-V4's experts": {
        "layers.0.ffn.experts.0.w1.weight": INTEGERS,
        "layers.0.ffn.experts.0.w1.scale": np.ones((64, 2), ml_dtypes.float8_e8m0fnu),
    },
    "the same in transformers": {f"{UP}.weight": INTEGERS, f"{UP}.weight_scale_inv": np.ones((64, 2), np.float32)},
    "stacked": {
        "layers.0.mlp.experts.gate_up_proj": np.zeros((2, 64, 32), np.int8),
        "layers.0.mlp.experts.gate_up_proj_scale_inv": np.ones((2, 64, 2), np.float32),
    },
}


@pytest.mark.parametrize("layout", NARROW)
def test_integers_are_weights_whatever_the_name_of_their_scale(tmp_path, layout):
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    source = folder(tmp_path / "in", {**fp8, **NARROW[layout]})
    name = next(iter(NARROW[layout]))
    with pytest.raises(CheckpointError, match=f"got {name}, which is of scaled integers or packed FP4"):
        convert_checkpoint(source, tmp_path / "out", to="bf16")
    wide = folder(tmp_path / "wide", {**NARROW[layout], f"{OUT}.weight": normal(64, 64)})
    with pytest.raises(CheckpointError, match=f"is quantized already: {name} is of scaled integers or packed FP4"):
        quantize_checkpoint(wide, tmp_path / "out")


def test_integers_beside_which_no_weight_has_a_scale_are_any_tensor(tmp_path):
    tensors = {
        "layers.0.steps.weight": INTEGERS,
        "layers.0.steps.bias_scale": ONE,
        "layers.0.table": INTEGERS,
        "layers.0.table_scale": ONE,
        f"{DOWN}.weight": CODES,
        f"{DOWN}.weight_scale": ONE,
    }
    out = tmp_path / "out"
    convert_checkpoint(folder(tmp_path / "in", tensors), out, to="channel")
    assert {name for name, dtype in dtypes_in(out).items() if dtype == "I8"} == {
        "layers.0.steps.weight",
        "layers.0.table",
    }


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_dtypes_below_a_byte_are_named(tmp_path, dtype):
    """NumPy has no such dtypes, so this file is written by hand."""
    nbytes = 64 * 64 * (4 if dtype == "F4" else 6) // 8
    header = {
        f"{UP}.weight": {"dtype": dtype, "shape": [64, 64], "data_offsets": [0, nbytes]},
        f"{UP}.weight_scale": {"dtype": "F32", "shape": [1], "data_offsets": [nbytes, nbytes + 4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "in.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(nbytes + 4))
    assert open_checkpoint(tmp_path / "in.safetensors").other == (f"{UP}.weight", dtype[:1] + "P" + dtype[1:2])


@pytest.mark.parametrize("dtype", [np.int8, np.float32, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("to", ["bf16", "channel"])
def test_zero_points_of_zero_change_nothing_and_are_left_out(tmp_path, dtype, to):
    """compressed-tensors once stored them, and holds them in memory, also for symmetric schemes."""
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE}
    zeros = {
        f"{DOWN}.weight_zero_point": np.zeros((64, 1), dtype),
        f"{DOWN}.input_zero_point": np.zeros(1, dtype),
        f"{UP}.weight_zero_point": np.zeros(0, dtype),
    }
    source = folder(tmp_path / "in", {**zeros, **fp8})
    assert open_checkpoint(source).other is None
    done = convert_checkpoint(source, tmp_path / "out", to=to)
    assert done.left_out == dict.fromkeys(zeros, "a zero point of zero")
    assert not {*dtypes_in(tmp_path / "out")} & {*zeros}
    zeros[f"{DOWN}.weight_zero_point"][63] = 1
    source = folder(tmp_path / "one", {**zeros, **fp8})
    with pytest.raises(CheckpointError, match=rf"got {DOWN}\.weight_zero_point, which is of asymmetric quantization"):
        convert_checkpoint(source, tmp_path / "other", to=to)


@pytest.mark.parametrize("point", [np.float64(1e-60), np.float64(1e300), np.float32("nan")], ids=str)
def test_a_zero_point_that_is_no_zero_is_seen_in_every_dtype(tmp_path, point, recwarn):
    fp8 = {f"{DOWN}.weight": CODES, f"{DOWN}.weight_scale": ONE, f"{DOWN}.weight_zero_point": point.reshape(1)}
    assert open_checkpoint(folder(tmp_path / "in", fp8)).other[1] == "asymmetric quantization"
    assert not recwarn.list


@pytest.mark.parametrize("name", ["layers.0.attn_blocks", "layers.0.router.bitmask"])
def test_blocks_without_scales_and_masks_without_values_are_any_tensor(tmp_path, name):
    source = folder(tmp_path / "in", {name: np.ones((4, 4), np.float32), f"{OUT}.weight": normal(64, 64)})
    assert quantize_checkpoint(source, tmp_path / "out").quantized == (f"{OUT}.weight",)


@every
def test_transformers_models_need_fp8_alone(tmp_path, what):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import LlamaConfig

    from fp8core.transformers import from_pretrained

    fp8 = {f"model.{DOWN}.weight": CODES, f"model.{DOWN}.weight_scale": ONE}
    source = folder(tmp_path / "in", {f"model.{name}": x for name, x in OTHERS[what].items()} | fp8)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**sizes, vocab_size=64, quantization_config={"quant_method": "modelopt"}).save_pretrained(source)
    with pytest.raises(CheckpointError, match=f"needs only FP8 weights, got .*, which is of {what}"):
        from_pretrained(source)
