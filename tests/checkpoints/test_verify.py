"""`verify_checkpoint` names the tensor of every fault, and finds none where there is none."""

import json

import ml_dtypes
import numpy as np
import pytest

from fp8core.checkpoint import inspect_checkpoint, open_checkpoint, plan_conversion, verify_checkpoint
from fp8core.errors import CheckpointError

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from checkpoints.faulty import DOWN, SCALE, Q, changed, drop, found, raised, replace, set_code, set_scale  # noqa: E402
from support import checkpoint_formats as written  # noqa: E402
from support.checkpoint_formats import FORMATS, small_state, write_format  # noqa: E402
from support.checkpoints import write  # noqa: E402


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


def test_scales_are_named_in_the_order_of_the_file(tmp_path):
    tensors = {}
    for number in range(12):
        tensors[f"layers.{number:02}.up.weight"] = np.ones((2, 64), ml_dtypes.float8_e4m3fn)
        tensors[f"layers.{number:02}.up.weight_scale"] = np.zeros((2, 1), np.float32)
    write(tmp_path / "model.safetensors", tensors)
    in_order = [("scale value", f"layers.{number:02}.up.weight_scale") for number in range(12)]
    assert found(tmp_path / "model.safetensors") == in_order


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
    assert calls[-1][1] == calls[-1][2]


def test_scales_of_zero_weights_and_fnuz_nan(tmp_path):
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
