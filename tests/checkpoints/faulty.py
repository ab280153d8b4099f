"""A checkpoint with one fault, and what `verify_checkpoint` finds in it."""

import torch
from safetensors.torch import load_file, save_file

from fp8core.checkpoint import verify_checkpoint
from support import checkpoint_formats as written
from support.checkpoint_formats import write_format

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
DOWN = "model.layers.0.mlp.down_proj"
SCALE = f"{Q}.weight_scale_inv"


def found(path, **keywords):
    return [(fault.kind, fault.tensor) for fault in verify_checkpoint(path, **keywords).faults]


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
