"""Frameworks that are too old for a package of their own: refused with the version that is needed."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core.interop.versions import OLDEST, require_version

DOCS = Path(__file__).resolve().parents[2] / "docs" / "how-to"
PAGES = {"torch": "fp8-linear-in-pytorch.md", "jax": "jax.md", "transformers": "transformers.md"}
NAMES = {"jax": "JAX"}


@pytest.mark.parametrize(
    ("framework", "version", "able"),
    [
        ("torch", "2.11.0", True),
        ("torch", "2.11.0a0+gitabc", True),
        ("torch", "3.0", True),
        ("torch", "2.10.1+cpu", False),
        ("torch", "2.9.0", False),
        ("jax", "0.10.2", True),
        ("jax", "0.10.2.dev20261101", True),
        ("jax", "0.10.1", False),
        ("transformers", "5.17.0", True),
        ("transformers", "5.3.1", False),
        ("transformers", "4.57.0", False),
        ("transformers", "unknown", False),
    ],
)
def test_versions_are_compared_by_their_numbers(monkeypatch, framework, version, able):
    monkeypatch.setitem(sys.modules, framework, SimpleNamespace(__version__=version))
    if able:
        require_version(framework)
        return
    with pytest.raises(ImportError) as caught:
        require_version(framework)
    assert str(caught.value) == f"fp8core.{framework} needs {framework} {OLDEST[framework]} or later, got {version}"


@pytest.mark.parametrize("framework", OLDEST)
def test_it_is_the_first_that_an_import_says(framework, tmp_path):
    """Whatever else an old release does not have."""
    (tmp_path / f"{framework}.py").write_text("__version__ = '0.1'")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import fp8core.{framework}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1] == (
        f"ImportError: fp8core.{framework} needs {framework} {OLDEST[framework]} or later, got 0.1"
    )


@pytest.mark.parametrize("framework", OLDEST)
def test_the_page_names_the_oldest_release(framework):
    head = (DOCS / PAGES[framework]).read_text(encoding="utf-8").partition("\n## ")[0]
    assert f"{NAMES.get(framework, framework)} {OLDEST[framework]} or later" in head
