"""Functions that compare converted checkpoints."""

import numpy as np
import pytest

from fp8core.checkpoint import open_checkpoint

torch = pytest.importorskip("torch")

from support import checkpoint_formats as written  # noqa: E402

Q = "model.layers.0.self_attn.q_proj"


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def numbers_of(path):
    """Return the values of every FP8 weight of a checkpoint, computed by torch from the codes and scales read."""
    found = {}
    for layer in open_checkpoint(path).layers.values():
        codes = torch.from_numpy(layer.weight.read().view(np.uint8).copy()).view(getattr(torch, layer.dtype))
        scale = torch.from_numpy(layer.scales())
        rows, cols = layer.group_shape
        n, k = layer.matrix_shape
        found[layer.weight.name] = written.values(codes, scale, n if rows < 0 else rows, k if cols < 0 else cols)
    return found
