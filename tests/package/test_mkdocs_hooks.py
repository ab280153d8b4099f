"""How the site is built from the docs: folders in the nav, links out of docs/, pages that load things, public names."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import fp8core

pytest.importorskip("mkdocs", reason="MkDocs is not installed (extra docs)")

ROOT = Path(__file__).resolve().parents[2]
HOOKS = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "mkdocs_hooks.py")))


def page(uri):
    return SimpleNamespace(file=SimpleNamespace(src_uri=uri))


MOVED = {
    "[a](../dev/design.md#layers)": "[a](../dev/design.md#layers)",
    "[a](../../pyproject.toml)": "[a](../source/pyproject.toml.md)",
    "[a](../../CONTRIBUTING.md)": "[a](../source/CONTRIBUTING.md.md)",
    "[a](../make_performance.py)": "[a](../source/docs/make_performance.py.md)",
    "[a](../../cuda_src)": "[a](../source/cuda_src.md)",
    "![a](../images/quantize.png)": "![a](../images/quantize.png)",
    "[a](absent.md)": "[a](absent.md)",
    "[a](#here)": "[a](#here)",
    "[a](https://host/../../pyproject.toml)": "[a](https://host/../../pyproject.toml)",
    "```text\n[a](../../pyproject.toml)\n```": "```text\n[a](../../pyproject.toml)\n```",
    "```python gpu\nx = 1\n```": '```python title="Needs a GPU"\nx = 1\n```',
}


@pytest.mark.parametrize("text", MOVED)
def test_links_lead_to_where_the_site_has_the_target(text):
    assert HOOKS.on_page_markdown(text, page("concepts/safety.md")) == MOVED[text]


LISTS = {
    "text\n- one\n- two": "text\n\n- one\n- two",
    "- one\n\n  text\n  more\n- two": "- one\n\n  text\n  more\n\n- two",
    "text\n\n- one\n  more\n- two": "text\n\n- one\n  more\n- two",
    "    - one\n- two": "    - one\n- two",
    "text\n- 1\n\ntext\n- 2\n": "text\n\n- 1\n\ntext\n\n- 2\n",
    "```text\nx\n- 1\n```": "```text\nx\n- 1\n```",
    "1 -\n2 - 1": "1 -\n2 - 1",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_list_may_follow_a_paragraph_directly_as_in_the_repository(text):
    assert HOOKS.on_page_markdown(text, page("concepts/safety.md")) == LISTS[text]


def test_links_of_a_shown_page_are_those_of_its_place_in_the_repository():
    text = HOOKS.on_page_markdown("[a](docs/dev/design.md) [b](LICENSE)", page("source/CONTRIBUTING.md.md"))
    assert text == "[a](../dev/design.md) [b](LICENSE.md)"


def test_a_folder_in_the_nav_is_its_pages_with_the_index_first():
    found = HOOKS._expanded([{"P": "performance/"}, "index.md"])
    assert found[0]["P"][0] == "performance/index.md"
    assert found[1] == "index.md"
    assert len(HOOKS._expanded("decisions/")) == len(list((ROOT / "docs" / "decisions").glob("*.md")))


@pytest.mark.parametrize(
    "output",
    ['<script src="https://host/x.js">', "<script defer src=//host/x.js>", '<link rel=x href="https://host/x.css">'],
)
def test_a_page_that_loads_something_from_another_host_is_refused(output):
    with pytest.raises(HOOKS.PluginError, match="loads something from another host"):
        HOOKS.on_post_page(f"<head>{output}", page("index.md"))
    HOOKS.on_post_page('<script src="assets/x.js"><a href="https://host/">', page("index.md"))


def test_a_page_may_name_its_own_address_as_under_mkdocs_serve():
    HOOKS.on_post_page(
        '<head><link rel="canonical" href="http://127.0.0.1:8000/"><link href="x.css">', page("index.md")
    )


def test_the_reference_finds_what_python_finds():
    griffe = pytest.importorskip("griffe", reason="mkdocstrings is not installed (extra docs)")
    extensions = griffe.load_extensions(ROOT / "docs" / "griffe_extension.py")
    package = griffe.load("fp8core", search_paths=[ROOT], extensions=extensions)
    assert [name for name in fp8core.__all__ if package[name].is_module] == []
