"""Benchmarks on machines that lack what they need: one line, and status 2."""

import sys
from importlib import import_module
from types import SimpleNamespace

import pytest

from bench import needs
from bench.subjects import SUBJECTS

pytest.importorskip("torch")
MODULES = {subject.module: subject.framework for subject in SUBJECTS.values() if subject.gpu}
MODULES |= {"bench.torch_chain": "torch", "bench.repeats": "cupy"}


@pytest.mark.parametrize("name", MODULES)
def test_without_a_gpu_a_benchmark_says_so_in_one_line(name, monkeypatch, capsys):
    pytest.importorskip(MODULES[name] if MODULES[name] != "cupy" else "numpy")
    module = import_module(name)
    monkeypatch.setattr(needs.device, "count", lambda: 0)
    monkeypatch.setattr(needs.device, "why_none", lambda: "there is none")
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 2
    assert capsys.readouterr() == ("", f"{name}.py: error: needs a GPU: there is none\n")


@pytest.mark.parametrize(
    ("framework", "without"),
    [
        ("torch", {"cuda": SimpleNamespace(is_available=lambda: False)}),
        ("jax", {"default_backend": lambda: "cpu"}),
    ],
)
def test_a_framework_that_finds_no_gpu_is_named(framework, without, monkeypatch, capsys):
    monkeypatch.setattr(needs, "missing", lambda _: None)
    monkeypatch.setattr(needs, "import_module", lambda _: SimpleNamespace(__version__="9.9+cpu", **without))
    parser = needs.argparse.ArgumentParser("a")
    with pytest.raises(SystemExit) as left:
        needs.require_gpu(parser, framework)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"a: error: needs a {framework} that finds the GPU, got 9.9+cpu\n"


def test_what_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr(needs.device, "count", lambda: 1)
    assert needs.missing("numpy") is None
    assert needs.missing("no_such_framework") == "needs no_such_framework, which is not installed"
