"""Frameworks that are too old for a package of their own: refused with the version that is needed."""

import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from fp8core.errors import LayoutError
from fp8core.interop import jax_arrays
from fp8core.interop.versions import OLDEST, OLDEST_JAX_ARRAYS, require_version

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


@pytest.mark.parametrize("version", ["0.4.35", "0.6.1", "0.7.2"])
def test_arrays_of_an_old_jax_are_refused(version, monkeypatch):
    """Some of these releases take transposed memory for row-major, and so give other numbers without an error."""
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version__=version))
    with pytest.raises(LayoutError, match=rf"^arrays of JAX need JAX 0\.8 or later, got {version}: older releases"):
        jax_arrays.framework.__wrapped__()


def test_a_call_with_an_array_of_an_old_jax_says_so():
    pytest.importorskip("jax")
    program = "import jax, fp8core; jax.__version__ = '0.7.1'; fp8core.quantize(jax.numpy.ones((2, 32)))"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    said = run.stderr.splitlines()[-1]
    assert said.startswith("fp8core.errors.LayoutError: arrays of JAX need JAX 0.8 or later, got 0.7.1: ")


def test_the_page_names_the_oldest_jax_whose_arrays_are_taken():
    page = DOCS.parent / "concepts" / "arrays-and-streams.md"
    assert f"JAX {OLDEST_JAX_ARRAYS} or later" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("package", "sentence"),
    [
        ("accelerate", "fp8-linear-in-pytorch.md: accelerate {} or later"),
        ("peft", "transformers.md: need PEFT {} or later"),
        ("compressed-tensors", "quantize-a-checkpoint.md: for weights in blocks {} or later"),
        *[(name, f"{page}: {NAMES.get(name, name)} {{}} or later") for name, page in PAGES.items()],
    ],
)
def test_the_extra_asks_for_the_release_that_a_page_names(package, sentence):
    extra = tomllib.loads((DOCS.parents[1] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (oldest,) = [line.partition(">=")[2] for line in extra["frameworks"] if line.startswith(f"{package}>=")]
    page, words = sentence.split(": ")
    assert words.format(oldest) in (DOCS / page).read_text(encoding="utf-8")
