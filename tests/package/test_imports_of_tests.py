"""What test modules import exists, also where a module is skipped before it imports it, or where it has to be skipped."""

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]


def bound(tree):
    """Return the names that a module binds."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return names


def missing(text):
    """Yield what a module of the tests imports from others of them that do not bind it."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        place = TESTS.joinpath(*node.module.split("."))
        for source in (place.with_suffix(".py"), place / "__init__.py"):
            if source.is_file():
                found = bound(ast.parse(source.read_text(encoding="utf-8")))
                found |= {other.stem for other in place.glob("*")}  # submodules
                yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in found)


@pytest.mark.parametrize("module", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_names_that_tests_import_exist(module):
    assert not list(missing(module.read_text(encoding="utf-8")))


def test_a_name_that_does_not_exist_is_seen():
    assert list(missing("from support.targets import H200, no_target")) == ["support.targets.no_target"]


PRESENT = sys.stdlib_module_names | {
    *("fp8core", "ml_dtypes", "numpy", "platformdirs", "rich", "safetensors", "typer"),
    *("_pytest", "hypothesis", "pytest"),
}
"""What every environment has in which the tests run: the package's own dependencies, and those of the page about AMD."""
FRAMEWORKS = "torch", "jax", "transformers"


def imported(node):
    """Return the modules that a statement imports, or whose names it imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
    return []


def skipped(node):
    """Return the package without which a statement skips its module."""
    call = getattr(node, "value", None)
    if isinstance(call, ast.Call) and ast.unparse(call.func) == "pytest.importorskip":
        return [ast.literal_eval(call.args[0]).partition(".")[0]]
    return []


@cache
def needed(source):
    """Return the packages without which a module fails as it is imported, and is not skipped."""
    packages, skips = set(), set()
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        skips.update(skipped(node))
        for name in imported(node):
            top, _, rest = name.partition(".")
            places = [root.joinpath(*name.split(".")) for root in (TESTS, TESTS.parent)]
            files = [file for place in places for file in (place.with_suffix(".py"), place / "__init__.py")]
            own = next((file for file in files if file.is_file() and top != "fp8core"), source)
            if own != source:
                packages |= needed(own)
            elif top == "fp8core":
                packages |= {rest.partition(".")[0]} & {*FRAMEWORKS}
            elif top not in PRESENT and not any((root / top).is_dir() for root in (TESTS, TESTS.parent)):
                packages.add("torch" if top == "functorch" else top)
    return frozenset(packages - skips)


@pytest.mark.parametrize("module", sorted(TESTS.rglob("test_*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_a_module_is_skipped_where_a_package_that_it_imports_is_absent(module):
    """One that is not ends the run of a whole suite, before its first test."""
    assert not needed(module)
