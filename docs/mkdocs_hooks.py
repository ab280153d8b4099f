"""MkDocs hooks for folders in the nav, lists without an empty line above, and links to files that are not pages.

Links in pages are valid in the repository. For a link to a file outside of docs/, to a program or to a folder, the site
gets a page that shows the file or lists the folder, and the link leads to that page.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = PurePosixPath("docs")
SHOWN = "source/"
"""The folder of the site with the pages that show files of the repository."""
FENCED = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
LIST_IN_PARAGRAPH = re.compile(r"((?:\A|\n\n) *(?!- )[^\s][^\n]*(?:\n(?!- )[^\n]+)*\n)(?=- )")
"""A list without an empty line above, which GitHub renders as a list but Python-Markdown as part of the paragraph."""
NEEDS_GPU = re.compile(r"^```python gpu$", re.MULTILINE)
"""The fence of code that runs on a GPU only: tests read it, and the site shows a title instead."""
LOADED = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//"
    r"|<link\b(?![^>]*\brel=\"?canonical\b)[^>]*\bhref=\"?(?:https?:)?//"
)
"""References that a browser would load from another host. A canonical link, which pages have under `mkdocs serve`, is
the page's own address and not loaded."""
LANGUAGES = {".cu": "cuda", ".cuh": "cuda", ".hip": "cuda", ".def": "c", ".py": "python", ".toml": "toml", "": "bash"}


def on_config(config: MkDocsConfig) -> None:
    """Replace folders in the nav by their pages."""
    config.nav = _expanded(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file or folder that a page links to and that is not a page itself."""
    todo = list(files.documentation_pages())
    while todo:
        page = todo.pop()
        for link, _ in LINK.findall(FENCED.sub("", page.content_string)):
            path = _target(page, link)
            if path is None or not _uri(path).startswith(SHOWN) or files.get_file_from_path(_uri(path)):
                continue
            made = File.generated(config, _uri(path), content=_shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(made)
            todo.append(made)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Rewrite links to the places of their targets in the site, and make lists recognizable to Python-Markdown."""
    here = PurePosixPath(page.file.src_uri).parent

    def moved(found: re.Match[str]) -> str:
        path = _target(page.file, found[1])
        return found[0] if path is None else os.path.relpath(_uri(path), here) + (found[2] or "")

    def mended(part: str) -> str:
        return part if part.startswith("```") else LIST_IN_PARAGRAPH.sub(r"\1\n", LINK.sub(moved, part))

    parts = map(mended, FENCED.split(markdown))
    return NEEDS_GPU.sub('```python title="Needs a GPU"', "".join(parts))


def on_post_page(output: str, page: Page, **_: Any) -> None:
    """Refuse a page that would load something from another host."""
    found = LOADED.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads something from another host: {found[0]}")


def _expanded(item: Any) -> Any:
    if isinstance(item, list):
        return [_expanded(one) for one in item]
    if isinstance(item, dict):
        return {title: _expanded(one) for title, one in item.items()}
    if not item.endswith("/"):
        return item
    pages = sorted((ROOT / DOCS / item).glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return [f"{item}{page.name}" for page in pages]


def _target(page: File, link: str) -> PurePosixPath | None:
    """Return the file or folder of the repository that a link on a page leads to, or None."""
    uri = page.src_uri
    origin = PurePosixPath(uri[len(SHOWN) : -len(".md")]) if uri.startswith(SHOWN) else DOCS / uri
    path = PurePosixPath(os.path.normpath(origin.parent / link))
    return path if path.parts[0] != ".." and (ROOT / path).exists() else None


def _uri(path: PurePosixPath) -> str:
    """Return the place in the site of a file or folder of the repository."""
    if path.is_relative_to(DOCS) and (ROOT / path).is_file() and path.suffix != ".py":
        return str(path.relative_to(DOCS))
    return f"{SHOWN}{path}.md"


def _shown(path: PurePosixPath) -> str:
    """Return a page that shows a file or lists a folder, and is excluded from searches."""
    shown, head = ROOT / path, "---\nsearch: {exclude: true}\nhide: [navigation, toc]\n---\n\n"
    if shown.is_dir():
        names = sorted(p.name for p in shown.iterdir() if not p.name.startswith((".", "__")))
        return head + "\n".join([f"# {path}", "", *(_listed(path / name) for name in names), ""])
    text = shown.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return head + text
    fence = "`" * 6
    return f"{head}# {path}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def _listed(path: PurePosixPath) -> str:
    name = f"`{path.name}`"
    return f"- [{name}]({path.parent.name}/{path.name})" if path.suffix == ".md" else f"- {name}"
