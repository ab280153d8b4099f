"""The examples run, and do what they say."""

import runpy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support.demo_model import folder  # noqa: E402, F401 - after the skips

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def run(name, monkeypatch, capsys):
    path = str(EXAMPLES / name)
    monkeypatch.setattr("sys.argv", [path])
    runpy.run_path(path, run_name="__main__")
    return capsys.readouterr().out


def test_the_example_of_a_language_model_runs_and_prints_its_error(monkeypatch, capsys):
    said = run("torch_llm.py", monkeypatch, capsys)
    assert "parameters: 2,886,144 bytes in bfloat16, 1,722,880 with FP8 layers" in said
    assert "saved as compressed-tensors and loaded again: the same logits" in said
    (error,) = (line for line in said.splitlines() if line.startswith("logits:"))
    assert 0.001 < float(error.split()[-1]) < 0.15


@pytest.mark.usefixtures("folder")
def test_the_example_of_embeddings_runs_and_prints_its_least_cosine(monkeypatch, capsys):
    said = run("torch_embeddings.py", monkeypatch, capsys).splitlines()
    assert [line.strip().split()[0] for line in said[1:10:2]] == ["The", "Kittens", "Fold", "Each", "The"]
    cosine = float(said[-1].partition("at least ")[2].split()[0])
    assert cosine > 0.99
