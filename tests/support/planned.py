"""Plans of checkpoints that are given by names and shapes."""

import json

from fp8core.checkpoint import plan_checkpoint
from support.checkpoints import normal, write

L = "model.layers.0."


def folder(path, tensors, **config):
    """Write a checkpoint folder with matrices of these names and shapes."""
    path.mkdir()
    arrays = {name: normal(*shape) for name, shape in tensors.items()}
    write(path / "model.safetensors", arrays)
    if config:
        (path / "config.json").write_text(json.dumps(config))
    return path


def statuses(source, **arguments):
    return {verdict.module: verdict.status for verdict in plan_checkpoint(source, **arguments).verdicts}


def reasons(source, **arguments):
    return {verdict.module: verdict.reason for verdict in plan_checkpoint(source, **arguments).verdicts}


QKV = tuple(f"{L}self_attn.{part}_proj" for part in "qkv")
MLP = tuple(f"{L}mlp.{part}_proj" for part in ("gate", "up", "down"))
EXPERTS = tuple(f"{L}mlp.experts.{number}.{part}_proj" for number in (0, 1) for part in ("gate", "up", "down"))
