"""A folder with a small checkpoint, and the scheme that a written checkpoint records."""

import json

import pytest

from support.checkpoints import model, write


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "model.safetensors", model())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def scheme_in(folder):
    return json.loads((folder / "fp8core.json").read_text())["scheme"]
