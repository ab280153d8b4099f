"""What test modules import from one another exists, also where a module is skipped before it imports it."""

import ast
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
