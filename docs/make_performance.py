"""Write docs/performance/index.md, its pictures and the README's section on performance from docs/results/h200.jsonl.

Run it bare to rewrite them, or with --check for an exit status that says whether the texts are current. Every number
comes from the results; without results there is neither a page nor a section.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench import claims, plot, results  # noqa: E402 - the repository is not installed
from bench.goals import Goal, goals  # noqa: E402
from bench.results import BLOCK, DECODE, KINDS, LABELS, LIBRARY, MODES, PEERS, PRODUCTS, Record, Results, us  # noqa: E402

RESULTS: Final = ROOT / "docs" / "results" / "h200.jsonl"
PAGE: Final = ROOT / "docs" / "performance" / "index.md"
IMAGES: Final = ROOT / "docs" / "images"
README: Final = ROOT / "README.md"
BEGIN, END = "<!-- performance -->\n", "<!-- /performance -->\n"

HOW: Final = """Times are microseconds, medians of replayed CUDA graphs, divided by the calls of a graph; variants
are interleaved. Inputs, outputs and weights rotate over 256 MB, so that none of them is in L2; the
activations of products stay warm. Every output is checked before it is timed. Floor: the bytes that a call has to move
at 4.3 TB/s, or its operations at 1,550 TFLOP/s if those take longer. Copy: a copy of as many bytes, half of them read.
Compare within a table: machines differ by more than kernels do. The records, with quartiles, are in
[results/h200.jsonl](../results/h200.jsonl)."""

INVARIANCE: Final = """With `batch_invariant=True` a row has the same bits for any m: the parts of k and their order
are those of 64 rows, and more than 64 rows are products of 64 each, every one of which reads the weight."""

REPRODUCE: Final = """```console
$ python3 -m venv .venv && .venv/bin/pip install --editable '.[cuda13,test,demo]' torch
{commands}
$ .venv/bin/python docs/make_performance.py     # this page, from docs/results/h200.jsonl
$ .venv/bin/python -m bench.plot RESULTS.jsonl  # the pictures of any other results
```

`--peers` names a folder with the kernel libraries of vLLM and SGLang (`vllm_C.so`, `sgl_ops.so`), which are baselines
and no part of the project; what is not found is left out. `python -m bench --help` lists the subjects, `--plan` what
would run."""


FORMER_STEPS: Final = {"of it: looks of three": "of it: signature of three"}
"""What steps were called when some of the results were measured."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> list[str]:
    """Return a table in Markdown, what is right of the ``words`` columns of text to the right."""
    rule = ["---" if place < words else "--:" for place in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, rule, *rows)] + [""]


def number(found: float | None, digits: int = 2) -> str:
    """Return a number, or a dash for none."""
    return "-" if found is None else f"{found:,.{digits}f}"


def timed(record: Record, names: Sequence[str]) -> list[str]:
    """Return the cells of a record: the shape, its floor and the variants' times."""
    wrong = record.get("wrong") or {}
    faults = dict.fromkeys(names, wrong) if isinstance(wrong, str) else wrong
    cells = [number(us(record, name)) if us(record, name) else "wrong" if name in faults else "-" for name in names]
    return [results.shape(record), number(record["floor_us"]), *cells]


def beside_copy(records: Sequence[Record], first: str, label: Callable[[Record], str]) -> list[str]:
    """Return a table of kernels beside the copy of as many bytes."""
    names = results.names(records, ("copy", "fp8core", "vllm", "sgl", "triton", "torch.compile"))
    head = [first, "shape", "floor", *(LABELS[name] for name in names), "of the copy"]
    rows = [[label(r), *timed(r, names), number(results.of_copy(r), 3)] for r in records]
    return table(head, rows)


def odd(records: Sequence[Record]) -> list[str]:
    """Return a table of odd shapes beside their aligned neighbours."""
    head = ["groups", "from", "shape", "fp8core", "neighbour", "neighbour, us", "ratio by bytes"]
    rows = []
    for r in records:
        mine, near = us(r, "fp8core"), results.neighbour_time(r)
        times = [number(mine), r["neighbour"], number(us(r, "neighbour"))]
        rows.append(
            [MODES[r["mode"]], r["x"], results.shape(r), *times, number(mine / near if mine and near else None)]
        )
    return table(head, rows, words=2)


def products(records: Sequence[Record]) -> list[str]:
    """Return a table of products."""
    names = results.names(records, (DECODE, BLOCK, LIBRARY, *PEERS))
    head = ["scales", "m x n x k", "floor", *(LABELS[name] for name in names), "above the floor"]
    rows = []
    for r in sorted(records, key=lambda r: (list(PRODUCTS).index(r["mode"]), r["n"] * r["k"], r["n"], r["m"])):
        mine = results.own(r)
        rows.append([PRODUCTS[r["mode"]], *timed(r, names), number(None if mine is None else mine - r["floor_us"])])
    return table(head, rows)


def invariance(found: Results) -> list[str]:
    """Return a table of products that are free to suit m and of those whose rows must not depend on the batch."""
    rows = []
    for r in found.invariance:
        free, invariant = us(r, "free"), us(r, "invariant")
        more = None if free is None or invariant is None else invariant - free
        kernels = [LABELS.get(r["kernels"][name], r["kernels"][name]) for name in ("free", "invariant")]
        rows.append([PRODUCTS[r["mode"]], *kernels, *timed(r, ("free", "invariant")), number(more)])
    head = ["scales", "free", "invariant", "m x n x k", "floor", "free, us", "invariant, us", "more"]
    said = claims.invariance(found.invariance)
    return [*INVARIANCE.splitlines(), *([f"{said}."] if said else []), "", *table(head, rows, words=3)]


def goal_row(goal: Goal) -> list[str]:
    """Return a goal as a line of the table: what, bound, verdict, and the case that is nearest to it or beyond."""
    if not goal.checks:
        return [goal.what, goal.bound, "not measured", "-"]
    met = sum(check.met for check in goal.checks)
    worst = max(goal.checks, key=lambda check: check.used)
    verdict = "met" if met == len(goal.checks) else "**not met**"
    return [goal.what, goal.bound, f"{verdict}, {met} of {len(goal.checks)}", f"{worst.text} ({worst.case})"]


def machine(found: Results) -> list[str]:
    """Return what was measured, when, with what."""
    about: dict[str, Any] = dict(found.machine)
    facts = [
        ("GPU", about.get("device")),
        ("CUDA driver, runtime", ", ".join(_cuda(about[key]) for key in ("driver", "runtime") if key in about)),
        ("processor", about.get("cpu")),
        ("Python", about.get("python")),
        ("fp8core", about.get("fp8core")),
        *about.get("versions", {}).items(),
        ("baselines found", ", ".join(about.get("peers", []))),
        ("note", about.get("note")),
        ("date", about.get("date")),
    ]
    return table(["measured on", ""], [[str(name), str(fact)] for name, fact in facts if fact], words=2)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def faults(found: Results) -> list[str]:
    """Return what was not timed because its output failed the check, and what did not run."""
    lines = []
    for kind in ("quantize", "odd", "fused", "weights", "decode", "invariance"):
        for r in getattr(found, kind):
            wrong = r.get("wrong") or {}
            named = {"fp8core": wrong} if isinstance(wrong, str) else wrong
            where = " ".join(str(r[key]) for key in ("kind", "mode", "case") if key in r)
            lines += [f"- {LABELS.get(name, name)}, {where} {results.shape(r)}: {why}" for name, why in named.items()]
    for r in found.subject:
        if r.get("skipped") or r.get("status"):
            why = f"skipped, {r['skipped']}" if r.get("skipped") else f"ended with status {r['status']}"
            lines.append(f"- {r['subject']}: {why}")
    return lines


def calls(found: Results) -> list[str]:
    """Return a table of the host times of whole calls, and one of the steps of interop."""
    lines = table(["call on torch tensors", "whose", "us"], _steps(found.calls), words=2) if found.calls else []
    return lines + (
        table(["step of interop", "framework", "us"], _steps(found.overhead), words=2) if found.overhead else []
    )


def _steps(records: Sequence[Record]) -> list[list[str]]:
    return [
        [FORMER_STEPS.get(r["step"], r["step"]), LABELS.get(r["framework"], r["framework"]), number(float(r["us"]))]
        for r in records
    ]


def host(found: Results) -> list[str]:
    """Return a table of the host engine."""
    rows = [
        [r["mode"], number(r["copy_s"] * 1e3), number(r["s"] * 1e3), number(r["rate"], 0), r["unit"]]
        for r in found.host
    ]
    return table(["host engine", "copy, ms", "ms", "rate", ""], rows)


def page(found: Results, pictures: Sequence[str]) -> str:
    """Return the text of docs/performance/index.md."""
    few = [r for r in found.decode if r["m"] <= 64]
    many = [r for r in found.decode if r["m"] > 64]
    asked = found.machine["commands"] or ["python -m bench --out docs/results/h200.jsonl"]
    commands = "\n".join(f"$ .venv/bin/{command}" for command in asked)
    sections: list[tuple[str, Sequence[str], Sequence[str]]] = [
        ("Quantization", ["quantize"], _of(found.quantize, "groups", lambda r: MODES.get(r["mode"], r["mode"]))),
        ("Quantization of odd sizes", [], odd(found.odd) if found.odd else []),
        (
            "Fused producers",
            ["fused"],
            _of(
                found.fused,
                "producer",
                lambda r: f"{KINDS.get(r['kind'], r['kind'])}, {MODES.get(r['mode'], r['mode'])}",
            ),
        ),
        ("Weights", [], _of(found.weights, "kernel", lambda r: r["case"])),
        ("Products of up to 64 rows", [f"products-{mode}" for mode in PRODUCTS], products(few) if few else []),
        ("Products of more rows, and where one kernel takes over", ["crossover"], products(many) if many else []),
        ("Batch invariance", [], invariance(found) if found.invariance else []),
        ("Host time", [], calls(found)),
        ("The host engine", [], host(found) if found.host else []),
        ("Not timed", [], [*faults(found), ""] if faults(found) else []),
    ]
    lines = ["# Performance", "", *HOW.splitlines(), "", *machine(found), "## Goals", ""]
    lines += ["The last column is the case that comes nearest to the bound, or goes furthest beyond it.", ""]
    lines += table(["what", "goal", "verdict", "hardest case"], [goal_row(goal) for goal in goals(found)], words=4)
    for title, images, body in sections:
        shown = [f"![{title}](../images/{name}.png)\n" for name in images if name in pictures]
        if body:
            lines += [f"## {title}", "", *shown, *body]
    lines += ["## How to measure it again", "", *REPRODUCE.format(commands=commands).splitlines()]
    return "\n".join(lines) + "\n"


def _of(records: Sequence[Record], first: str, label: Callable[[Record], str]) -> list[str]:
    return beside_copy(records, first, label) if records else []


def section(found: Results, pictures: Sequence[str]) -> str:
    """Return the README's section: one picture and what it says."""
    if not pictures:
        return ""
    shown = next((name for name in ("quantize", "products-row") if name in pictures), pictures[0])
    points = [claims.quantize(found)] if found.quantize else []
    points += [claims.fused(found)] if found.fused else []
    few = [r for r in found.decode if r["mode"] == "row" and r["m"] in (1, 16)]
    points += [f"{claims.products(few)} ({PRODUCTS['row']})"] if any(us(r, DECODE) for r in few) else []
    where = ", ".join(str(part) for part in (found.device, found.machine.get("date")) if part)
    link = "The tables, the goals that are met and those that are not: [Performance](docs/performance/index.md)."
    return "\n".join(
        [
            "## Performance",
            "",
            f"On one {where}:",
            "",
            *(f"- {point}." for point in points),
            "",
            f"![Times](docs/images/{shown}.png)",
            "",
            link,
            "",
        ]
    )


def texts(found: Results | None) -> dict[Path, str]:
    """Return what the page and the README have to say."""
    readme = README.read_text(encoding="utf-8")
    before, rest = readme.split(BEGIN)
    after = rest.split(END)[1]
    if found is None:
        return {README: f"{before}{BEGIN}{END}{after}"}
    pictures = plot.drawable(found)
    return {PAGE: page(found, pictures), README: f"{before}{BEGIN}{section(found, pictures)}{END}{after}"}


def main() -> int:
    """Rewrite the texts and draw the pictures, or with --check tell whether something would change."""
    found = results.read(RESULTS) if RESULTS.exists() else None
    wanted = texts(found)
    if "--check" in sys.argv[1:]:
        stale = [p for p, text in wanted.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
        missing = [] if found is None else [n for n in plot.drawable(found) if not (IMAGES / f"{n}.png").exists()]
        for what in (
            *(f"{path.name} is not current" for path in stale),
            *(f"no picture {name}.png" for name in missing),
        ):
            print(what, file=sys.stderr)
        return int(bool(stale or missing or (found is None and PAGE.exists())))
    if found is None:
        print(f"no results: run python -m bench --out {RESULTS.relative_to(ROOT)} on a GPU first", file=sys.stderr)
        return 1
    plot.draw(found, IMAGES)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
