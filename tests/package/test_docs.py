"""The pages: their code runs, their commands exist, their links lead somewhere, and the reference has every name."""

import ast
import doctest
import inspect
import itertools
import re
import shlex
import subprocess
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

import fp8core
from fp8core import checkpoint, errors, w8a8

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted(
    [
        README,
        *ROOT.glob("docs/*.md"),
        *(p for d in ("getting-started", "concepts", "how-to", "reference") for p in ROOT.glob(f"docs/{d}/*.md")),
    ]
)
"""The pages whose code runs."""
EVERYTHING = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
FRAMEWORKS = ("torch", "jax", "cupy", "transformers", "peft")


def name(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language):
    """Return the code of a page in a language, and whether it needs a GPU (```python gpu)."""
    fences = FENCE.finditer(page.read_text(encoding="utf-8"))
    marked = [(fence["info"].split(), fence["code"]) for fence in fences]
    return [(code, "gpu" in words) for words, code in marked if words[:1] == [language]]


def with_code(language):
    return pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, language)], ids=name)


class Part(NamedTuple):
    """Blocks of Python that continue one another: a page's, or one of the README, whose blocks stand alone."""

    page: str
    first: int
    blocks: list[tuple[str, bool]]

    def run(self, *, gpu):
        names = {}
        for number, (code, needs_gpu) in enumerate(self.blocks, self.first):
            if needs_gpu and not gpu:
                continue
            try:
                exec(compile(code, f"{self.page}, block {number} of Python", "exec"), names)
            except ModuleNotFoundError as error:
                if error.name not in FRAMEWORKS:
                    raise
                pytest.skip(f"{error.name} is not installed")


def parts():
    for page in PAGES:
        found = blocks(page, "python")
        if page == README:
            yield from (Part(name(page), number, [block]) for number, block in enumerate(found))
        elif found:
            yield Part(name(page), 0, found)


PARTS = list(parts())
with_parts = partial(pytest.mark.parametrize, "part", ids=lambda part: f"{part.page}-{part.first}")
on_cpu = with_parts([part for part in PARTS if not all(needs_gpu for _, needs_gpu in part.blocks)])
on_gpu = with_parts([part for part in PARTS if any(needs_gpu for _, needs_gpu in part.blocks)])


@on_cpu
def test_the_code_of_a_page_runs_and_prints_what_it_says(part, tmp_path, monkeypatch, capsys):
    """What a line with ``print`` says behind ``#``, up to a semicolon, is printed."""
    monkeypatch.chdir(tmp_path)
    part.run(gpu=False)
    printed = capsys.readouterr().out.splitlines()
    code = "".join(text for text, needs_gpu in part.blocks if not needs_gpu)
    for said in re.findall(r"^ *print\(.*\)  # ([^;\n]*)", code, re.MULTILINE):
        assert said in printed


@pytest.mark.gpu
@on_gpu
def test_the_code_of_a_page_runs_on_a_gpu(part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    part.run(gpu=True)


@with_parts(PARTS)
def test_the_code_of_a_page_has_all_its_names_and_uses_its_imports(part):
    pytest.importorskip("ruff", reason="ruff is not installed (extra test)")
    text = "\n".join(code for code, _ in part.blocks)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--quiet", "--select", "E9,F821,F401", "-"]
    checked = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@on_gpu
def test_code_for_a_gpu_compiles_and_imports_what_is_there(part):
    for code, _ in part.blocks:
        for statement in ast.walk(ast.parse(code)):
            if isinstance(statement, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in statement.names]
                modules = names if isinstance(statement, ast.Import) else [statement.module]
                absent = {part for module in modules for part in module.split(".")} - {*filter(find_spec, FRAMEWORKS)}
                if not absent & {*FRAMEWORKS}:
                    exec(compile(ast.Module([statement], []), part.page, "exec"), {})


@with_code("pycon")
def test_the_sessions_of_a_page_are_as_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "\n".join(code for code, _ in blocks(page, "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, name(page), name(page), 0)
    found = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=found.append)
    assert results.attempted
    assert not results.failed, "".join(found)


def commands(page):
    """Return the arguments of every call of fp8core in a page's console blocks."""
    found = []
    for code, _ in blocks(page, "console"):
        for line in re.findall(r"^[$>] (.*)$", code, re.MULTILINE):
            lexer = shlex.shlex(re.sub(r"\$\w+", "1", line), posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            for separates, part in itertools.groupby(lexer, lambda word: set(word) <= set(";&|")):
                words = [] if separates else list(part)
                while words and (words[0] == "do" or "=" in words[0]):
                    words = words[1:]
                if words and Path(words[0]).name == "fp8core":
                    found.append(words[1:])
    return found


@pytest.mark.parametrize("page", [page for page in EVERYTHING if commands(page)], ids=name)
def test_the_commands_of_a_page_are_taken(page):
    import typer

    from fp8core import cli

    app = typer.main.get_command(cli.app)
    for command, *arguments in commands(page):
        if command != "--version":
            app.commands[command].make_context(command, arguments)


def headings(text):
    """Return the anchors of a page, as repositories and the site make them."""
    plain = FENCE.sub("", text)
    found = []
    for title in re.findall(r"^#+ (.*)$", plain, re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", shown.strip().lower()).replace(" ", "-")
        found.append(slug if slug not in found else f"{slug}-{found.count(slug)}")
    return {*found, *re.findall(r"^::: (\S+)$", plain, re.MULTILINE), *re.findall(r'<a (?:id|name)="([^"]+)"', plain)}


@pytest.mark.parametrize("page", EVERYTHING, ids=name)
def test_links_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not re.match(r"[a-z]+:", link) and not leads_somewhere(target, anchor):
            broken.append(link)
    assert broken == []


def leads_somewhere(target, anchor):
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or (target.suffix == ".md" and anchor in headings(target.read_text(encoding="utf-8")))


FROZEN = ("docs/dev/experiments/", "CHANGELOG.md", "docs/results/")
"""Pages that tell of files as they were."""
FOLDERS = sorted({path.name for at in ("", "fp8core") for path in (ROOT / at).iterdir() if path.is_dir()} - {".venv"})
IN_WHEELS = ("fp8core/_examples/minilm.py", "fp8core/_sources")


@pytest.mark.parametrize("page", [page for page in EVERYTHING if not name(page).startswith(FROZEN)], ids=name)
def test_files_that_a_page_names_are_there(page):
    named = re.findall(rf"`((?:{'|'.join(map(re.escape, FOLDERS))})/[\w/.-]+)`", page.read_text(encoding="utf-8"))
    absent = [path for path in named if not any((ROOT / at / path).exists() for at in ("", "fp8core", "docs"))]
    assert [path for path in absent if path not in IN_WHEELS and "DATE" not in path] == []


MODULES = {"fp8core": fp8core, "fp8core.checkpoint": checkpoint, "fp8core.w8a8": w8a8}
OPTIONAL = ("torch", "transformers", "jax")
"""Parts of the package that import a framework of this name."""


def directives(*pages):
    """Return the names that pages describe."""
    pattern = re.compile(r"^::: (\S+)$", re.MULTILINE)
    return [name for page in pages for name in pattern.findall((ROOT / page).read_text("utf-8"))]


def test_the_reference_has_every_public_name_once():
    described = directives("docs/reference/api.md", "docs/reference/errors.md")
    optional = set()
    for part in OPTIONAL:
        own = [name for name in described if name.startswith(f"fp8core.{part}.")]
        optional |= set(own)
        if find_spec(part):
            assert sorted(own) == sorted(f"fp8core.{part}.{name}" for name in import_module(f"fp8core.{part}").__all__)
    public = [
        f"{module}.{name}"
        for module, value in MODULES.items()
        for name in value.__all__
        if value is fp8core or getattr(value, name) is not getattr(fp8core, name, value)
    ]
    assert sorted({*described} - optional) == sorted(public)
    assert len({*described}) == len(described)


def described_in(source):
    """Return the functions and classes with a docstring, and the variables with one behind them, of a module."""
    body = ast.parse(source.read_text("utf-8")).body
    named = ast.FunctionDef | ast.ClassDef
    found = {node.name for node in body if isinstance(node, named) and ast.get_docstring(node)}
    for node, behind in itertools.pairwise(body):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(behind, ast.Expr):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {ast.unparse(target) for target in targets if isinstance(behind.value, ast.Constant)}
    return found


def test_the_reference_describes_every_name():
    described = set().union(*map(described_in, ROOT.glob("fp8core/**/*.py")))
    named = {name.rpartition(".")[2] for name in directives("docs/reference/api.md", "docs/reference/errors.md")}
    assert named - described == set()


ERRORS = {name: value for name, value in vars(errors).items() if inspect.isclass(value)}
UNSHOWN = {"Fp8Error", "BackendError"}
"""The root, and what only a failing driver raises."""


def test_the_page_of_errors_shows_each_of_them():
    text = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    assert directives("docs/reference/errors.md") == [f"fp8core.{name}" for name in ERRORS]
    raised = re.findall(r"^fp8core\.errors\.(\w+): ", text, re.MULTILINE)
    assert set(raised) == set(ERRORS) - UNSHOWN
    bases = {name: error.__bases__[1].__name__ for name, error in ERRORS.items() if error is not errors.Fp8Error}
    assert dict(re.findall(r"^\| \[`(\w+)`\]\(\S+\) \| `(\w+)` \|", text, re.MULTILINE)) == bases
