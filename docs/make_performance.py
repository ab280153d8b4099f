"""Write the pages of docs/performance, their plots and the README's section from the runs in docs/results.

Run it without arguments to rewrite them; with --check the exit status says whether the texts are current. Every number
comes from the runs, whose records `bench.report.rules` selects. Each GPU of `PAGES` has a page if there are runs on it;
the README's section is about the first.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import plot, results  # noqa: E402 - the repository is not installed
from bench.labels import PRODUCTS  # noqa: E402
from bench.report import claims, rules  # noqa: E402
from bench.report.page import PAGES, Page, page  # noqa: E402
from bench.results import Results, own_kernel  # noqa: E402

DOCS: Final = ROOT / "docs"
RUNS: Final = DOCS / "results"
README: Final = ROOT / "README.md"
BEGIN, END = "<!-- performance -->\n", "<!-- /performance -->\n"

WORDS: Final = {
    "decoder-layer": """The linear path is a decoder layer without its attention, and m the number of tokens. The
floor is the least time that memory at {memory} and the tensor cores allow.""",
}
"""By plot: the explanation of its terms, for readers of the README."""


def section(found: Results, pictures: Sequence[str]) -> str:
    """Return the README's section: one plot and its summary."""
    few = [r for r in found.decode if r["mode"] == "row" and r["m"] in (1, 16)]
    candidates = (
        ("decoder-layer", claims.layer(found)),
        ("products-row", f"{claims.products(few)}, {PRODUCTS['row']}" if any(own_kernel(r) for r in few) else ""),
        ("quantize", claims.quantize(found)),
    )
    shown = next(((name, claim) for name, claim in candidates if name in pictures and claim), None)
    if shown is None:
        return ""
    name, claim = shown
    drawn = {"decoder-layer": found.layer, "products-row": few, "quantize": found.quantize}[name]
    where = ", ".join(part for part in (found.device, results.dates(drawn)) if part)
    return "\n".join(
        [
            "## Performance",
            "",
            f"{claim} (one {where}).",
            *WORDS.get(name, "").format(memory=found.memory).splitlines(),
            "",
            f"![{claim}](docs/images/{name}.png)",
            "",
            "All tables, the goals and which of them are met: [Performance](docs/performance/index.md).",
            "",
        ]
    )


def path_of(one: Page) -> Path:
    """Return the file of a page."""
    return DOCS / "performance" / one.file


def texts(shown: dict[Page, rules.Shown]) -> dict[Path, str]:
    """Return the current texts of the pages and the README."""
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    found = shown[PAGES[0]].found if PAGES[0] in shown else None
    said = section(found, plot.drawable(found)) if found else ""
    pages = {path_of(one): page(of, plot.drawable(of.found), one) for one, of in shown.items()}
    return {**pages, README: f"{before}{BEGIN}{said}{END}{after}"}


def stale(shown: dict[Page, rules.Shown]) -> list[str]:
    """Return what is not current: texts, pictures that are missing, and pages without runs."""
    pictures = [DOCS / one.images / f"{name}.png" for one, of in shown.items() for name in plot.drawable(of.found)]
    old = [p for p, text in texts(shown).items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    return [
        *(f"{path.relative_to(ROOT)} is not current" for path in old),
        *(f"there is no {path.relative_to(ROOT)}" for path in pictures if not path.exists()),
        *(
            f"{path_of(one).relative_to(ROOT)} has no runs"
            for one in PAGES
            if one not in shown and path_of(one).exists()
        ),
    ]


def main() -> int:
    """Rewrite the texts and draw the plots; with --check, return 1 if something would change."""
    shown = {one: of for one in PAGES if (of := rules.shown(RUNS, one.gpu))}
    if "--check" in sys.argv[1:]:
        found = stale(shown)
        print("\n".join(found), file=sys.stderr, end="\n" if found else "")
        return int(bool(found))
    if not shown:
        print(f"no runs in {RUNS.relative_to(ROOT)}: run python -m bench on a GPU first", file=sys.stderr)
        return 1
    for one, of in shown.items():
        plot.draw(of.found, DOCS / one.images)
    for path, text in texts(shown).items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
