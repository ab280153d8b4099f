"""Files about the project that repeat something of pyproject.toml: the conda recipe, the citation, the pre-commit hooks."""

import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

import fp8core

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with compressed-tensors)")

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def read(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def spaced(requirement):
    """Return a requirement of pyproject.toml as conda writes it: rich>=13 is rich >=13."""
    return re.sub(r"(?<=[\w\]])(?=[<>=])", " ", requirement, count=1)


def test_the_conda_recipe_needs_what_the_wheel_needs():
    recipe = read("conda/recipe.yaml")
    python = f"python {PROJECT['project']['requires-python']}"
    needs = recipe["requirements"]
    assert needs["run"] == [python, *map(spaced, PROJECT["project"]["dependencies"])]
    assert needs["host"] == [python, "pip", *map(spaced, PROJECT["build-system"]["requires"])]
    cupys = {
        need.partition(">=")[2]
        for extra in ("cuda12", "cuda13", "rocm7")
        for need in PROJECT["project"]["optional-dependencies"][extra]
        if need.startswith("cupy")
    }
    assert needs["run_constraints"] == [f"cupy >={version}" for version in cupys]


def test_the_conda_recipe_is_of_this_version_and_has_its_command():
    recipe = read("conda/recipe.yaml")
    assert recipe["context"]["version"] == fp8core.__version__
    assert recipe["package"]["name"] == PROJECT["project"]["name"]
    scripts = [f"{name} = {target}" for name, target in PROJECT["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    assert recipe["about"]["license"] == PROJECT["project"]["license"]


def test_the_citation_names_this_project():
    citation = read("CITATION.cff")
    assert citation["title"] == PROJECT["project"]["name"]
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["authors"]


def test_the_source_distribution_has_every_file_of_the_checkout():
    """But for .gitignore and pyproject.toml, which hatchling adds itself: the hooks and .ci/run read the others."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    if not tracked:
        pytest.skip("no checkout of git")
    patterns = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    names = {f"/{path.partition('/')[0]}" for path in tracked.splitlines()} - {"/.gitignore", "/pyproject.toml"}
    assert [name for name in sorted(names) if not any(fnmatch(name, pattern) for pattern in patterns)] == []


def test_the_hooks_cover_the_sources_with_one_version_of_each_tool():
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    assert [hook["id"] for hook in hooks] == ["ruff-check", "ruff-format", "clang-format", "links"]
    pinned = {need for hook in hooks for need in hook.get("additional_dependencies", ())}
    assert all("==" in need for need in pinned)
    assert len({need.partition("==")[0] for need in pinned}) == len(pinned)
    sources = {
        path.relative_to(ROOT).as_posix() for folder in ("cuda_src", "hip_src") for path in (ROOT / folder).rglob("*")
    }
    formatted = next(hook["files"] for hook in hooks if hook["id"] == "clang-format")
    assert {name for name in sources if (ROOT / name).is_file() and not re.search(formatted, name)} == {
        "cuda_src/entries.def"
    }
