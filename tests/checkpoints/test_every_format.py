"""`fp8core verify` on the command line, for every format of the table: status 1, and the tensor of each fault."""

import json

import pytest

from fp8core.checkpoint import open_checkpoint
from support.command_line import (
    fp8core_,  # noqa: F401
)

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from support.checkpoint_formats import FORMATS, small_state, write_format  # noqa: E402

Q = "model.layers.0.self_attn.q_proj"
ALL = pytest.mark.parametrize("writer", FORMATS, ids=lambda writer: writer.__name__)


def bytes_of(scale):
    return scale.view(torch.uint8)


def inverted(scale):
    return (
        (254 - bytes_of(scale)).view(scale.dtype) if scale.element_size() == 1 else (1 / scale.float()).to(scale.dtype)
    )


def not_a_number(scale):
    made = scale.clone()
    if scale.element_size() == 1:
        bytes_of(made).view(-1)[-1] = 255
    else:
        made.view(-1)[-1] = float("nan")
    return made


def code(scale, codes):
    bytes_of(codes)[7, 9] = 0x7F
    return scale


FAULTS = {
    "scale missing": ("weight", lambda scale, codes: None),
    "scale value": ("scale", lambda scale, codes: not_a_number(scale)),
    "scale inverted": ("weight", lambda scale, codes: inverted(scale)),
    "NaN code": ("weight", code),
    "scale shape": ("weight", lambda scale, codes: torch.ones(7, 5)),
}


@ALL
def test_verify_finds_no_fault_in_a_sound_checkpoint(tmp_path, fp8core_, writer):
    write_format(writer, tmp_path / "model")
    status, text, _ = fp8core_("verify", tmp_path / "model")
    assert (status, "no fault in 3 FP8 layers" in text) == (0, True)


@ALL
@pytest.mark.parametrize("kind", FAULTS)
def test_verify_finds_each_kind_of_fault(tmp_path, fp8core_, writer, kind):
    folder = tmp_path / "model"
    state = {name: one / 16 if "proj.weight" in name else one for name, one in small_state(600, 512).items()}
    write_format(writer, folder, state)
    layer = open_checkpoint(folder).layers[Q]
    tensors = load_file(folder / "model.safetensors")
    whose, change = FAULTS[kind]
    codes = tensors[layer.weight.name]
    made = change(tensors.pop(layer.scale.name), codes)
    if made is not None:
        tensors[layer.scale.name] = made
    with (folder / "model.safetensors").open("rb") as file:
        metadata = json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"]
    save_file(tensors, folder / "model.safetensors", metadata)
    status, text, _ = fp8core_("verify", folder)
    named = layer.weight.name if whose == "weight" else layer.scale.name
    found = [line.split("\t")[:2] for line in text.splitlines()]
    assert status == 1
    assert [kind, named] in found, text
