"""Scheme "static": the scales of activations are in the file, given or from `fp8core.torch.calibrate`."""

import json

import numpy as np
import pytest

from fp8core.checkpoint import plan_checkpoint, quantize_checkpoint, verify_checkpoint
from fp8core.errors import CheckpointError
from support.checkpoints import left_in, normal, read, write
from support.command_line import runner

MODULES = [f"model.layers.{layer}.{part}" for layer in range(2) for part in ("self_attn.o_proj", "mlp.down_proj")]
SCALES = {module: 0.01 * (1 + number) for number, module in enumerate(MODULES)}


@pytest.fixture
def source(tmp_path):
    tensors = {f"{module}.weight": normal(96, 160, seed=number) for number, module in enumerate(MODULES)}
    return write(tmp_path / "in.safetensors", {**tensors, "model.embed_tokens.weight": normal(50, 160)})


def test_weights_are_those_of_scheme_tensor_and_scales_are_as_given(tmp_path, source):
    quantize_checkpoint(source, tmp_path / "tensor.safetensors", scheme="tensor")
    summary = quantize_checkpoint(source, tmp_path / "out.safetensors", scheme="static", input_scales=SCALES)
    found, tensor = read(tmp_path / "out.safetensors"), read(tmp_path / "tensor.safetensors")
    assert {name: one for name, one in found.items() if name in tensor}.keys() == tensor.keys()
    for name, one in tensor.items():
        np.testing.assert_array_equal(found[name].view(np.uint8), one.view(np.uint8))
    assert {name: one.tolist() for name, one in found.items() if name not in tensor} == {
        f"{module}.input_scale": [np.float32(scale)] for module, scale in SCALES.items()
    }
    group = summary.quantization_config["config_groups"]["group_0"]
    assert (group["input_activations"]["strategy"], group["input_activations"]["dynamic"]) == ("tensor", False)
    assert summary.bytes_after == (tmp_path / "out.safetensors").stat().st_size
    assert not verify_checkpoint(tmp_path / "out.safetensors", against=source).faults


def test_an_index_names_the_scales(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    weight_map = {}
    for number, module in enumerate(MODULES):
        file = f"model-{number % 2}.safetensors"
        weight_map[f"{module}.weight"] = file
    for file in set(weight_map.values()):
        write(folder / file, {name: normal(96, 160) for name, where in weight_map.items() if where == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    quantize_checkpoint(folder, tmp_path / "out", scheme="static", input_scales=SCALES)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(index[f"{module}.input_scale"] == weight_map[f"{module}.weight"] for module in MODULES)
    assert not verify_checkpoint(tmp_path / "out").faults


WRONG = [
    (None, r"scheme static needs input_scales \(--input-scales\) with a number per layer, got none"),
    ({**SCALES, "absent": 1.0}, "got 'absent': there is no such module"),
    ({**SCALES, "model.embed_tokens": 1.0}, "got 'model.embed_tokens': it stays as it is: embedding"),
    ({**SCALES, MODULES[0]: 0.0}, "needs numbers above 0 that float32 holds, got 0.0"),
    ({**SCALES, MODULES[0]: -1}, "needs numbers above 0 that float32 holds, got -1"),
    ({**SCALES, MODULES[0]: float("nan")}, "needs numbers above 0 that float32 holds, got nan"),
    ({**SCALES, MODULES[0]: 1e39}, "needs numbers above 0 that float32 holds, got 1e"),
    ({**SCALES, MODULES[0]: "0.5"}, "needs numbers above 0 that float32 holds, got '0.5'"),
    ({**SCALES, MODULES[0]: True}, "needs numbers above 0 that float32 holds, got True"),
    ({name: SCALES[name] for name in MODULES[1:]}, "scheme static needs an input scale for model.layers.0.self_attn"),
]


@pytest.mark.parametrize(("scales", "message"), WRONG)
def test_scales_that_cannot_be_meant_are_refused(tmp_path, source, scales, message):
    with pytest.raises(CheckpointError, match=message):
        quantize_checkpoint(source, tmp_path / "out.safetensors", scheme="static", input_scales=scales)
    assert left_in(tmp_path) == ["in.safetensors"]


def test_scales_belong_to_scheme_static_alone(tmp_path, source):
    with pytest.raises(CheckpointError, match=r"\(--input-scales\) needs scheme static, got 4 scales for"):
        plan_checkpoint(source, input_scales=SCALES)


def test_a_layer_without_a_scale_may_be_left_out(tmp_path, source):
    scales = {module: SCALES[module] for module in MODULES[1:]}
    plan = plan_checkpoint(source, scheme="static", input_scales=scales)
    assert [verdict.module for verdict in plan.refused] == MODULES[:1]
    done = quantize_checkpoint(
        source, tmp_path / "out.safetensors", scheme="static", input_scales=scales, exclude=[MODULES[0]]
    )
    assert len(done.quantized) == 3


def test_the_command_reads_the_scales_from_a_file(tmp_path, source, capsys, monkeypatch):
    fp8core = runner(capsys, monkeypatch)
    (tmp_path / "scales.json").write_text(json.dumps(SCALES))
    arguments = ["quantize", str(source), str(tmp_path / "out.safetensors"), "--scheme", "static"]
    code, _, err = fp8core(*arguments)
    assert code == 1
    assert "scheme static needs input_scales (--input-scales)" in err
    code, _, err = fp8core(*arguments, "--input-scales", str(tmp_path / "absent.json"))
    assert (code, "absent.json: No such file" in err) == (1, True)
    (tmp_path / "wrong.json").write_text("[1]")
    code, _, err = fp8core(*arguments, "--input-scales", str(tmp_path / "wrong.json"))
    assert (code, "needs a JSON object" in err) == (1, True)
    code, out, err = fp8core(*arguments, "--input-scales", str(tmp_path / "scales.json"))
    assert (code, err) == (0, "")
    assert "4 weights are FP8 (scheme static)" in out


def test_calibrated_scales_give_the_file_of_the_model_that_torch_quantized_and_it_loads(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    import fp8core.torch
    from support import models

    model = models.llama()
    model.save_pretrained(tmp_path / "in")
    tokens = torch.arange(48).reshape(2, 24)
    with torch.no_grad():
        want = model(tokens).logits
    scales = fp8core.torch.calibrate(model, [tokens])
    quantize_checkpoint(tmp_path / "in", tmp_path / "out", scheme="static", input_scales=scales)
    found = read(tmp_path / "out" / "model.safetensors")
    fp8core.torch.quantize_model_(model, scheme="tensor", input_scales=scales)
    state = {name: one for name, one in model.state_dict().items() if "_scale" in name or "float8" in str(one.dtype)}
    assert len(state) == 3 * 14
    for name, tensor in state.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].tobytes() == bytes(tensor.contiguous().view(torch.uint8).numpy().data), name
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        got = loaded(tokens).logits
    assert (got - want).norm() < 0.12 * want.norm()
